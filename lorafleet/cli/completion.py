"""Shell completion: the script of each shell, and the names that the fleet has."""

# ruff: noqa: PLC0415  (httpx is imported when a name is completed)

from enum import StrEnum
from typing import Annotated

import typer

from lorafleet.cli.context import FleetAddress
from lorafleet.service.failure import CommandFailed

app = typer.Typer(no_args_is_help=True)

# A person waits for it, with the cursor in the middle of a line.
_TIMEOUT_S = 1.0
_MOST = 1000


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


def adapter_names(context: typer.Context, incomplete: str) -> list[str]:
    """lora_ids that begin with `incomplete`; none when the orchestrator does not answer within a second."""
    return _names(context, "/v1/adapters", "lora_id", incomplete)


def alias_names(context: typer.Context, incomplete: str) -> list[str]:
    """Aliases that begin with `incomplete`, as `adapter_names`."""
    return _names(context, "/v1/aliases", "name", incomplete)


def published_names(context: typer.Context, incomplete: str) -> list[str]:
    """Published names that begin with `incomplete`, as `adapter_names`."""
    return _names(context, "/v1/published", "name", incomplete)


def worker_names(context: typer.Context, incomplete: str) -> list[str]:
    """Workers that begin with `incomplete`, as `adapter_names`."""
    return _names(context, "/v1/workers", "id", incomplete)


AdapterName = Annotated[str, typer.Argument(metavar="LORA_ID", autocompletion=adapter_names)]
AliasName = Annotated[str, typer.Argument(metavar="ALIAS", autocompletion=alias_names)]
PublishedName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=published_names)]
WorkerName = Annotated[str, typer.Argument(metavar="WORKER", autocompletion=worker_names)]


def _names(context: typer.Context, path: str, field: str, incomplete: str) -> list[str]:
    """A field of the items of a list's first page, where it begins with `incomplete`; none after any failure."""
    from lorafleet.cli.client import RestClient

    given = context.find_root().params
    address = FleetAddress(given["orchestrator_url"], given["router_url"], given["token"])
    try:
        with RestClient(address.orchestrator_url, address.token, timeout_s=_TIMEOUT_S) as api:
            items = api.call("GET", path, limit=_MOST)["data"]
            return sorted(name for item in items if (name := str(item[field])).startswith(incomplete))
    except (CommandFailed, KeyError, TypeError):
        return []  # A message would be in the middle of the line that is being typed.
