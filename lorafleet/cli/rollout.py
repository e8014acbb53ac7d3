"""`lorafleet rollout`: move an alias to another version in steps, and back if that version is worse."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lorafleet.cli.completion import alias_names
from lorafleet.cli.output import AsJson, Output, OutputFormat, chosen_format, print_item
from lorafleet.service.failure import CommandFailed
from lorafleet.service.urls import url_path

app = typer.Typer(no_args_is_help=True, help="Rollouts: move an alias to another version in steps.")
Alias = Annotated[str, typer.Argument(help="the alias", autocompletion=alias_names)]
_EXIT_STATUS = {"done": 0, "rolled_back": 1, "aborted": 1, "failed": 1}
_POLL_S = 2.0


@app.command("start")
def start(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    alias: Alias,
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
    from lorafleet.cli.client import read_patiently  # noqa: PLC0415  (httpx is imported when the command runs)

    with context.obj.orchestrator() as api:
        item = api.call("POST", _rollout_path(alias), body)
        typer.echo(_state_line(item))
        while wait and item["state"] not in _EXIT_STATUS:
            time.sleep(_POLL_S)
            shown, item = _state_line(item), read_patiently(lambda: api.call("GET", _rollout_path(alias)))
            if _state_line(item) != shown:
                typer.echo(_state_line(item))
    if wait and _EXIT_STATUS[item["state"]]:
        raise typer.Exit(_EXIT_STATUS[item["state"]])


@app.command("status")
def status(context: typer.Context, alias: Alias, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """Show the rollout in progress, or how the last one ended.

    Examples:

      lorafleet rollout status sql-expert

      lorafleet rollout status sql-expert -o json | jq .state
    """
    with context.obj.orchestrator() as api:
        item = api.call("GET", _rollout_path(alias))
    chosen = chosen_format(output, as_json)
    if chosen is not OutputFormat.table:
        print_item(item, alias, chosen, as_json=False)
        return
    typer.echo(_state_line(item))
    for name in ("old", "new"):
        typer.echo(f"  {name}: {_counts_line(item[name])}")


@app.command("pause")
def pause(context: typer.Context, alias: Alias) -> None:
    """Pause a rollout at its step; it still goes back if the new version is worse.

    Example: lorafleet rollout pause sql-expert
    """
    with context.obj.orchestrator() as api:
        typer.echo(_state_line(api.call("PATCH", _rollout_path(alias), {"paused": True})))


@app.command("resume")
def resume(context: typer.Context, alias: Alias) -> None:
    """Resume a paused rollout.

    Example: lorafleet rollout resume sql-expert
    """
    with context.obj.orchestrator() as api:
        typer.echo(_state_line(api.call("PATCH", _rollout_path(alias), {"paused": False})))


@app.command("abort")
def abort(context: typer.Context, alias: Alias) -> None:
    """End a rollout; the alias returns to its former target at once.

    Example: lorafleet rollout abort sql-expert
    """
    with context.obj.orchestrator() as api:
        typer.echo(_state_line(api.call("DELETE", _rollout_path(alias))))


def _rollout_path(alias: str) -> str:
    """The REST path of an alias's rollout."""
    return f"/v1/aliases/{url_path(alias)}/rollout"


def _parse_step(text: str) -> dict[str, float]:
    """A rollout step from `WEIGHT` or `WEIGHT:SECONDS`; raises CommandFailed."""
    weight, colon, seconds = text.partition(":")
    try:
        return {"weight": float(weight)} | ({"for_s": float(seconds)} if colon else {})
    except ValueError as exc:
        raise CommandFailed(f"--step {text}: write WEIGHT or WEIGHT:SECONDS, such as 0.1:600", status=2) from exc


def _state_line(item: Mapping[str, Any]) -> str:
    """A rollout's state in one line."""
    to = ", ".join(target["lora_id"] for target in item["to"])
    state = "paused" if item["paused"] else item["state"]
    line = (
        f"{item['alias']} -> {to}: {state}, step {item['step'] + 1} of {len(item['steps'])}, weight {item['weight']:g}"
    )
    lacks = "; ".join(f"{lora_id}: {missing}" for lora_id, missing in sorted(item["lacks"].items()))
    return line + "".join(f" ({detail})" for detail in (lacks, item["reason"]) if detail)


def _counts_line(counts: Mapping[str, Any]) -> str:
    """A version's requests, errors and mean time to first token in one line."""
    mean = counts["mean_first_token_s"]
    first = "" if mean is None else f", first token after {mean:.3g} s"
    return f"{counts['requests']} requests ended, {counts['errors']} errors ({counts['error_rate']:.1%}){first}"
