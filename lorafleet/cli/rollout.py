"""`lorafleet rollout`: an alias moves to another version in steps, and back when that is worse."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lorafleet.service.failure import CommandFailed
from lorafleet.service.urls import path_of

app = typer.Typer(no_args_is_help=True, help="Rollouts: move an alias to another version in steps.")
Alias = Annotated[str, typer.Argument(help="the alias")]
_OVER = {"done": 0, "rolled_back": 1, "aborted": 1, "failed": 1}
_LOOK_EVERY_S = 2.0


@app.command("start")
def start(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    alias: Alias,
    to: Annotated[str, typer.Argument(help="lora_id of the new version")],
    step: Annotated[
        list[str] | None, typer.Option(help="WEIGHT:SECONDS, share of sessions and how long; may be repeated")
    ] = None,
    max_error_rate_increase: Annotated[float, typer.Option(help="more above the old version's rate is worse")] = 0.02,
    max_first_token_ratio: Annotated[float, typer.Option(help="more times the old version's mean is worse")] = 1.5,
    min_requests: Annotated[int, typer.Option(help="of the new version in each step, before anything is told")] = 50,
    wait: Annotated[bool, typer.Option("--wait", help="until it is over; status 1 unless it arrived")] = False,
) -> None:
    """Move an alias to another version in steps; it goes back by itself when that is worse.

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
        body["steps"] = [_step(text) for text in step]
    with context.obj.orchestrator() as api:
        item = api.call("POST", _path(alias), body)
        typer.echo(_line(item))
        while wait and item["state"] not in _OVER:
            time.sleep(_LOOK_EVERY_S)
            seen, item = _line(item), api.call("GET", _path(alias))
            if _line(item) != seen:
                typer.echo(_line(item))
    if wait and _OVER[item["state"]]:
        raise typer.Exit(_OVER[item["state"]])


@app.command("status")
def status(context: typer.Context, alias: Alias) -> None:
    """Where the rollout stands that is under way, or how the last one ended.

    Example: lorafleet rollout status sql-expert
    """
    with context.obj.orchestrator() as api:
        item = api.call("GET", _path(alias))
    typer.echo(_line(item))
    for name in ("old", "new"):
        typer.echo(f"  {name}: {_tally(item[name])}")


@app.command("pause")
def pause(context: typer.Context, alias: Alias) -> None:
    """Hold it where it is; it still goes back when the new version is worse.

    Example: lorafleet rollout pause sql-expert
    """
    with context.obj.orchestrator() as api:
        typer.echo(_line(api.call("PATCH", _path(alias), {"paused": True})))


@app.command("resume")
def resume(context: typer.Context, alias: Alias) -> None:
    """Let it go on from where it was.

    Example: lorafleet rollout resume sql-expert
    """
    with context.obj.orchestrator() as api:
        typer.echo(_line(api.call("PATCH", _path(alias), {"paused": False})))


@app.command("abort")
def abort(context: typer.Context, alias: Alias) -> None:
    """End it: the alias points at once at what it did before.

    Example: lorafleet rollout abort sql-expert
    """
    with context.obj.orchestrator() as api:
        typer.echo(_line(api.call("DELETE", _path(alias))))


def _path(alias: str) -> str:
    return f"/v1/aliases/{path_of(alias)}/rollout"


def _step(text: str) -> dict[str, float]:
    weight, colon, seconds = text.partition(":")
    try:
        return {"weight": float(weight)} | ({"for_s": float(seconds)} if colon else {})
    except ValueError as exc:
        raise CommandFailed(f"--step {text}: write WEIGHT or WEIGHT:SECONDS, such as 0.1:600", status=2) from exc


def _line(item: Mapping[str, Any]) -> str:
    to = ", ".join(target["lora_id"] for target in item["to"])
    state = "paused" if item["paused"] else item["state"]
    said = (
        f"{item['alias']} -> {to}: {state}, step {item['step'] + 1} of {len(item['steps'])}, weight {item['weight']:g}"
    )
    lacks = "; ".join(f"{lora_id}: {what}" for lora_id, what in sorted(item["lacks"].items()))
    return said + "".join(f" ({more})" for more in (lacks, item["reason"]) if more)


def _tally(tally: Mapping[str, Any]) -> str:
    mean = tally["mean_first_token_s"]
    first = "" if mean is None else f", first token after {mean:.3g} s"
    return f"{tally['requests']} requests over, {tally['errors']} errors ({tally['error_rate']:.1%}){first}"
