"""`lorafleet explain`, `decisions`, `request`, `requests` and `top`: what was decided, and what became of requests."""

# ruff: noqa: PLC0415, PLR0917  (imports of httpx and rich tables wait until a command needs them; Typer passes by name)

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from lorafleet.cli.columns import Item
from lorafleet.cli.context import print_json
from lorafleet.cli.output import AsJson, Output, OutputFormat, chosen_format, print_list
from lorafleet.cli.resources import DECISIONS, REQUESTS, adapter_names, worker_names
from lorafleet.cli.top.orders import AdapterOrder
from lorafleet.service.failure import CommandFailed

if TYPE_CHECKING:
    from lorafleet.cli.client import RestClient

app = typer.Typer(no_args_is_help=True)


_RECORD_HINT = "write one with: lorafleet decisions --json > FILE"


@app.command()
def explain(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="a user's message", show_default=False)] = None,
    model: Annotated[
        str, typer.Option(help="base model, adapter, alias, or base:adapter; default: the base model")
    ] = "",
    lora_id: Annotated[str | None, typer.Option(help="adapter, as a request's lora_id names it")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="decide recorded decisions again: a file of `decisions --json`, or - for standard input"),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="with --replay: decide by this policy in place of the recorded one")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the router's whole answer, with the record")] = False,
) -> None:
    """Show where the router would send this prompt now, with every replica's cost terms in seconds. Sends nothing.

    An arrow marks the winner: the least cost, or a cost within a few percent of it. The cost is kappa * (prefill +
    adapter) plus the other terms. `trust` is the quality of the cached blocks: exact, degraded, or an estimate.

    With --replay, past decisions are made again from their records, one line each. The status is 1 if one differs
    under its own policy.

    Examples:

      lorafleet explain "Which customers paid late?" --model sql-expert/v1

      lorafleet decisions --limit 1 --json | lorafleet explain --replay -

      lorafleet decisions --limit 1000 --json | lorafleet explain --replay - --policy least_loaded
    """
    if (prompt is None) == (replay is None):
        raise CommandFailed('name one: a prompt (lorafleet explain "...") or --replay FILE', status=2)
    if policy and replay is None:
        raise CommandFailed(
            "--policy goes with --replay; a live request is decided by the router's own policy", status=2
        )
    with context.obj.router() as api:
        if replay is not None:
            _print_replay(api, replay, policy, as_json=as_json)
            return
        body = {"model": model or _first_base_model(api), "messages": [{"role": "user", "content": prompt}]}
        answer = api.call("POST", "/v1/route", body | ({"lora_id": lora_id} if lora_id else {}))
    _print_decision(answer, as_json=as_json)


@app.command()
def decisions(
    context: typer.Context,
    request: Annotated[
        str | None, typer.Argument(help="show one request's decision in full: its x-request-id", show_default=False)
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="a lora_id, lora_id@digest, or base", autocompletion=adapter_names)
    ] = None,
    worker: Annotated[
        str | None, typer.Option(help="the worker that got the request", autocompletion=worker_names)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="most decisions shown; the router keeps 1,000")] = 20,
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
) -> None:
    """List the last decisions, newest first: predicted and actual cached tokens, queue wait, time to first data.

    `waited s` is the time in the router's queue. `first data s` is from there to the first token, or to the whole
    answer if it is not streamed.

    Examples:

      lorafleet decisions --adapter sql-expert/v1 --limit 5

      lorafleet decisions 5f1c0e3b9f8e4b6f8d3c1a2b4c5d6e7f

      lorafleet decisions --worker w1 --json > w1.json
    """
    chosen = chosen_format(output, as_json)
    with context.obj.router() as api:
        query = {"adapter": adapter, "worker": worker, "request": request, "limit": limit}
        answer = api.call("GET", "/v1/decisions", **query)
    if request is None or chosen is not OutputFormat.table:
        print_list(DECISIONS, answer, chosen, as_json=False)
    elif not answer["data"]:
        raise CommandFailed(
            f"{request}: this router keeps no decision of it. What became of it, at whichever router: lorafleet request"
            f" {request}" + ("; a process of this router did not answer" if answer.get("missing") else "")
        )
    else:
        # Newest first: a retried request has several decisions.
        for item in answer["data"]:
            _print_decision(item)


def _print_decision(answer: Item, *, as_json: bool = False) -> None:
    """Print one decision: as JSON only, or as a sentence, a table of terms, the rejected replicas and its note."""
    from lorafleet.cli import tables
    from lorafleet.cli.decisions import explanations

    if as_json:
        print_json(answer)
        return
    typer.echo(explanations.decision_summary(answer))
    if answer["scores"]:
        tables.show(explanations.decision(answer))
    for line in explanations.not_considered_lines(answer):
        typer.echo(line)
    if answer.get("note"):
        typer.echo(answer["note"])


def _print_replay(api: "RestClient", file: Path, policy: str | None, *, as_json: bool) -> None:
    """Replay recorded decisions at the router and print them beside the records.

    Raises CommandFailed if one differs without `policy`.
    """
    from lorafleet.cli import tables
    from lorafleet.cli.decisions import explanations

    first = read_decisions(file)
    replayed = replay_decisions(api, first, policy)
    # A bare record does not have its worker.
    differ = sum(
        before.get("worker_id", now["worker_id"]) != now["worker_id"]
        for before, now in zip(first, replayed, strict=True)
    )
    if as_json:
        print_json({"data": replayed})
    elif len(replayed) == 1:
        _print_decision(replayed[0])
    else:
        tables.show(explanations.replays(first, replayed))
        typer.echo(f"{len(replayed) - differ} of {len(replayed)} as before")
    if differ and policy is None:
        raise CommandFailed(f"{differ} of {len(replayed)} differ from the record: this router has another cost model")


def _first_base_model(api: "RestClient") -> str:
    """Ask the router for its first base model; raises CommandFailed if it knows none."""
    for item in api.call("GET", "/v1/models")["data"]:
        if not item.get("parent"):
            return str(item["id"])
    raise CommandFailed("the router knows no base model yet; name one with --model")


@app.command()
def request(
    context: typer.Context,
    request_id: Annotated[str, typer.Argument(help="the answer's x-request-id", show_default=False)],
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
) -> None:
    """Show what became of a request: key, limit, waits with their causes, decision, attempts, code, seconds by stage.

    Any router may be asked: it asks the others through the orchestrator. Refused requests are kept, too. A tenant's
    key sees its tenant's requests. No prompt is kept.

    Examples:

      lorafleet request 5f1c0e3b9f8e4b6f8d3c1a2b4c5d6e7f

      lorafleet request 5f1c0e3b9f8e4b6f8d3c1a2b4c5d6e7f -o yaml
    """
    from lorafleet.cli import tables
    from lorafleet.cli.decisions import explanations

    chosen = chosen_format(output, as_json)
    with context.obj.router() as api:
        answer = api.call("GET", f"/v1/requests/{quote(request_id, safe='')}")
    if chosen is not OutputFormat.table:
        print_list(REQUESTS, answer, chosen, as_json=False)
        return
    for number, item in enumerate(answer["data"]):
        if number:
            typer.echo()
        tables.show(explanations.story(item))
        for decision in item["decisions"]:
            _print_decision(decision)


@app.command()
def requests(
    context: typer.Context,
    key: Annotated[str | None, typer.Option(help="a key's id", show_default=False)] = None,
    tenant: Annotated[str | None, typer.Option(show_default=False)] = None,
    status: Annotated[
        str | None, typer.Option(help="a status, 4xx, 5xx, or failed: every error", show_default=False)
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="a lora_id, an alias, or base", autocompletion=adapter_names)
    ] = None,
    worker: Annotated[
        str | None, typer.Option(help="the worker that got the request", autocompletion=worker_names)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="most requests shown")] = 20,
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
) -> None:
    """List the last requests of all routers, newest first, the refused ones included.

    Examples:

      lorafleet requests --status failed

      lorafleet requests --key 2c26b46b68ff --status 429 -o wide
    """
    with context.obj.orchestrator() as api:
        query = {"key": key, "tenant": tenant, "status": status, "adapter": adapter, "worker": worker, "limit": limit}
        answer: dict[str, Any] = api.call("GET", "/v1/requests", **query)
    print_list(REQUESTS, answer, output, as_json)


@app.command()
def top(
    context: typer.Context,
    every_s: Annotated[float, typer.Option(min=0.2, help="seconds between updates, at least 1")] = 2.0,
    range_s: Annotated[float, typer.Option(min=60, max=172_800, help="seconds up to now that figures are of")] = 60.0,
    sort: Annotated[AdapterOrder, typer.Option(help="order of the adapters at the start")] = AdapterOrder.requests,
    as_json: Annotated[bool, typer.Option("--json", help="print one snapshot as JSON")] = False,
) -> None:
    """Show traffic, workers by load and adapters by traffic, live; once if the output is not a terminal.

    Keys: `s` and `w` sort adapters and workers by something else, space pauses, `e` explains the router's last request
    with every replica's cost terms, escape goes back, `q` quits.

    Examples:

      lorafleet top --every-s 5

      lorafleet top --sort errors --range-s 600

      lorafleet top --json
    """
    from lorafleet.cli.top.run import run

    run(context.obj, every_s=every_s, range_s=range_s, sort=sort, as_json=as_json)


def read_decisions(file: Path) -> list[Item]:
    """The decisions in a file: one, several, or a whole answer of `GET /v1/decisions`. Raises CommandFailed.

    file  `-` is standard input
    """
    try:
        content = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text())
    except (OSError, ValueError, RecursionError) as exc:
        raise CommandFailed(f"{file}: {exc}; {_RECORD_HINT}") from exc
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    items = content if isinstance(content, list) else [content]
    return [_decision_of(file, item) for item in items]


def replay_decisions(router: "RestClient", items: Sequence[Item], policy: str | None) -> list[Item]:
    """Have the router make each recorded decision again, by its own policy or by `policy`; the decisions now."""
    changes = {"policy": policy} if policy else {}
    return [router.call("POST", "/v1/decisions/replay", {**item, **changes}) for item in items]


def _decision_of(file: Path, item: Any) -> Item:
    """A decision from an item of a file: with its record, or a bare record. Raises CommandFailed."""
    if isinstance(item, dict) and isinstance(item.get("record"), dict):
        return item
    # The record alone, without the outcome.
    if isinstance(item, dict) and {"policy", "ask", "replicas"} <= item.keys():
        return {"record": item}
    raise CommandFailed(f"{file}: no decision with its record; {_RECORD_HINT}")
