"""`lorafleet up`: a whole fleet on this machine."""

# ruff: noqa: PLC0415, PLR0917  (a fleet's modules are imported when it starts; Typer passes by name)

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lorafleet.cli.context import default_state_dir

app = typer.Typer(no_args_is_help=True)


class EngineName(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    sgl_jax = "sgl-jax"
    sim = "sim"


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
        typer.Option(help="vllm (default), sglang, sgl-jax, or sim: a simulator of vLLM that needs no GPU"),
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
    tls: Annotated[
        bool,
        typer.Option("--tls", help="HTTPS everywhere, with certificates of a throw-away authority in the state folder"),
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
    from lorafleet.local.up import run_fleet

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
        tls=tls,
    )
    raise typer.Exit(run_fleet(options))
