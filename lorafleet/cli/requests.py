"""`lorafleet request` and `lorafleet requests`: what became of requests, the refused ones included."""

# ruff: noqa: PLC0415, PLR0917  (rich tables wait until a command needs them; Typer passes by name)

from typing import Annotated, Any
from urllib.parse import quote

import typer

from lorafleet.cli.completion import adapter_names, worker_names
from lorafleet.cli.output import AsJson, Output, OutputFormat, chosen_format, print_list

app = typer.Typer(no_args_is_help=True)


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
    from lorafleet.cli import explanations, tables

    chosen = chosen_format(output, as_json)
    with context.obj.router() as api:
        answer = api.call("GET", f"/v1/requests/{quote(request_id, safe='')}")
    if chosen is not OutputFormat.table:
        print_list(tables.REQUESTS, answer, chosen, as_json=False)
        return
    for number, item in enumerate(answer["data"]):
        if number:
            typer.echo()
        tables.show(explanations.story(item))
        for decision in item["decisions"]:
            typer.echo(explanations.decision_summary(decision))
            if decision["scores"]:
                tables.show(explanations.decision(decision))
            for line in explanations.not_considered_lines(decision):
                typer.echo(line)


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
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        query = {"key": key, "tenant": tenant, "status": status, "adapter": adapter, "worker": worker, "limit": limit}
        answer: dict[str, Any] = api.call("GET", "/v1/requests", **query)
    print_list(tables.REQUESTS, answer, output, as_json)
    if answer["missing"] and chosen_format(output, as_json) in (OutputFormat.table, OutputFormat.wide):
        typer.echo(f"incomplete: these routers did not answer in time: {', '.join(answer['missing'])}", err=True)
