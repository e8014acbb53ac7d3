"""`lorafleet router`, `orchestrator` and `agent`: one service as this process; `store copy`: between two stores."""

# ruff: noqa: PLC0415  (a service's settings are imported for its help and completion alone)

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lorafleet.service.failure import CommandFailed
from lorafleet.service.network.urls import has_database_password

if TYPE_CHECKING:
    from lorafleet.service.settings import ServiceSettings

app = typer.Typer(no_args_is_help=True)
stores = typer.Typer(no_args_is_help=True, help="An orchestrator's store: copy it into another.")
_MODULES = {
    "router": "router",
    "orchestrator": "orchestrator",
    "agent": "workers",
    "store copy": "orchestrator.store_copy",
}
SERVICES = frozenset({"router", "orchestrator", "agent"})
"""Commands whose flags are a service's own: none of them is a global option of `lorafleet`."""
_HELP = ("--help", "-h")


def _settings_of(name: str) -> "type[ServiceSettings]":
    """The settings of the service that a command runs."""
    match name:
        case "router":
            from router.config import RouterSettings

            return RouterSettings
        case "orchestrator":
            from orchestrator.config import OrchestratorSettings

            return OrchestratorSettings
        case _:
            from workers.config import WorkerSettings

            return WorkerSettings


class _ServiceCommand(TyperCommand):
    """A command that passes all its words on. Its help and completion have the settings of the service."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words as they are, `--` included; `--help` before it prints our help."""
        own = args[: args.index("--")] if "--" in args else args
        if not ctx.resilient_parsing and any(flag in own for flag in _HELP):
            return super().parse_args(ctx, ["--help"])
        super().parse_args(ctx, [])
        ctx.args = kept = list(args)
        return kept

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the flags of the service, with what each means."""
        fields = _settings_of(str(self.name)).model_fields.items()
        with formatter.section("Options"):
            formatter.write_dl([(_setting_flag(name), field.description or "") for name, field in fields])
        super().format_options(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Flags of the service that begin with `incomplete`."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        item = type(super().shell_complete(ctx, _HELP[0])[0])  # click's, which Typer bundles in some versions
        flags = (_setting_flag(name) for name in _settings_of(str(self.name)).model_fields)
        return [*found, *(item(flag) for flag in flags if flag.startswith(incomplete))]


def _setting_flag(name: str) -> str:
    """A setting's flag."""
    return f"--{name.replace('_', '-')}"


@app.command("router", cls=_ServiceCommand)
def router(context: typer.Context) -> None:
    """Run a router in this terminal, as `python -P -m router` does.

    Examples:

      lorafleet router --orchestrator-url http://127.0.0.1:8080 --port 8000

      lorafleet router --config router.yaml --processes 4
    """
    _become_service("router", context.args)


@app.command("orchestrator", cls=_ServiceCommand)
def orchestrator(context: typer.Context) -> None:
    """Run an orchestrator in this terminal, as `python -P -m orchestrator` does.

    Example: lorafleet orchestrator --store fleet.db --port 8080
    """
    _become_service("orchestrator", context.args)


@app.command("agent", cls=_ServiceCommand)
def agent(context: typer.Context) -> None:
    """Run a worker's agent, which starts its engine, as `python -P -m workers` does.

    Behind `--` comes a command of your own that starts the engine.

    Examples:

      lorafleet agent --model ./Qwen2.5-0.5B --orchestrator-url http://127.0.0.1:8080

      lorafleet agent --engine sglang --model ./m -- python -m sglang.launch_server --model-path ./m
    """
    _become_service("agent", context.args)


@stores.command("copy", no_args_is_help=True)
def copy_store(
    source: Annotated[str, typer.Argument(metavar="FROM", help="an SQLite file, or postgresql://user@host/database")],
    target: Annotated[str, typer.Argument(metavar="TO", help="a new file, or an empty database")],
) -> None:
    """Copy an orchestrator's store, with history and counters, into an empty one. Stop the orchestrators first.

    A password comes from PGPASSWORD or the file that PGPASSFILE names.

    Example: PGPASSFILE=~/.pgpass lorafleet store copy fleet.db postgresql://fleet@db.example/fleet
    """
    if any(map(has_database_password, (source, target))):
        raise CommandFailed("every user sees a password on a command line; give it in PGPASSWORD or a PGPASSFILE")
    if find_spec("psycopg") is None:
        raise CommandFailed("a PostgreSQL store needs psycopg; pip install 'lorafleet[postgresql]'")
    _become_service("store copy", [source, target])


def _become_service(name: str, words: list[str]) -> None:
    """Replace this process by the program, which so gets the signals. Raises CommandFailed where it cannot be run."""
    sys.stdout.flush()
    # -P: a router.py in the current folder is another program.
    try:
        os.execv(sys.executable, [sys.executable, "-P", "-m", _MODULES[name], *words])  # noqa: S606  (no shell is wanted)
    except OSError as exc:
        raise CommandFailed(f"{name}: {sys.executable}: {exc.strerror}; install lorafleet into an environment") from exc
