"""The `lorafleet` command. Heavy modules are imported by the command that needs them."""

# ruff: noqa: PLC0415  (`lorafleet --help` must not wait for httpx, rich tables or numpy; Typer passes by name)

import os
import sys
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lorafleet.cli import adapters, history, keys, login, names, usage, workers
from lorafleet.cli.bench import command as bench
from lorafleet.cli.changes import apply, plan, record
from lorafleet.cli.context import FleetAddress
from lorafleet.cli.decisions import commands as decisions
from lorafleet.cli.decisions import kv_tree
from lorafleet.cli.local import folders, logs, monitoring, services, up
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
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="LORAFLEET_TLS_CA",
            help="PEM file with the authority of the services' certificates; default: public authorities",
            show_default=False,
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
    ] = False,
) -> None:
    """Global options, before or after the command: where the services are, and the API key."""
    context.obj = FleetAddress(orchestrator_url, router_url, token, tls_ca)


class ShellName(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@app.command("completion")
def print_script(shell: ShellName) -> None:
    """Print the script that completes commands, flags, and names of adapters, aliases and workers.

    Examples:

      source <(lorafleet completion bash)

      lorafleet completion zsh > ~/.zfunc/_lorafleet

      lorafleet completion fish > ~/.config/fish/completions/lorafleet.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # imported there, not exported

    typer.echo(get_completion_script(prog_name="lorafleet", complete_var="_LORAFLEET_COMPLETE", shell=shell.value))


adapters.adapters_app.command("push")(folders.adapters_push)
adapters.adapters_app.command("certify")(folders.adapters_certify)
adapters.adapters_app.command("rename-modules")(folders.adapters_rename_modules)
for name, group in (
    ("adapters", adapters.adapters_app),
    ("orphans", adapters.orphans_app),
    ("aliases", names.aliases_app),
    ("rollout", names.rollout_app),
    ("published", names.published_app),
    ("workers", workers.workers_app),
    ("policy", workers.policy_app),
    ("pauses", workers.pauses_app),
    ("keys", keys.keys_app),
    ("chart", monitoring.chart_app),
    ("kv", kv_tree.kv_app),
    ("store", services.stores),
):
    app.add_typer(group, name=name)
for part in (up, workers, decisions, plan, record, apply, history, usage, login, monitoring, logs, services, bench):
    app.add_typer(part.app)


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
