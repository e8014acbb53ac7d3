"""The addresses of orchestrator and router, and small parts that several commands share."""

# ruff: noqa: PLC0415  (httpx is imported when a command needs it)

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lorafleet.service.failure import CommandFailed

if TYPE_CHECKING:
    from lorafleet.cli.client import RestClient
    from lorafleet.client import Fleet

# A person waits for a completed name, with the cursor in the middle of a line.
_COMPLETION_TIMEOUT_S = 1.0
_MOST_NAMES = 1000
LONG_TIMEOUT_S = 300.0
"""For calls about a whole fleet, which may have ten thousands of adapters."""


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """URLs of orchestrator and router, the API key to send, and the authority of their certificates."""

    orchestrator_url: str
    router_url: str
    token: str
    ca: Path | None = None

    def orchestrator(self, timeout_s: float = 30.0) -> "RestClient":
        """A client of the orchestrator."""
        from lorafleet.cli.client import RestClient

        flag = "lorafleet --orchestrator-url"
        return RestClient(self.orchestrator_url, self.token, flag=flag, ca=self.ca, timeout_s=timeout_s)

    def fleet(self) -> "Fleet":
        """A client for uploads to the orchestrator. Raises CommandFailed with status 2 for a bad address or key."""
        import httpx

        from lorafleet.cli.client import verify_by
        from lorafleet.client import Fleet

        with self.orchestrator() as checked:
            # As every other command: no proxy from the environment.
            return Fleet(checked.url, self.token, client=httpx.Client(trust_env=False, verify=verify_by(self.ca)))

    def router(self, timeout_s: float = 30.0) -> "RestClient":
        """A client of the router."""
        from lorafleet.cli.client import RestClient

        flag = "lorafleet --router-url"
        return RestClient(self.router_url, self.token, flag=flag, ca=self.ca, timeout_s=timeout_s)


def default_state_dir() -> Path:
    """Where a local fleet's state is: the folder `lorafleet` in XDG_STATE_HOME, or in ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "lorafleet"


def named_tenants(tenants: Sequence[str] | None, everyone: bool = False) -> list[str] | None:
    """The tenants that `--tenant` names; None without any.

    Raises CommandFailed for an empty name, and beside --everyone.
    """
    if tenants and everyone:
        raise CommandFailed("name one: --tenant, or --everyone", status=2)
    if any(not tenant.strip() for tenant in tenants or ()):
        raise CommandFailed("--tenant: expected a tenant's name, found an empty one", status=2)
    return list(tenants) if tenants else None


def if_match_header(etag: str | None) -> dict[str, str]:
    """The `If-Match` header for an etag, quoted if it is not yet; none without an etag."""
    return {} if etag is None else {"if-match": etag if etag == "*" else f'"{etag.strip(chr(34))}"'}


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    typer.echo(json.dumps(value, indent=2))


def parse_setting(text: str, names: str = "lorafleet policy show") -> tuple[str, Any]:
    """The name and the YAML value of `name=value`; raises CommandFailed.

    names  the command that lists the names
    """
    from lorafleet.service import yamls

    name, equals, value = text.partition("=")
    if not equals:
        raise CommandFailed(f"{text}: write NAME=VALUE; `{names}` has the names", status=2)
    try:
        return name.strip().replace("-", "_"), yamls.parse_yaml(value)
    except yamls.InvalidYaml as exc:
        raise CommandFailed(
            f"{text[:200]}: the value is not YAML ({str(exc).splitlines()[0]}); put text in quotes", status=2
        ) from exc


def names_of(route: str, field: str) -> Callable[[typer.Context, str], list[str]]:
    """A shell completion of names: those on the first page of a list that begin with the typed letters.

    It offers no names when the orchestrator refuses, or does not answer within a second.
    """

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        given = context.find_root().params
        address = FleetAddress(given["orchestrator_url"], given["router_url"], given["token"], given["tls_ca"])
        try:
            with address.orchestrator(_COMPLETION_TIMEOUT_S) as api:
                items = api.call("GET", route, limit=_MOST_NAMES)["data"]
                return sorted(name for item in items if (name := str(item[field])).startswith(incomplete))
        except (CommandFailed, KeyError, TypeError):
            return []  # A message would be in the middle of the line that is being typed.

    return complete
