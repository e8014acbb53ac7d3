"""A draining worker's progress: one line of it, and following it to its end."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from lorafleet.service.failure import CommandFailed
from lorafleet.service.urls import url_path

if TYPE_CHECKING:
    from lorafleet.cli.client import RestClient

_POLL_S = 0.5


def drain_text(drain: Mapping[str, Any] | None) -> str:
    """How far a worker's drain is, in one line; "" without one."""
    if drain is None:
        return ""
    left = len(drain["left"])
    if drain["phase"] == "drained":
        return f"drained, {left} not moved" if left else "drained"
    parts = [f"{drain['moved']} of {drain['moves']} adapters moved"]
    if drain["phase"] == "finishing":
        return ", ".join([*parts, f"{drain['requests']} requests left"])
    if left:
        parts.append(f"{drain['left_bytes'] / 1e6:.0f} MB left")
    if left > len(drain["stuck"]):
        parts.append(f"about {drain['expected_s']:.0f} s")
    if drain["deadline_in_s"] is not None:
        parts.append(f"at most {drain['deadline_in_s']:.0f} s")
    if drain["stuck"]:
        parts.append(f"{len(drain['stuck'])} fit nowhere now")
    return ", ".join(parts)


def drain_line(item: Mapping[str, Any]) -> str:
    """A worker, its state and its drain's progress, in one line."""
    progress = drain_text(item.get("drain"))
    return f"{item['id']} is {item['state']}" + (f": {progress}" if progress else "")


def follow_drain(api: "RestClient", item: Mapping[str, Any]) -> None:
    """Print each step of the worker's drain until the worker is drained.

    item  the worker as shown last

    Raises CommandFailed when adapters are left at the end, or the worker does not drain any more.
    """
    from lorafleet.cli.client import read_patiently  # noqa: PLC0415  (httpx is imported when the command runs)

    path, shown = f"/v1/workers/{url_path(str(item['id']))}", _step(item)
    while True:
        drain = item.get("drain")
        if item["state"] != "draining":
            raise CommandFailed(f"{item['id']} is {item['state']}: its drain was taken back, or it is gone")
        if drain is not None and drain["phase"] == "drained":
            if drain["left"]:
                raise CommandFailed(
                    f"these adapters of {item['id']} are ready nowhere else: {', '.join(drain['left'])}"
                )
            return
        time.sleep(_POLL_S)
        # 404: the orchestrator was restarted, and has not heard from the worker since.
        item = read_patiently(lambda: api.call("GET", path), passing=(404,))
        if _step(item) != shown:
            typer.echo(drain_line(item))
            shown = _step(item)


def _step(item: Mapping[str, Any]) -> tuple[object, ...]:
    """What makes a new line of progress: the state, the phase and the number of moved adapters."""
    drain = item.get("drain") or {}
    return item["state"], drain.get("phase"), drain.get("moved")
