"""`lorafleet pauses`: the pauses that hold requests, and their end."""

# ruff: noqa: PLC0415  (rich tables are imported when a command needs them)

from typing import Annotated

import typer

from lorafleet.cli.output import AsJson, Output, OutputFormat, print_list

app = typer.Typer(no_args_is_help=True, help="Pauses: new requests of a tenant, or of all, that routers hold.")


@app.command("list")
def pauses_list(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """List the pauses in force: whose requests they hold, who made them, and when they end by themselves.

    Example: lorafleet pauses list
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        print_list(tables.PAUSES, api.list_all("/v1/pauses"), output, as_json)


@app.command("end")
def pauses_end(
    context: typer.Context,
    tenant: Annotated[
        str | None, typer.Option(help="of this tenant; empty: the whole fleet's; default: of the key's own tenant")
    ] = None,
    namespace: Annotated[str, typer.Option(help="of this namespace")] = "",
) -> None:
    """End a pause now: the requests that it holds start.

    Examples:

      lorafleet pauses end

      lorafleet pauses end --tenant acme --namespace run-1
    """
    with context.obj.orchestrator() as api:
        ended = api.call("DELETE", "/v1/pauses", tenant=tenant, namespace=namespace or None)["data"]
    typer.echo(f"ended: {ended[0]['scope']}, paused by {ended[0]['owner']}" if ended else "nothing was paused")
