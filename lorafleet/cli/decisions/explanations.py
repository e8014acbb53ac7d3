"""How one routing decision is explained: its summary, the cost terms of every replica, and decisions made again."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from lorafleet.cli import tables


def decision(answer: Mapping[str, Any]) -> Table:
    """Every replica's cost terms of a decision, the winner first."""
    scored = sorted(answer["scores"], key=lambda score: (not score["winner"], score["passed_over"], score["cost_s"]))
    # All terms of this router's cost model, in its order.
    terms = [name for name in scored[0] if name.endswith("_s")] if scored else []
    figures = ["depth_blocks", "cached_tokens", *terms]
    # Only of an adapter with an acceptance file.
    figures += ["acceptance"] if any(score.get("acceptance") for score in scored) else []
    rows = [
        [_replica_mark(score), score["worker_id"], score["trust"], *(score.get(name) for name in figures)]
        for score in scored
    ]
    names = ["cached blocks", "cached tokens", *(name.removesuffix("_s") + " s" for name in terms)]
    names += figures[2 + len(terms) :]
    return tables.table(["", "worker", "trust", *names], rows)


def _replica_mark(score: Mapping[str, Any]) -> str:
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
    if decision.get("other_caches_tokens"):
        text += f"\n{decision['other_caches_tokens']} more of its tokens are in other callers' caches (policy: cache)"
    if decision.get("first_data_s") is not None:
        cached = decision["engine_cached_tokens"]
        text += (
            f"\nwaited {tables.cell_text(decision['waited_s'])} s here,"
            f" first data {tables.cell_text(decision['first_data_s'])} s after that;"
            f" the engine {'did not report cached tokens' if cached is None else f'had {cached} tokens cached'}"
        )
    return text


_STAGES = {
    "pause": "for the end of a pause",
    "hold": "for {held_for}",
    "queue": "for {queued_for}",
    "failed_attempts": "lost",
}


def story(item: Mapping[str, Any]) -> Table:
    """Rows of one request's story, a fact each: who asked, what happened in each stage, and what to do next."""
    status, failures = item["status"], item.get("failures") or ()
    key = " ".join(filter(None, (item.get("key"), item.get("note") and f"({item['note']})")))
    stages = [
        ("seconds: " + name.replace("_", " "), f"{seconds:.4f} {_stage_cause(name, item)}".rstrip())
        for name, seconds in item["stages"].items()
    ]
    rows = [
        ("request", item["request_id"]),
        ("ended" if status else "sent", item["at"]),
        ("answer", "not over, as far as is known" if status is None else f"{status} {item['code']}".rstrip()),
        ("limit", item.get("limit")),
        ("why", item.get("cause")),
        ("next", item.get("next_step")),
        ("call", " ".join(filter(None, (item.get("method"), item.get("path"))))),
        ("tenant", item.get("tenant")),
        ("key", key),
        ("asked for", item.get("asked")),
        ("adapter", item.get("adapter")),
        ("worker", item.get("worker")),
        ("router", item.get("router")),
        ("attempts", item.get("attempts")),
        *[("failed at", f"{failure['worker']}: {failure['reason']}") for failure in failures],
        ("ended in stage", item.get("stage")),
        *stages,
        ("seconds", item.get("duration_s")),
        ("prompt tokens", item.get("prompt_tokens")),
        ("output tokens", item.get("completion_tokens")),
        ("cached tokens", item.get("cached_tokens")),
    ]
    return tables.table(["", ""], [row for row in rows if row[1] not in (None, "", 0)])


def _stage_cause(name: str, item: Mapping[str, Any]) -> str:
    """The cause of a request's wait in this stage; empty where it did not wait, or the cause is not known."""
    cause = {"hold": item.get("held_for"), "queue": item.get("queued_for")}.get(name, "none")
    return _STAGES[name].format_map(item) if name in _STAGES and cause else ""


def replays(recorded_items: Iterable[Mapping[str, Any]], replayed: Iterable[Mapping[str, Any]]) -> Table:
    """Recorded decisions beside the same decisions made again, with costs by the same cost model."""

    def cost_s(item: Mapping[str, Any], worker: object) -> object:
        """The cost of a worker in a decision; None if the decision has no such worker."""
        return next((score["cost_s"] for score in item["scores"] if score["worker_id"] == worker), None)

    return tables.table(
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
