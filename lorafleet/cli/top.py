"""`lorafleet top`: workers and adapters, refreshed live."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from lorafleet.cli import tables
from lorafleet.cli.client import RestClient
from lorafleet.service.failure import CommandFailed


def run(orchestrator: RestClient, *, every_s: float) -> None:
    """Show the fleet until Ctrl-C on a terminal, else once. Raises CommandFailed if the first read fails."""
    first = fleet_tables(orchestrator)
    console = tables.console()
    if not console.is_terminal:
        console.print(first)
        return
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            try:
                live.update(fleet_tables(orchestrator), refresh=True)
            except CommandFailed as exc:
                live.update(Group(Text(f"{exc}\n", style="red"), first), refresh=True)


def fleet_tables(orchestrator: RestClient) -> Group:
    """Read workers and adapters and make their tables; adapters by how many workers have them. Raises CommandFailed."""
    workers = orchestrator.list_all("/v1/workers")
    adapters = orchestrator.list_all("/v1/adapters")
    ready = sum(worker["state"] == "ready" for worker in workers)
    head = f"{time.strftime('%H:%M:%S')}  {ready} of {len(workers)} workers ready, {len(adapters)} adapters\n"
    return Group(Text(head), tables.workers(workers), Text(), tables.adapters(sorted(adapters, key=_by_placements)))


def _by_placements(item: Mapping[str, Any]) -> tuple[int, str]:
    """Sort key: adapters with the most ready replicas first, then by name."""
    return -item["replicas"]["ready"], item["lora_id"]
