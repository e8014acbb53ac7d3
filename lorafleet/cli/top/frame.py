"""The lines of `lorafleet top` at a width: rows fold by importance, and no value is cut."""

import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lorafleet.cli.decisions import explanations
from lorafleet.cli.top.orders import AdapterOrder, WorkerOrder
from lorafleet.cli.top.snapshot import AdapterLine, TopSnapshot, TrafficLine, WorkerLine
from lorafleet.service.failure import printable

Row = TypeVar("Row")
_GAP = "  "
_FOLDED = "    "


@dataclass(frozen=True, slots=True)
class FrameLine:
    """One line of text and its style, as rich names it."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class TopColumn(Generic[Row]):
    """A column. Those of the least `importance` leave the row first, for lines below it."""

    title: str
    importance: int
    cell: Callable[[Row], str]


@dataclass(frozen=True, slots=True)
class TopView:
    """How a snapshot is shown. `rows`: most adapters; None: all."""

    width: int
    adapters_by: AdapterOrder = AdapterOrder.requests
    workers_by: WorkerOrder = WorkerOrder.load
    is_paused: bool = False
    rows: int | None = None


WORKER_COLUMNS: Sequence[TopColumn[WorkerLine]] = (
    TopColumn("worker", 99, lambda row: row.id),
    TopColumn("state", 90, lambda row: row.state),
    TopColumn("circuit", 85, lambda row: row.circuit or "closed"),
    TopColumn("kv", 80, lambda row: _percent_text(row.kv_usage)),
    TopColumn("run", 75, lambda row: _figure_text(row.running)),
    TopColumn("wait", 70, lambda row: _figure_text(row.waiting)),
    TopColumn("free", 65, lambda row: _figure_text(row.free_slots)),
    TopColumn("req/s", 60, lambda row: _figure_text(row.traffic.requests_per_s)),
    TopColumn("p95 s", 55, lambda row: _seconds_text(row.traffic.first_token_p95_s)),
    TopColumn("hit", 50, lambda row: _percent_text(row.traffic.hit_share)),
    TopColumn("err/s", 45, lambda row: _figure_text(row.traffic.errors_per_s)),
    TopColumn("has", 40, lambda row: str(row.adapters)),
)
ADAPTER_COLUMNS: Sequence[TopColumn[AdapterLine]] = (
    TopColumn("adapter", 99, lambda row: row.name),
    TopColumn("state", 90, lambda row: row.state or "-"),
    TopColumn("ready", 85, lambda row: "-" if row.ready is None else f"{row.ready}/{row.desired}"),
    TopColumn("req/s", 80, lambda row: _figure_text(row.traffic.requests_per_s)),
    TopColumn("err/s", 70, lambda row: _figure_text(row.traffic.errors_per_s)),
    TopColumn("p50 s", 60, lambda row: _seconds_text(row.traffic.first_token_p50_s)),
    TopColumn("p95 s", 75, lambda row: _seconds_text(row.traffic.first_token_p95_s)),
    TopColumn("hit", 65, lambda row: _percent_text(row.traffic.hit_share)),
    TopColumn("tok/s", 55, lambda row: _figure_text(row.traffic.output_tokens_per_s)),
    TopColumn("cold", 50, lambda row: str(row.traffic.cold_starts)),
    TopColumn("queue s", 40, lambda row: _seconds_text(row.traffic.waited_s)),
    TopColumn("error", 10, lambda row: row.error),
)


def frame(snapshot: TopSnapshot, view: TopView) -> list[FrameLine]:
    """All lines of a snapshot, none wider than the view."""
    workers = sorted(snapshot.workers, key=_worker_key(view.workers_by))
    adapters = sorted(snapshot.adapters, key=_adapter_key(view.adapters_by))
    shown = adapters[: view.rows]
    lines = [*head(snapshot, view), FrameLine("")]
    lines += [
        *_section_title("WORKERS", f"by {view.workers_by}", view.width),
        *rows(WORKER_COLUMNS, workers, view.width),
    ]
    lines += [FrameLine(""), *_section_title("ADAPTERS", f"by {view.adapters_by}", view.width)]
    lines += rows(ADAPTER_COLUMNS, shown, view.width)
    if len(adapters) > len(shown):
        lines += _wrapped_lines([f"{len(adapters) - len(shown)} more: lorafleet adapters list"], view.width, "dim")
    return lines


def head(snapshot: TopSnapshot, view: TopView) -> list[FrameLine]:
    """The fleet's own lines: how much of it is there, its traffic, its errors by code, and who waits."""
    fleet = snapshot.fleet
    ready = sum(worker.state == "ready" for worker in snapshot.workers)
    adapters = sum(adapter.ready is not None for adapter in snapshot.adapters)
    about = [
        time.strftime("%H:%M:%S", time.localtime(snapshot.at)),
        f"{ready} of {len(snapshot.workers)} workers ready",
        f"{adapters} adapters",
        *([] if snapshot.routers is None else [f"{snapshot.routers} routers"]),
        f"last {snapshot.range_s:g} s",
        *(["PAUSED"] if view.is_paused else []),
    ]
    figures = [
        f"requests/s {_figure_text(fleet.requests_per_s)}",
        f"first token p50 {_seconds_text(fleet.first_token_p50_s)} s p95 {_seconds_text(fleet.first_token_p95_s)} s",
        f"tokens/s {_figure_text(fleet.output_tokens_per_s)} out {_figure_text(fleet.prompt_tokens_per_s)} in",
        f"hit share {_percent_text(fleet.hit_share)} predicted {_percent_text(fleet.hit_share_predicted)}",
        f"in flight {snapshot.in_flight}",
        f"waiting {sum(snapshot.waiting.values())}",
        f"held {sum(snapshot.held.values())}",
        f"errors/s {_figure_text(fleet.errors_per_s)}",
        f"refused/s {_figure_text(fleet.refusals_per_s)}",
    ]
    lines = [*_wrapped_lines(about, view.width, "bold"), *_wrapped_lines(figures, view.width)]
    if fleet.codes:
        counts = sorted(fleet.codes.items(), key=lambda item: (-item[1], item[0]))
        lines += _wrapped_lines(["errors:", *(f"{code} x{count}" for code, count in counts)], view.width, "red")
    if any((*snapshot.waiting.values(), *snapshot.held.values())):
        lines += _wrapped_lines(["who waits:", *_waiting_by_tenant(snapshot)], view.width, "yellow")
    return lines + (_wrapped_lines([snapshot.note], view.width, "red") if snapshot.note else [])


def _waiting_by_tenant(snapshot: TopSnapshot) -> Iterable[str]:
    """A text for each tenant that has requests waiting, the one with the most first."""
    tenants = snapshot.waiting.keys() | snapshot.held.keys()

    def counts(tenant: str) -> tuple[int, int]:
        """Requests that wait for room, and for an adapter."""
        return snapshot.waiting.get(tenant, 0), snapshot.held.get(tenant, 0)

    for tenant in sorted(tenants, key=lambda tenant: (-sum(counts(tenant)), tenant)):
        room, adapter = counts(tenant)
        yield f"{tenant or 'no tenant'} {room} for room, {adapter} for an adapter"


def rows(columns: Sequence[TopColumn[Row]], items: Sequence[Row], width: int) -> list[FrameLine]:
    """A table of the width. Columns that do not fit are lines below their row, as `title value`; "-" is left out."""
    cells = [[printable(column.cell(item)) for column in columns] for item in items]
    widths = [max([len(column.title), *(len(row[index]) for row in cells)]) for index, column in enumerate(columns)]
    kept = fitting(widths, [column.importance for column in columns], width)
    lines = _row_lines(_row_line([column.title for column in columns], widths, kept), width, "bold")
    for row in cells:
        lines += _row_lines(_row_line(row, widths, kept), width, "")
        folded = [f"{columns[index].title} {row[index]}" for index in range(len(columns)) if index not in kept]
        values = [text for text, cell in zip(folded, _dropped_cells(row, kept), strict=True) if cell not in ("-", "")]
        lines += _wrapped_lines(values, width, "dim", _FOLDED)
    return lines


def _dropped_cells(row: Sequence[str], kept: Iterable[int]) -> list[str]:
    """The cells of columns that are not kept."""
    return [cell for index, cell in enumerate(row) if index not in kept]


def fitting(widths: Sequence[int], importance: Sequence[int], room: int) -> list[int]:
    """Indices of the columns that fit side by side, the most important ones; the first is always there."""
    kept, used = {0}, widths[0]
    for index in sorted(range(1, len(widths)), key=lambda index: -importance[index]):
        if used + len(_GAP) + widths[index] > room:
            break  # A less important column must not take the place of a more important one.
        kept.add(index)
        used += len(_GAP) + widths[index]
    return sorted(kept)


def _row_line(cells: Sequence[str], widths: Sequence[int], kept: Sequence[int]) -> str:
    """One line of the kept cells; the first two are text, at the left, the others are figures, at the right."""
    shown = [cells[i].ljust(widths[i]) if i < 2 else cells[i].rjust(widths[i]) for i in kept]
    return _GAP.join(shown).rstrip()


def _row_lines(text: str, width: int, style: str) -> list[FrameLine]:
    """A row, over several lines only if its name alone is wider than the screen."""
    return [FrameLine(text[start : start + width], style) for start in range(0, max(1, len(text)), max(1, width))]


def _section_title(name: str, order: str, width: int) -> list[FrameLine]:
    """A section's heading."""
    return _wrapped_lines([name, order], width, "bold cyan")


def _wrapped_lines(parts: Sequence[str], width: int, style: str = "", indent: str = "") -> list[FrameLine]:
    """The parts with gaps between them, a new line where the next part does not fit; long parts break at words."""
    lines: list[str] = []
    room = max(1, width - len(indent))
    for part in parts:
        text = printable(part)
        if lines and len(lines[-1]) + len(_GAP) + len(text) <= room:
            lines[-1] += _GAP + text
        else:
            lines += textwrap.wrap(text, room) or [""]
    return [FrameLine(indent + line, style) for line in lines]


def explanation(item: Mapping[str, Any], width: int) -> list[FrameLine]:
    """One decision as lines: its summary, every replica with its cost terms, and who was not considered."""
    scored = sorted(item["scores"], key=lambda score: (not score["winner"], score["passed_over"], score["cost_s"]))
    terms = [name for name in scored[0] if name.endswith("_s")] if scored else []
    columns: list[TopColumn[Mapping[str, Any]]] = [
        TopColumn("worker", 99, lambda row: f"{'->' if row['winner'] else '  '} {row['worker_id']}"),
        TopColumn("trust", 80, lambda row: row["trust"] or "-"),
        TopColumn("cached", 90, lambda row: str(row["cached_tokens"])),
    ]
    columns += [
        # The sum comes first, then the terms in the router's order.
        TopColumn(name.removesuffix("_s") + " s", 95 if name == "cost_s" else 70 - place, _cost_term_cell(name))
        for place, name in enumerate(terms)
    ]
    lines = _wrapped_lines([f"request {item['request_id']}"], width, "bold") if item.get("request_id") else []
    for text in explanations.decision_summary(item).splitlines():
        lines += _wrapped_lines([text], width)
    lines += [FrameLine(""), *rows(columns, scored, width)] if scored else []
    for text in [*explanations.not_considered_lines(item), item.get("note") or ""]:
        lines += _wrapped_lines([text], width, "dim") if text else []
    return lines


def _cost_term_cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    """The cell of a cost term."""
    return lambda row: "-" if row[name] is None else f"{row[name]:.4f}"


def _worker_key(order: WorkerOrder) -> Callable[[WorkerLine], tuple[float, str]]:
    """The sort key of workers, the largest figure first."""
    figures: Mapping[WorkerOrder, Callable[[WorkerLine], float | None]] = {
        WorkerOrder.load: lambda row: (row.running or 0) + (row.waiting or 0),
        WorkerOrder.kv: lambda row: row.kv_usage,
        WorkerOrder.waiting: lambda row: row.waiting,
        WorkerOrder.name: lambda _: 0,
    }
    return lambda row: (-(figures[order](row) or 0), row.id)


def _adapter_key(order: AdapterOrder) -> Callable[[AdapterLine], tuple[float, int, str]]:
    """The sort key of adapters, the largest figure first, then by ready replicas; by hit share the smallest first."""
    figures: Mapping[AdapterOrder, Callable[[TrafficLine], float | None]] = {
        AdapterOrder.requests: lambda row: row.requests_per_s,
        AdapterOrder.tokens: lambda row: row.output_tokens_per_s,
        AdapterOrder.first_token: lambda row: row.first_token_p95_s,
        AdapterOrder.errors: lambda row: row.errors_per_s,
        AdapterOrder.hit_share: lambda row: None if row.hit_share is None else 1 - row.hit_share,
        AdapterOrder.name: lambda _: 0,
    }

    def key(row: AdapterLine) -> tuple[float, int, str]:
        """The figure, the replicas and the name."""
        figure = figures[order](row.traffic)
        ready = 0 if order is AdapterOrder.name else -(row.ready or 0)
        return (1.0 if figure is None else -figure), ready, row.name

    return key


def _figure_text(value: float | None) -> str:
    """A figure in at most six characters; `-` for None."""
    if value is None:
        return "-"
    if value >= 100_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def _seconds_text(value: float | None) -> str:
    """Seconds with three digits at most; `-` for None."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _percent_text(share: float | None) -> str:
    """A share as per cent; `-` for None."""
    return "-" if share is None else f"{share:.0%}"
