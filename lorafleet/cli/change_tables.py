"""Tables of changes that are about to be made: a plan's actions, and what a record differs in."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from lorafleet.cli import tables


def plan(actions: Iterable[Mapping[str, Any]]) -> Table:
    """A table of a plan's actions, one row each: what, where, instead of what, size, duration and reason."""
    return tables.table(
        ["pass", "operation", "adapter", "worker", "instead of", "bytes", "seconds", "why"],
        [
            (
                item["turn"],
                item["operation"],
                item["lora_id"] or "(all)",
                item["worker_id"],
                item["evict"],
                item["size_bytes"],
                item["seconds"],
                item["reason"],
            )
            for item in actions
        ],
    )


def plan_lines(answer: Mapping[str, Any]) -> list[str]:
    """Lines below a plan's table: its cost, its targets, and adapters without a place."""
    cost = answer["cost"]
    lines = [
        f"{cost['loads']} loads, {cost['unloads']} unloads; {cost['bytes']:,} bytes; about {cost['seconds']:.1f} s"
    ]
    changes = [f"{name} {change['before']} -> {change['after']}" for name, change in answer["targets"].items()]
    if changes:
        lines.append("replicas wanted: " + ", ".join(changes))
    lines += [f"no place for {name}: {why}" for name, why in sorted(answer["reasons"].items())]
    if answer["is_settled"] is False:
        lines.append("more passes would follow: plan further ahead with --passes")
    return lines


_SHOWN = 60
_DIGEST_DIGITS = 64


def record_changes(changes: Iterable[Mapping[str, Any]]) -> Table:
    """What an import changes, one row each, with the values here and in the record."""
    return tables.table(
        ["change", "subject", "name", "here", "there", "reason"],
        [
            (
                change["change"],
                change["subject"],
                change["name"],
                ", ".join(f"{name}={_short(here)}" for name, (here, _) in change["fields"].items()),
                ", ".join(f"{name}={_short(there)}" for name, (_, there) in change["fields"].items()),
                change["reason"],
            )
            for change in changes
        ],
    )


def _short(value: Any) -> str:
    """A value as text of at most 60 characters; a digest by its first 12, as everywhere."""
    text = "-" if value is None else str(value)
    if len(text) == _DIGEST_DIGITS and text.isalnum():
        return text[:12]
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
