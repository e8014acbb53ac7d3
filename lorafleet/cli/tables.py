"""Tables and lines that the CLI prints."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from lorafleet.cli.drain import drain_text
from lorafleet.service.failure import printable

_WIDE = 4000
_TIME = "time (UTC)"
_TRAILING_BLANKS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)


def console() -> Console:
    """The console for tables; very wide if the output is not a terminal, so that a pipe gets whole rows."""
    table_ = Console(markup=False, highlight=False)
    if not table_.is_terminal:
        table_.width = _WIDE
    return table_


def show(renderable: RenderableType) -> None:
    """Print a table. Cells break between words only, so that names, ids and URLs can be copied.

    A table that does not fit is printed one row a line.
    """
    out = console()
    # If that does not fit, each row is one line, which the terminal wraps.
    if out.measure(renderable, options=out.options.update(width=_WIDE)).minimum > out.width:
        out.width = _WIDE
    with out.capture() as printed:
        out.print(renderable, crop=False)
    # Without trailing blanks, which a terminal would wrap, too.
    out.file.write(_TRAILING_BLANKS.sub(r"\1", printed.get()))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """A table of cells. Numbers are aligned right; numbers, times and words are not broken across lines."""
    body = [[printable(cell_text(cell)) for cell in row] for row in rows]
    table_ = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        cells = [row[index] for row in body]
        is_number = bool(body) and all(map(_is_number, cells))
        whole = cells if is_number or name == _TIME else [word for cell in cells for word in cell.split()]
        least = max(map(len, [*whole, *name.split()]), default=0)
        table_.add_column(name, justify="right" if is_number else "left", overflow="fold", min_width=least)
    for row in body:
        table_.add_row(*row)
    return table_


Items = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ListView:
    """How a list is printed.

    table  the table of its items; with True, of more columns (`-o wide`)
    names  fields that name an item, which `-o name` prints with a tab between them
    """

    table: Callable[[Items, bool], Table]
    names: tuple[str, ...]


def adapters(items: Items, wide: bool = False) -> Table:
    """A table of adapters, one row each. The note is a column only if some adapter has one."""
    found = list(items)
    notes = ["note"] if any(item.get("note") for item in found) else []
    more = ["base model", "bytes", "requests/s", "idle s", "policy", "source"] if wide else []
    return table(
        ["lora_id", "state", "ready", "desired", "rank", "digest", "workers", "tenants", *more, "error", *notes],
        [
            (
                item["lora_id"],
                item["state"],
                item["replicas"]["ready"],
                item["replicas"]["desired"],
                item["rank"],
                _digest(item["digest"], wide),
                ", ".join(item["workers"]),
                "everyone" if item["tenants"] is None else ", ".join(item["tenants"]),
                *_cells(item, wide, "base_model", "size_bytes", "requests_per_s", "idle_s", "policy", "source"),
                item.get("error"),
                *(item.get("note") for _ in notes),
            )
            for item in found
        ],
    )


def _digest(digest: str | None, wide: bool) -> str:
    """A digest's first 12 digits, as everywhere; wide: all of it."""
    return (digest or "") if wide else (digest or "")[:12]


def _cells(item: Mapping[str, Any], wide: bool, *names: str) -> list[Any]:
    """The fields that only a wide table has."""
    return [item.get(name) for name in names] if wide else []


def aliases(items: Items, wide: bool = False) -> Table:
    """Aliases and their targets, one row each; wide: also the targets that an alias is about to get."""

    def targets(item: Mapping[str, Any] | None) -> str | None:
        """An alias's targets with their weights, in one cell."""
        if item is None:
            return None
        return ", ".join(f"{target['lora_id']} ({target['weight']:g})" for target in item["targets"])

    return table(
        ["alias", "targets (weight)", *(["pending", "waits for"] if wide else [])],
        [
            (item["name"], targets(item), *([targets(item["pending"]), _lacks(item["pending"])] if wide else []))
            for item in items
        ],
    )


def _lacks(pending: Mapping[str, Any] | None) -> str | None:
    """What a pending change of an alias waits for; None without one."""
    if pending is None:
        return None
    return "; ".join(f"{name}: {missing}" for name, missing in sorted(pending["lacks"].items())) or pending["error"]


def published(items: Items, wide: bool = False) -> Table:
    """Published names and the versions that they point at, one row each."""
    more = ["all versions", "replicas", "max staleness s", "in place of the base model"] if wide else []
    return table(
        ["name", "points at", "digest", "workers", "kept", "of at most", "tenant", *more],
        [
            (
                item["name"],
                item["lora_id"],
                _digest(item["digest"], wide),
                ", ".join(item["workers"]),
                len(item["versions"]),
                item["keep_versions"],
                item["tenant"],
                *([", ".join(version["lora_id"] for version in item["versions"])] if wide else []),
                *_cells(item, wide, "replicas", "max_staleness_s", "shadows_base"),
            )
            for item in items
        ],
    )


def placements(items: Items, wide: bool = False) -> Table:
    """Adapters on workers, by lora_id and worker."""
    return table(
        ["lora_id", "worker", "state", "location", "desired", *(["digest"] if wide else [])],
        [
            (
                item["lora_id"],
                item["worker_id"],
                item["state"],
                item["location"],
                "yes" if item["desired"] else "no",
                *_cells(item, wide, "digest"),
            )
            for item in sorted(items, key=lambda item: (item["lora_id"], item["worker_id"]))
        ],
    )


def pauses(items: Items, wide: bool = False) -> Table:
    """Pauses, one row each."""
    return table(
        [
            *("holds requests of", "mode", "by", "since", "ends by itself", "still run", "routers behind"),
            *(["tenant", "namespace"] if wide else []),
        ],
        [
            (
                item["scope"],
                item["mode"],
                item["owner"],
                _time_text(item["began_at"]),
                _time_text(item["expires_at"]),
                item["running"],
                item["routers_behind"],
                *_cells(item, wide, "tenant", "namespace"),
            )
            for item in items
        ],
    )


def workers(items: Items, wide: bool = False) -> Table:
    """Workers. Drain, zone, node and the reason for taking no adapters are columns only if some worker has them."""
    found = sorted(items, key=lambda item: str(item["id"]))
    places = [name for name in ("zone", "node") if wide or any(item[name] for item in found)]
    refusals = ["takes no adapters"] if wide or any(item.get("refusal") for item in found) else []
    drains = ["drain"] if wide or any(item.get("drain") for item in found) else []
    more = ["capacity", "orphans"] if wide else []
    return table(
        [
            *("worker", "state", *drains, *places, "base model", "adapters", "free slots", *more),
            *("agent", "engine", *refusals),
        ],
        [
            (
                item["id"],
                f"{item['state']}, pod ends" if item.get("is_terminating") else item["state"],
                *(drain_text(item.get("drain")) for _ in drains),
                *(item[name] for name in places),
                item["base_model"],
                ", ".join(item["adapters"]),
                item["capacity"].get("available_slots"),
                *_cells(item, wide, "capacity", "orphans"),
                item["agent_url"],
                item["engine_url"],
                *(item.get("refusal", "") for _ in refusals),
            )
            for item in found
        ],
    )


def orphans(items: Items, wide: bool = False) -> Table:
    """A table of unregistered adapters on workers, one row each, with the problem of those that cannot be adopted."""
    more = ["engine name", "bytes"] if wide else []
    return table(
        [
            *("lora_id", "digest", "workers", "base model", "rank", "source", "loaded by", *more),
            "cannot be adopted because",
        ],
        [
            (
                item["lora_id"],
                _digest(item["digest"], wide),
                ", ".join(item["workers"]),
                item["base_model"],
                item["rank"],
                item["source"],
                "another client" if item["is_foreign"] else "the fleet",
                *_cells(item, wide, "engine_name", "size_bytes"),
                item["problem"],
            )
            for item in items
        ],
    )


def history(items: Items, wide: bool = False) -> Table:
    """Changes and incidents, one row each; wide: incidents with all that is known of them."""
    return table(
        [*(["id"] if wide else []), _TIME, "what", "of", "by", "details", *(["all details"] if wide else [])],
        [
            (
                *_cells(item, wide, "id"),
                _time_text(item["at"]),
                item["kind"],
                item["subject"],
                item["actor"],
                item["body"] if item.get("severity") is None else _incident_text(item),
                *([item["body"] if item.get("severity") is not None else None] if wide else []),
            )
            for item in items
        ],
    )


def _incident_text(item: Mapping[str, Any]) -> str:
    """An incident's severity, the first line of its cause, and the next step."""
    cause = str(item["body"].get("cause", "")).partition("\n")[0]
    said = f"{item['severity']}: {cause}" if cause else str(item["severity"])
    return f"{said}. Next: {item['next_step']}" if item.get("next_step") else said


def keys(items: Items, now: datetime, wide: bool = False) -> Table:
    """A table of a key file's keys, one row each; neither key nor hash."""
    more = ["namespace", "may register", "in place of base models", "all scopes"] if wide else []
    return table(
        ["id", "tenant", "scopes", "limits", "expires", *more, "note"],
        [
            (
                item["key_id"],
                "all tenants" if item["tenant"] is None else item["tenant"],
                ", ".join(item["scopes"]),
                ", ".join(f"{name} {limit:g}" for name, limit in item["limits"].items()),
                _expiry_text(item["expires"], now),
                *_cells(item, wide, "namespace", "lora_ids", "may_shadow_base", "may"),
                item["note"],
            )
            for item in items
        ],
    )


def _expiry_text(expires: str | None, now: datetime) -> str:
    """A key's expiry, and whether it is over."""
    if expires is None:
        return "never"
    return f"{expires} (expired)" if datetime.fromisoformat(expires) <= now else expires


def fields(item: Mapping[str, Any]) -> Table:
    """A table of one item's fields; a field that lists objects has a row for each."""
    rows: list[tuple[str, Any]] = []
    for name, value in item.items():
        objects = value if isinstance(value, list) and value and isinstance(value[0], Mapping) else [value]
        rows += [(name if number == 0 else "", each) for number, each in enumerate(objects)]
    return table(["field", "value"], rows)


def decisions(items: Items, wide: bool = False) -> Table:
    """A table of decisions and their outcomes, one row each: predicted and actual tokens, waits and request id."""
    more = ["policy", "tokens from", "kappa", "rho"] if wide else []
    return table(
        [
            *(_TIME, "adapter", "worker", "prompt", "predicted", "engine's", "trust", "waited s", "first data s"),
            *(*more, "request"),
        ],
        [
            (
                _time_text(item["at"]),
                item["adapter"],
                item["worker_id"],
                item["prompt_tokens"],
                item["cached_tokens"],
                item["engine_cached_tokens"],
                item["trust"],
                item["waited_s"],
                item["first_data_s"],
                *_cells(item, wide, "policy", "tokens_from", "kappa", "rho"),
                item["request_id"],
            )
            for item in items
        ],
    )


def comparison(items: Items, wide: bool = False) -> Table:
    """The targets of an alias, one row each. A target whose traffic the reader may not see has no figures."""
    more = ["first token p99 s", "whole p95 s", "cold starts", "mean wait s"] if wide else []
    names = [
        "requests",
        "errors",
        "refused",
        "first token p50 s",
        "p95 s",
        "s per token",
        "output tokens",
        "cache hits",
    ]

    def figures(total: Mapping[str, Any] | None) -> list[object]:
        """The figures of one target."""
        if total is None:
            return [None] * (len(names) + len(more))
        first, whole = total["first_token_s"], total["whole_s"]
        found = [total["requests"], total["errors"], total["refusals"], first.get("p50"), first.get("p95")]
        found += [total["token_s"], total["output_tokens"], total["hit_real"]]
        return found + ([first.get("p99"), whole.get("p95"), total["cold_starts"], total["waited_s"]] if wide else [])

    return table(
        ["target", "share", *names, *more, "worse"],
        [(item["lora_id"], item["share"], *figures(item["total"]), item["worse"] or "-") for item in items],
    )


def requests(items: Items, wide: bool = False) -> Table:
    """A table of requests, one row each; why each failed, and the limit that it reached."""
    more = ["asked", "attempts", "first data s", "prompt", "output", "cause"] if wide else []
    return table(
        [_TIME, "status", "code", "limit", "tenant", "key", "adapter", "worker", "seconds", *more, "request"],
        [
            (
                _time_text(item["at"]),
                *(item[name] or "-" for name in ("status", "code", "limit", "tenant", "key", "adapter", "worker")),
                item["duration_s"],
                *_cells(item, wide, "asked", "attempts", "first_data_s", "prompt_tokens", "completion_tokens", "cause"),
                item["request_id"],
            )
            for item in items
        ],
    )


ADAPTERS = ListView(adapters, ("lora_id",))
ALIASES = ListView(aliases, ("name",))
PUBLISHED = ListView(published, ("name",))
PLACEMENTS = ListView(placements, ("lora_id", "worker_id"))
PAUSES = ListView(pauses, ("scope",))
WORKERS = ListView(workers, ("id",))
ORPHANS = ListView(orphans, ("lora_id",))
HISTORY = ListView(history, ("subject",))
DECISIONS = ListView(decisions, ("request_id",))
REQUESTS = ListView(requests, ("request_id",))
COMPARISON = ListView(comparison, ("lora_id",))


def keys_view(now: datetime) -> ListView:
    """How a key file's keys are printed; `now` decides which have expired."""
    return ListView(lambda items, wide: keys(items, now, wide), ("key_id",))


def _time_text(at: str) -> str:
    """A time stamp as a cell: milliseconds, and no offset if it is UTC."""
    return datetime.fromisoformat(at).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")


def cell_text(cell: object) -> str:
    """A table cell as text: `-` for None, four decimals of a float, NAME=VALUE of a mapping."""
    match cell:
        case None:
            return "-"
        case float():
            return f"{cell:.4f}"
        case Mapping():
            return ", ".join(f"{name}={cell_text(value)}" for name, value in cell.items())
        case list() | tuple():
            return ", ".join(map(str, cell))
        case _:
            return str(cell)


def _is_number(text: str) -> bool:
    """Whether a cell is aligned right: digits with one point at most, `-`, or empty."""
    return text in ("-", "") or text.replace(".", "", 1).isdigit()
