"""Tables and lines that the CLI prints."""

import re
from collections.abc import Iterable, Mapping, Sequence
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
    body = [[printable(_cell_text(cell)) for cell in row] for row in rows]
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


def adapters(items: Iterable[Mapping[str, Any]]) -> Table:
    """A table of adapters, one row each. The note is a column only if some adapter has one."""
    found = list(items)
    notes = ["note"] if any(item.get("note") for item in found) else []
    return table(
        ["lora_id", "state", "ready", "desired", "rank", "digest", "workers", "tenants", "error", *notes],
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
                *(item.get("note") for _ in notes),
            )
            for item in found
        ],
    )


def aliases(items: Iterable[Mapping[str, Any]]) -> Table:
    """Aliases and their targets, one row each."""

    def targets(item: Mapping[str, Any]) -> str:
        """An alias's targets with their weights, in one cell."""
        return ", ".join(f"{target['lora_id']} ({target['weight']:g})" for target in item["targets"])

    return table(["alias", "targets (weight)"], [(item["name"], targets(item)) for item in items])


def placements(items: Iterable[Mapping[str, Any]]) -> Table:
    """Adapters on workers, by lora_id and worker."""
    return table(
        ["lora_id", "worker", "state", "location", "desired"],
        [
            (i["lora_id"], i["worker_id"], i["state"], i["location"], "yes" if i["desired"] else "no")
            for i in sorted(items, key=lambda item: (item["lora_id"], item["worker_id"]))
        ],
    )


def pauses(items: Iterable[Mapping[str, Any]]) -> Table:
    """Pauses, one row each."""
    return table(
        ["holds requests of", "mode", "by", "since", "ends by itself", "still run", "routers behind"],
        [
            (
                item["scope"],
                item["mode"],
                item["owner"],
                _time_text(item["began_at"]),
                _time_text(item["expires_at"]),
                item["running"],
                item["routers_behind"],
            )
            for item in items
        ],
    )


def workers(items: Iterable[Mapping[str, Any]]) -> Table:
    """Workers. Drain, zone, node and the reason for taking no adapters are columns only if some worker has them."""
    found = sorted(items, key=lambda item: str(item["id"]))
    places = [name for name in ("zone", "node") if any(item[name] for item in found)]
    refusals = ["takes no adapters"] if any(item.get("refusal") for item in found) else []
    drains = ["drain"] if any(item.get("drain") for item in found) else []
    return table(
        ["worker", "state", *drains, *places, "base model", "adapters", "free slots", "agent", "engine", *refusals],
        [
            (
                item["id"],
                f"{item['state']}, pod ends" if item.get("is_terminating") else item["state"],
                *(drain_text(item.get("drain")) for _ in drains),
                *(item[name] for name in places),
                item["base_model"],
                ", ".join(item["adapters"]),
                item["capacity"].get("available_slots"),
                item["agent_url"],
                item["engine_url"],
                *(item.get("refusal", "") for _ in refusals),
            )
            for item in found
        ],
    )


def plan(actions: Iterable[Mapping[str, Any]]) -> Table:
    """A table of a plan's actions, one row each: what, where, instead of what, size, duration and reason."""
    return table(
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
    return table(
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


def orphans(items: Iterable[Mapping[str, Any]]) -> Table:
    """A table of unregistered adapters on workers, one row each, with the problem of those that cannot be adopted."""
    return table(
        ["lora_id", "digest", "workers", "base model", "rank", "source", "loaded by", "cannot be adopted because"],
        [
            (
                item["lora_id"],
                item["digest"][:12],
                ", ".join(item["workers"]),
                item["base_model"],
                item["rank"],
                item["source"],
                "another client" if item["is_foreign"] else "the fleet",
                item["problem"],
            )
            for item in items
        ],
    )


def history(items: Iterable[Mapping[str, Any]]) -> Table:
    """Changes and incidents, one row each."""
    return table(
        [_TIME, "what", "of", "by", "details"],
        [
            (
                _time_text(item["at"]),
                item["kind"],
                item["subject"],
                item["actor"],
                item["body"] if item.get("severity") is None else _incident_text(item),
            )
            for item in items
        ],
    )


def _incident_text(item: Mapping[str, Any]) -> str:
    """An incident's severity, the first line of its cause, and the next step."""
    cause = str(item["body"].get("cause", "")).partition("\n")[0]
    said = f"{item['severity']}: {cause}" if cause else str(item["severity"])
    return f"{said}. Next: {item['next_step']}" if item.get("next_step") else said


def keys(items: Iterable[Mapping[str, Any]], now: datetime) -> Table:
    """A table of a key file's keys, one row each; neither key nor hash."""
    return table(
        ["id", "tenant", "scopes", "limits", "expires", "note"],
        [
            (
                item["key_id"],
                "all tenants" if item["tenant"] is None else item["tenant"],
                ", ".join(item["scopes"]),
                ", ".join(f"{name} {limit:g}" for name, limit in item["limits"].items()),
                _expiry_text(item["expires"], now),
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
    """A table of one item's fields."""
    return table(["field", "value"], list(item.items()))


def decision(answer: Mapping[str, Any]) -> Table:
    """Every replica's cost terms of a decision, the winner first."""
    scored = sorted(answer["scores"], key=lambda score: (not score["winner"], score["passed_over"], score["cost_s"]))
    # All terms of this router's cost model, in its order.
    terms = [name for name in scored[0] if name.endswith("_s")] if scored else []
    figures = ["depth_blocks", "cached_tokens", *terms]
    rows = [[_mark(score), score["worker_id"], score["trust"], *(score[name] for name in figures)] for score in scored]
    names = ["cached blocks", "cached tokens", *(name.removesuffix("_s") + " s" for name in terms)]
    return table(["", "worker", "trust", *names], rows)


def _mark(score: Mapping[str, Any]) -> str:
    """`->` for the winner, `x` for a replica that was passed over, else ""."""
    return "->" if score["winner"] else "x" if score["passed_over"] else ""


def not_considered_lines(answer: Mapping[str, Any]) -> list[str]:
    """A line for each reason why replicas were not considered, with their ids."""
    reasons: dict[str, list[str]] = {}
    for score in answer["scores"]:
        if score["passed_over"]:
            reasons.setdefault("passed over (x), its adapter slots are all in use", []).append(score["worker_id"])
    for item in answer["rejected"]:
        reasons.setdefault(item["reason"], []).append(item["worker_id"])
    return [f"not considered: {reason}: {', '.join(sorted(workers))}" for reason, workers in reasons.items()]


def decision_summary(decision: Mapping[str, Any]) -> str:
    """One routing decision: its worker, policy and cached tokens.

    A second line has wait and first data once they are known.
    """
    if decision["worker_id"] is None:
        return f"{decision['adapter']}: no worker can take it now ({decision['prompt_tokens']} prompt tokens)"
    text = (
        f"{decision['adapter']} on {decision['worker_id']} by {decision['policy']}:"
        f" {decision['cached_tokens']} of {decision['prompt_tokens']} prompt tokens cached"
        f" ({decision['trust'] or 'trust unknown'}; tokens from {decision['tokens_from']};"
        f" kappa {decision['kappa']:.2f}, rho {decision['rho']:.3f})"
    )
    if decision.get("first_data_s") is not None:
        cached = decision["engine_cached_tokens"]
        text += (
            f"\nwaited {_cell_text(decision['waited_s'])} s here,"
            f" first data {_cell_text(decision['first_data_s'])} s after that;"
            f" the engine {'did not report cached tokens' if cached is None else f'had {cached} tokens cached'}"
        )
    return text


def decisions(items: Iterable[Mapping[str, Any]]) -> Table:
    """A table of decisions and their outcomes, one row each: predicted and actual tokens, waits and request id."""
    return table(
        [
            _TIME,
            "adapter",
            "worker",
            "prompt",
            "predicted",
            "engine's",
            "trust",
            "waited s",
            "first data s",
            "request",
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
                item["request_id"],
            )
            for item in items
        ],
    )


def replays(recorded_items: Iterable[Mapping[str, Any]], replayed: Iterable[Mapping[str, Any]]) -> Table:
    """Recorded decisions beside the same decisions made again, with costs by the same cost model."""

    def cost_s(item: Mapping[str, Any], worker: object) -> object:
        """The cost of a worker in a decision; None if the decision has no such worker."""
        return next((score["cost_s"] for score in item["scores"] if score["worker_id"] == worker), None)

    return table(
        ["request", "adapter", "decided", "again", "cost s", "again cost s"],
        [
            (
                now["request_id"],
                now["adapter"],
                recorded.get("worker_id"),
                now["worker_id"],
                cost_s(now, recorded.get("worker_id")),
                cost_s(now, now["worker_id"]),
            )
            for recorded, now in zip(recorded_items, replayed, strict=True)
        ],
    )


def _time_text(at: str) -> str:
    """A time stamp as a cell: milliseconds, and no offset if it is UTC."""
    return datetime.fromisoformat(at).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")


def _cell_text(cell: object) -> str:
    """A table cell as text: `-` for None, four decimals of a float, NAME=VALUE of a mapping."""
    match cell:
        case None:
            return "-"
        case float():
            return f"{cell:.4f}"
        case Mapping():
            return ", ".join(f"{name}={_cell_text(value)}" for name, value in cell.items())
        case list() | tuple():
            return ", ".join(map(str, cell))
        case _:
            return str(cell)


def _is_number(text: str) -> bool:
    """Whether a cell is aligned right: digits with one point at most, `-`, or empty."""
    return text in ("-", "") or text.replace(".", "", 1).isdigit()
