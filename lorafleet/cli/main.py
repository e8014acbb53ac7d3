"""The `lorafleet` command. Heavy modules are imported by the command that needs them."""

# ruff: noqa: PLC0415, PLR0917  (`lorafleet --help` must not wait for httpx, rich tables or numpy; Typer passes by name)

import os
import sys
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lorafleet.cli import adapters as adapter_commands
from lorafleet.cli import (
    apply,
    chart,
    completion,
    decisions,
    key_commands,
    logs,
    monitoring,
    pauses,
    plan,
    published,
    record,
    requests,
    rollout,
    services,
)
from lorafleet.cli import workers as worker_commands
from lorafleet.cli.bench import command as bench
from lorafleet.cli.context import FleetAddress, default_state_dir
from lorafleet.cli.push import adapters_push
from lorafleet.service.failure import CommandFailed
from lorafleet.service.files import is_full


class FleetCommands(TyperGroup):
    """The commands, with the global options accepted behind a command as well as before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, the global options first. Raises click's errors."""
        flags = {flag for option in self.params if option.name in _GLOBAL_OPTIONS for flag in option.opts}
        return super().parse_args(ctx, options_first(args, flags, passing_on=services.SERVICES))


_GLOBAL_OPTIONS = ("orchestrator_url", "router_url", "token")


def options_first(args: list[str], flags: Collection[str], passing_on: Collection[str] = ()) -> list[str]:
    """The arguments with these options and their values moved to the front, in their order. All after `--` stays.

    Behind a command in `passing_on` every word stays: they are another program's.

    An option at the end, without a value, goes to the end of the moved ones, where the parser refuses it.
    """
    moved: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--" or (not rest and word in passing_on):
            rest += [word, *words]
        elif word in flags:
            value = next(words, None)
            if value is None:
                return [*moved, word]
            moved += [word, value]
        elif word.partition("=")[0] in flags:
            moved.append(word)
        else:
            rest.append(word)
    return moved + rest


app = typer.Typer(
    cls=FleetCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve many LoRA adapters from one fleet of vLLM workers.\n\nFirst steps: lorafleet up --engine sim --demo",
)


adapter_commands.adapters_app.command("push")(adapters_push)


class EngineName(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    sim = "sim"


def _print_version(is_asked: bool) -> None:
    """Print the version of the package and exit, if the flag is there."""
    from importlib.metadata import version

    if is_asked:
        typer.echo(f"lorafleet {version('lorafleet')}")
        raise typer.Exit


@app.callback()
def set_fleet_address(
    context: typer.Context,
    orchestrator_url: Annotated[
        str, typer.Option(envvar="LORAFLEET_URL_ORCHESTRATOR", help="URL of the orchestrator")
    ] = "http://127.0.0.1:8080",
    router_url: Annotated[
        str, typer.Option(envvar="LORAFLEET_URL_ROUTER", help="URL of the router")
    ] = "http://127.0.0.1:8000",
    token: Annotated[
        str, typer.Option(envvar="LORAFLEET_TOKEN", help="API key, if the fleet needs one", show_default=False)
    ] = "",
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
    ] = False,
) -> None:
    """Global options, before or after the command: where the services are, and the API key."""
    context.obj = FleetAddress(orchestrator_url, router_url, token)


class _EngineArgumentsCommand(TyperCommand):
    """A command whose error for an unknown option mentions that engine arguments go behind `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; raises click's errors, of which an unknown option's gets the hint."""
        try:
            return super().parse_args(ctx, args)
        except Exception as exc:
            if type(exc).__name__ == "NoSuchOption":  # click's, which Typer bundles in some versions
                exc.message = f"{exc}; arguments for the engine go behind `--`"  # type: ignore[attr-defined]
            raise


_CONFIG_HELP = "YAML file with settings of the {}, as its own --config; variables LORAFLEET_{}_... override it"


@app.command(cls=_EngineArgumentsCommand)
def up(
    engine_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ENGINE ARGUMENT",
            help="behind `--`: arguments for every engine, as for `vllm serve`",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="vllm (default), sglang, or sim: a simulator of vLLM that needs no GPU"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, help="number of engines, each with its agent; default 2, or as many as the GPUs hold"
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="folder of the base model; default: a tiny model that is created")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="folder of adapters: every folder in it with an adapter_config.json is one")
    ] = None,
    max_loras: Annotated[
        int | None, typer.Option(min=1, max=1024, help="adapters on one engine at a time; default 2")
    ] = None,
    max_lora_rank: Annotated[
        int | None,
        typer.Option(min=1, help="largest rank of an adapter; default: what the folder's adapters need, at least 16"),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="GPUs as in CUDA_VISIBLE_DEVICES, such as 0,1,2,3; divided evenly among the workers; "
            "default: each worker gets its own of those that are visible",
            show_default=False,
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="one argument for every engine; repeat: --engine-arg=--dtype --engine-arg=bfloat16"),
    ] = None,
    router_port: Annotated[int | None, typer.Option(min=0, max=65535, help="default 8000; 0 picks a free one")] = None,
    orchestrator_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="default 8080; 0 picks a free one")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="folder for store, models and logs; default ~/.local/state/lorafleet", show_default=False),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="API keys (see `lorafleet keys new`); without it no key is needed")
    ] = None,
    upload_store: Annotated[
        str | None,
        typer.Option(help="folder or s3://bucket/folder that keeps uploaded adapters; default: the workers themselves"),
    ] = None,
    router_config: Annotated[Path | None, typer.Option(help=_CONFIG_HELP.format("router", "ROUTER"))] = None,
    orchestrator_config: Annotated[
        Path | None, typer.Option(help=_CONFIG_HELP.format("orchestrator", "ORCHESTRATOR"))
    ] = None,
    workers_config: Annotated[Path | None, typer.Option(help=_CONFIG_HELP.format("workers' agents", "WORKERS"))] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="when ready, send four requests and show where each went")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="stop when ready (and the demo done)")] = False,
    open_console: Annotated[
        bool, typer.Option("--open", help="when ready, open the console in the default browser, where there is one")
    ] = False,
) -> None:
    """Start a whole fleet on this machine; Ctrl-C stops it.

    Prints one line `ready router=... orchestrator=...` when it is ready. All services listen on loopback.

    Arguments behind `--` go to every engine. The services' settings come from the environment
    (LORAFLEET_ROUTER_..., LORAFLEET_ORCHESTRATOR_..., LORAFLEET_WORKERS_...), see docs/configuration.md.

    Examples:

      lorafleet up --engine sim --workers 8 --demo

      lorafleet up --model ./Qwen2.5-0.5B --adapters ./my-adapters --max-loras 4

      lorafleet up --model ./Qwen2.5-7B --devices 0,1 -- --enable-auto-tool-choice --tool-call-parser hermes

      lorafleet up --model ./Qwen2.5-7B --devices 0,1,2,3 --workers 2 -- --tensor-parallel-size 2
    """
    from lorafleet.engine.devices import visible_gpus
    from lorafleet.local.options import fleet_options
    from lorafleet.local.up import run

    options = fleet_options(
        engine=engine and engine.value,
        workers=workers,
        model=model,
        adapters=adapters,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        upload_store=upload_store,
        router_port=router_port,
        orchestrator_port=orchestrator_port,
        state_dir=state_dir or default_state_dir(),
        key_file=key_file,
        configs={"router": router_config, "orchestrator": orchestrator_config, "workers": workers_config},
        devices=devices,
        engine_arguments=[*(engine_arg or ()), *(engine_arguments or ())],
        environment=os.environ,
        gpus=visible_gpus(os.environ, (file.name for file in Path("/dev").iterdir())),
        demo=demo,
        once=once,
        opens_console=open_console,
    )
    raise typer.Exit(run(options))


for name, group in (
    ("adapters", adapter_commands.adapters_app),
    ("aliases", adapter_commands.aliases_app),
    ("rollout", rollout.app),
    ("workers", worker_commands.workers_app),
    ("policy", worker_commands.policy_app),
    ("published", published.app),
    ("pauses", pauses.app),
    ("keys", key_commands.keys_app),
    ("chart", chart.app),
):
    app.add_typer(group, name=name)
for commands in (
    worker_commands.app,
    decisions.app,
    requests.app,
    plan.app,
    record.app,
    monitoring.app,
    completion.app,
    logs.app,
    services.app,
    apply.app,
    bench.app,
):
    app.add_typer(commands)


def main() -> None:
    """Run the command line; a CommandFailed becomes one line on stderr and its exit status, an interrupt status 130."""
    _open_closed_streams()
    try:
        app()
    except CommandFailed as exc:
        sys.stdout.flush()
        typer.echo(f"lorafleet: {exc}", err=True)
        raise SystemExit(exc.status) from None
    except OSError as exc:  # click handles a closed pipe
        if not is_full(exc):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else what is still buffered fails again at the exit
        typer.echo(f"lorafleet: the output cannot be written: {exc}; make room", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _open_closed_streams() -> None:
    """Read nothing from a standard stream that the caller has closed, as by `2>&-`, and drop what is written to it.

    Python has None in its place, and the next file or connection would get its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  (open until the end)
