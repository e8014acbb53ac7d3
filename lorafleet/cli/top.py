"""`lorafleet top`: workers and adapters, again and again; once when nobody watches."""

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
    """Until Ctrl-C on a terminal; else print once. Raises Failure when the first look fails."""
    first = picture(orchestrator)
    console = tables.console()
    if not console.is_terminal:
        console.print(first)
        return
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            try:
                live.update(picture(orchestrator), refresh=True)
            except CommandFailed as exc:
                live.update(Group(Text(f"{exc}\n", style="red"), first), refresh=True)


def picture(orchestrator: RestClient) -> Group:
    """The fleet now: workers, then adapters, those on most workers first."""
    workers = orchestrator.every("/v1/workers")
    adapters = orchestrator.every("/v1/adapters")
    ready = sum(worker["state"] == "ready" for worker in workers)
    head = f"{time.strftime('%H:%M:%S')}  {ready} of {len(workers)} workers ready, {len(adapters)} adapters\n"
    return Group(Text(head), tables.workers(workers), Text(), tables.adapters(sorted(adapters, key=_most_placed)))


def _most_placed(item: Mapping[str, Any]) -> tuple[int, str]:
    return -item["replicas"]["ready"], item["lora_id"]
