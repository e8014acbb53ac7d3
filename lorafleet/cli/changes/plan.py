"""`lorafleet plan`: what the orchestrator would do."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lorafleet.cli.columns import Column, ListView
from lorafleet.cli.context import parse_setting, print_json
from lorafleet.cli.output import print_table
from lorafleet.service.failure import CommandFailed

app = typer.Typer(no_args_is_help=True)

_PLAN = ListView(
    (
        Column("pass", "turn"),
        Column("operation"),
        Column("adapter", "lora_id", lambda lora_id: lora_id or "(all)"),
        Column("worker", "worker_id"),
        Column("instead of", "evict"),
        Column("bytes", "size_bytes"),
        Column("seconds"),
        Column("why", "reason"),
    )
)


@app.command()
def plan(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    demand: Annotated[
        list[str] | None,
        typer.Option(help="LORA_ID=x10 (ten times the current rate) or LORA_ID=3.5 (requests a second); repeat"),
    ] = None,
    without_worker: Annotated[list[str] | None, typer.Option(help="plan without this worker; repeat")] = None,
    more_workers: Annotated[
        list[str] | None, typer.Option(help="N, or N:WORKER for N more workers like WORKER; repeat")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the global policy; repeat")] = None,
    adapter_policy: Annotated[
        list[str] | None, typer.Option(help="LORA_ID:NAME=VALUE of one adapter's policy; repeat")
    ] = None,
    passes: Annotated[int, typer.Option(min=1, max=200, help="maximum number of passes to plan ahead")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="print the orchestrator's whole answer")] = False,
) -> None:
    """Show what the orchestrator would do under these assumptions, why, and at what cost. Changes nothing.

    Without options: the next pass. With options: all passes until nothing is left to do. Bytes are the adapters'
    sizes, seconds the median of measured loads; drains are assumed to end at once.

    Examples:

      lorafleet plan

      lorafleet plan --demand sql-expert/v1=x10

      lorafleet plan --without-worker w0 --more-workers 2:w1

      lorafleet plan --policy reserve_slots=0 --adapter-policy legal/v2:min_replicas=3
    """
    from lorafleet.local.progress import StartProgress  # noqa: PLC0415  (`lorafleet --help` must not wait for rich)

    body = {
        "demand": dict(map(_parse_demand, demand or ())),
        "workers_gone": without_worker or [],
        "workers_more": [_parse_more_workers(text) for text in more_workers or ()],
        "policy": dict(map(parse_setting, policy or ())),
        "adapter_policies": _parse_adapter_policies(adapter_policy or ()),
    }
    has_assumptions = any(body.values())
    with context.obj.orchestrator() as api, StartProgress() as steps, steps.step("plan", "computing the next passes"):
        answer = api.call("POST", "/v1/placements/plan", body | {"passes": passes} if has_assumptions else None)
    if as_json:
        print_json(answer)
        return
    if answer["actions"]:
        print_table(_PLAN, answer["actions"])
    for line in _plan_lines(answer):
        typer.echo(line)


def _plan_lines(answer: Mapping[str, Any]) -> list[str]:
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


def _parse_demand(text: str) -> tuple[str, dict[str, float]]:
    """A lora_id and its demand from `LORA_ID=x10` or `LORA_ID=3.5`; raises CommandFailed."""
    lora_id, _, amount = text.rpartition("=")
    try:
        if amount.startswith("x"):
            return lora_id, {"factor": float(amount[1:])}
        return lora_id, {"requests_per_s": float(amount)}
    except ValueError as exc:
        raise CommandFailed(f"{text}: write LORA_ID=x10 or LORA_ID=3.5", status=2) from exc


def _parse_more_workers(text: str) -> dict[str, Any]:
    """A number of more workers and the worker they are like, from `N` or `N:WORKER`; raises CommandFailed."""
    count, _, like = text.partition(":")
    if not count.isdecimal():
        raise CommandFailed(f"{text}: write N, or N:WORKER", status=2)
    return {"count": int(count), "like": like or None}


def _parse_adapter_policies(texts: list[str] | tuple[()]) -> dict[str, dict[str, Any]]:
    """Policy changes by lora_id, from texts `LORA_ID:NAME=VALUE`; raises CommandFailed."""
    policies: dict[str, dict[str, Any]] = {}
    for text in texts:
        # A lora_id may have colons; a policy's fields have none, and come before the first "=".
        named, equals, value_text = text.partition("=")
        lora_id, colon, field = named.rpartition(":")
        if not (colon and equals):
            raise CommandFailed(f"{text}: write LORA_ID:NAME=VALUE", status=2)
        name, value = parse_setting(f"{field}={value_text}")
        policies.setdefault(lora_id, {})[name] = value
    return policies
