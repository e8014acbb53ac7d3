"""Shell completion: the script of each shell, and the names that the fleet has."""

# ruff: noqa: PLC0415  (httpx is imported when a name is completed)

from collections.abc import Callable
from enum import StrEnum

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


def names_of(route: str, field: str) -> Callable[[typer.Context, str], list[str]]:
    """What completes the names of a list: those of its first page that begin with the typed letters.

    None when the orchestrator does not answer within a second, or refuses.
    """

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        from lorafleet.cli.client import RestClient

        given = context.find_root().params
        address = FleetAddress(given["orchestrator_url"], given["router_url"], given["token"])
        try:
            with RestClient(address.orchestrator_url, address.token, timeout_s=_TIMEOUT_S) as api:
                items = api.call("GET", route, limit=_MOST)["data"]
                return sorted(name for item in items if (name := str(item[field])).startswith(incomplete))
        except (CommandFailed, KeyError, TypeError):
            return []  # A message would be in the middle of the line that is being typed.

    return complete
