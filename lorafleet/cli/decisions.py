"""Decisions that a router has made: read from its JSON, and made again."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorafleet.cli.client import RestClient
from lorafleet.service.failure import CommandFailed

_HOW = "write one with: lorafleet decisions --json > FILE"

Item = Mapping[str, Any]


def recorded(file: Path) -> list[Item]:
    """The decisions of a file that holds one, several, or all that `GET /v1/decisions` said; `-` is standard input."""
    try:
        said = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text())
    except (OSError, ValueError) as exc:
        raise CommandFailed(f"{file}: {exc}; {_HOW}") from exc
    if isinstance(said, dict) and isinstance(said.get("data"), list):
        said = said["data"]
    items = said if isinstance(said, list) else [said]
    return [_item(file, item) for item in items]


def again(router: RestClient, items: Sequence[Item], policy: str | None) -> list[Item]:
    """Each decision as the router makes it from its record; with a policy, as that one would have made it."""
    changes = {"policy": policy} if policy else {}
    return [router.call("POST", "/v1/decisions/replay", {**item, **changes}) for item in items]


def _item(file: Path, item: Any) -> Item:
    if isinstance(item, dict) and isinstance(item.get("record"), dict):
        return item
    # Only the record itself, without what came of it.
    if isinstance(item, dict) and {"policy", "ask", "replicas"} <= item.keys():
        return {"record": item}
    raise CommandFailed(f"{file}: no decision with its record; {_HOW}")
