"""`lorafleet top`, live on a terminal, else once."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from lorafleet.cli import tables
from lorafleet.cli.context import FleetAddress, print_json
from lorafleet.cli.top.frame import TopView, frame
from lorafleet.cli.top.orders import AdapterOrder
from lorafleet.cli.top.snapshot import TopReader

_TIMEOUT_S = 5.0
"""A read that takes longer is an error on the screen; it also bounds how long `q` waits for one."""
_LEAST_EVERY_S = 1.0


def run(address: FleetAddress, *, every_s: float, range_s: float, sort: AdapterOrder, as_json: bool) -> None:
    """Show the fleet until `q` on a terminal, else once. Raises CommandFailed if the first read fails."""
    with address.orchestrator(timeout_s=_TIMEOUT_S) as api:
        reader = TopReader(api, range_s)
        first = reader.read()
        out = tables.console()
        if as_json:
            print_json(asdict(first))
        elif not out.is_terminal:
            for line in frame(first, TopView(width=out.width, adapters_by=sort)):
                typer.echo(line.text)
        else:
            from lorafleet.cli.top.screen import TopApp  # noqa: PLC0415  (a pipe needs no screen)

            every_s = max(_LEAST_EVERY_S, every_s)
            TopApp(first, reader.read, lambda: last_decision(address), every_s=every_s, adapters_by=sort).run()


def last_decision(address: FleetAddress) -> Mapping[str, Any] | None:
    """The router's last decision with its terms; None before the first. Raises CommandFailed."""
    with address.router(timeout_s=_TIMEOUT_S) as api:
        found = api.call("GET", "/v1/decisions", limit=1)["data"]
    return found[0] if found else None
