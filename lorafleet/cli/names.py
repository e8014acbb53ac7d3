"""`lorafleet aliases set` and `compare`, and `lorafleet rollout start`: where a name points, and how it moves."""

# ruff: noqa: PLR0917  (Typer passes by name)

from typing import Annotated, Any

import typer

from lorafleet.cli.output import AsJson, Output, OutputFormat, print_list
from lorafleet.cli.resources import ALIASES, COMPARISON, PUBLISHED, ROLLOUTS, pending_text, rollout_line
from lorafleet.cli.verbs import follow
from lorafleet.service.failure import CommandFailed

aliases_app = ALIASES.app()
rollout_app = ROLLOUTS.app()
published_app = PUBLISHED.app()
_EXIT_STATUS = {"done": 0, "rolled_back": 1, "aborted": 1, "failed": 1}
_POLL_S = 2.0


@aliases_app.command("compare")
def aliases_compare(
    context: typer.Context,
    name: Annotated[str, ALIASES.argument()],
    range_s: Annotated[float, typer.Option(min=60, max=172_800, help="seconds up to now that figures are of")] = 3600.0,
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
) -> None:
    """Compare an alias's targets side by side: requests, errors, first tokens, time per token, tokens, cache hits.

    `worse` is by the rule of a rollout with its default limits, against the target with most of the sessions.

    Examples:

      lorafleet aliases compare sql-expert

      lorafleet aliases compare sql-expert --range-s 600 -o yaml
    """
    with context.obj.orchestrator() as api:
        answer = api.call("GET", f"{ALIASES.path(name)}/comparison", range_s=range_s)
    print_list(COMPARISON, answer, output, as_json)


@aliases_app.command("set")
def aliases_set(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="the alias")],
    targets: Annotated[list[str], typer.Argument(help="lora_id, or lora_id=weight")],
) -> None:
    """Point an alias at one or more adapters, in place of its former targets.

    Examples:

      lorafleet aliases set sql-expert sql-expert/v1

      lorafleet aliases set sql-expert sql-expert/v1=9 sql-expert/v2=1
    """
    with context.obj.orchestrator() as api:
        body = {"targets": [_parse_alias_target(target) for target in targets]}
        item = api.call("PUT", ALIASES.path(name), body)
    typer.echo(f"{name} -> {', '.join(targets)}")
    if pending := item["status"]["pending"]:
        typer.echo(f"  pending; the former targets stay until then: {pending_text(pending)}")


def _parse_alias_target(text: str) -> dict[str, Any]:
    """An alias target from `lora_id` or `lora_id=weight`; raises CommandFailed."""
    lora_id, has_weight, weight = text.partition("=")
    try:
        return {"lora_id": lora_id, "weight": float(weight)} if has_weight else {"lora_id": lora_id}
    except ValueError as exc:
        raise CommandFailed(f"{text}: {weight!r} is not a number; write lora_id or lora_id=weight", status=2) from exc


@rollout_app.command("start")
def rollout_start(
    context: typer.Context,
    alias: Annotated[str, ROLLOUTS.argument()],
    to: Annotated[str, typer.Argument(help="lora_id of the new version")],
    step: Annotated[
        list[str] | None, typer.Option(help="WEIGHT:SECONDS: share of sessions, and how long; repeat")
    ] = None,
    max_error_rate_increase: Annotated[float, typer.Option(help="a larger rise of the error rate is worse")] = 0.02,
    max_first_token_ratio: Annotated[
        float, typer.Option(help="a larger ratio of mean times to first token is worse")
    ] = 1.5,
    min_requests: Annotated[
        int, typer.Option(help="requests of the new version in each step before it is judged")
    ] = 50,
    wait: Annotated[bool, typer.Option("--wait", help="wait for its end; status 1 unless it succeeded")] = False,
) -> None:
    """Move an alias to another version in steps; it goes back by itself if that version is worse.

    Examples:

      lorafleet rollout start sql-expert sql-expert/v2

      lorafleet rollout start sql-expert sql-expert/v2 --step 0.05:600 --step 0.5:600 --wait
    """
    body: dict[str, Any] = {
        "to": to,
        "max_error_rate_increase": max_error_rate_increase,
        "max_first_token_ratio": max_first_token_ratio,
        "min_requests": min_requests,
    }
    if step:
        body["steps"] = [_parse_step(text) for text in step]
    path = ROLLOUTS.path(alias)
    with context.obj.orchestrator() as api:
        item = api.call("POST", path, body)
        typer.echo(rollout_line(item))
        if not wait:
            return
        ended = follow(
            api,
            path,
            item,
            line=rollout_line,
            is_over=lambda it: it["status"]["state"] in _EXIT_STATUS,
            every_s=_POLL_S,
        )
    if status := _EXIT_STATUS[ended["status"]["state"]]:
        raise typer.Exit(status)


def _parse_step(text: str) -> dict[str, float]:
    """A rollout step from `WEIGHT` or `WEIGHT:SECONDS`; raises CommandFailed."""
    weight, colon, seconds = text.partition(":")
    try:
        return {"weight": float(weight)} | ({"for_s": float(seconds)} if colon else {})
    except ValueError as exc:
        raise CommandFailed(f"--step {text}: write WEIGHT or WEIGHT:SECONDS, such as 0.1:600", status=2) from exc
