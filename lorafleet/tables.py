"""What the CLI prints: lists as tables, single things as `name: value` lines."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

_WIDE = 200


def console() -> Console:
    """Where tables go; wide when nobody sees it, so that a pipe gets whole rows."""
    made = Console(markup=False, highlight=False)
    if not made.is_terminal:
        made.width = _WIDE
    return made


def show(what: RenderableType) -> None:
    console().print(what)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """A table; numbers stand right."""
    body = [[_text(cell) for cell in row] for row in rows]
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        is_number = bool(body) and all(_is_number(row[index]) for row in body)
        made.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in body:
        made.add_row(*row)
    return made


def adapters(items: Iterable[Mapping[str, Any]]) -> Table:
    return table(
        ["lora_id", "state", "ready", "desired", "rank", "digest", "workers", "tenants", "error"],
        [
            (
                item["lora_id"],
                item["state"],
                item["replicas"]["ready"],
                item["replicas"]["desired"],
                item["rank"],
                (item["digest"] or "")[:12],
                ", ".join(item["workers"]),
                "everyone" if item["tenants"] is None else ", ".join(item["tenants"]),
                item.get("error"),
            )
            for item in items
        ],
    )


def aliases(items: Iterable[Mapping[str, Any]]) -> Table:
    def targets(item: Mapping[str, Any]) -> str:
        return ", ".join(f"{target['lora_id']} ({target['weight']:g})" for target in item["targets"])

    return table(["alias", "targets (weight)"], [(item["name"], targets(item)) for item in items])


def placements(items: Iterable[Mapping[str, Any]]) -> Table:
    return table(
        ["lora_id", "worker", "state", "location", "desired"],
        [
            (i["lora_id"], i["worker_id"], i["state"], i["location"], "yes" if i["desired"] else "no")
            for i in sorted(items, key=lambda item: (item["lora_id"], item["worker_id"]))
        ],
    )


def workers(items: Iterable[Mapping[str, Any]]) -> Table:
    return table(
        ["worker", "state", "base model", "adapters", "free slots", "agent", "engine"],
        [
            (
                item["id"],
                item["state"],
                item["base_model"],
                ", ".join(item["adapters"]),
                item["capacity"].get("available_slots"),
                item["agent_url"],
                item["engine_url"],
            )
            for item in sorted(items, key=lambda item: str(item["id"]))
        ],
    )


def fields(item: Mapping[str, Any]) -> Table:
    """One thing, a line a field."""
    return table(["field", "value"], list(item.items()))


def decision(answer: Mapping[str, Any]) -> Table:
    """Every replica's terms of `POST /v1/route`, the winner first, then those that were filtered out and why."""
    names = ["cached_tokens", "prefill_s", "adapter_s", "queue_s", "harm_s", "cost_s"]
    scored = sorted(answer["scores"], key=lambda score: (not score["winner"], score["cost_s"]))
    rows: list[list[object]] = [
        ["->" if score["winner"] else "", score["worker_id"], *(score[name] for name in names), ""] for score in scored
    ]
    rows += [["", item["worker_id"], *[None] * len(names), item["reason"]] for item in answer["rejected"]]
    return table(["", "worker", *(name.replace("_", " ") for name in names), "not considered because"], rows)


def _text(cell: object) -> str:
    match cell:
        case None:
            return "-"
        case float():
            return f"{cell:.4f}"
        case Mapping():
            return ", ".join(f"{name}={_text(value)}" for name, value in cell.items())
        case list() | tuple():
            return ", ".join(map(str, cell))
        case _:
            return str(cell)


def _is_number(text: str) -> bool:
    return text in ("-", "") or text.replace(".", "", 1).isdigit()
