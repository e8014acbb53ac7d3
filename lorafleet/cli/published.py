"""`lorafleet published`: names that trainers publish versions under."""

# ruff: noqa: PLC0415  (rich tables are imported when a command needs them)

import typer

from lorafleet.cli.completion import PublishedName
from lorafleet.cli.output import AsJson, Output, OutputFormat, print_item, print_list
from lorafleet.service.urls import url_path

app = typer.Typer(no_args_is_help=True, help="Published names: list, show, remove.")


@app.command("list")
def published_list(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """List the published names: the version that each points at, where it is ready, and how many are kept.

    Example: lorafleet published list -o wide
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        print_list(tables.PUBLISHED, api.list_all("/v1/published"), output, as_json)


@app.command("show")
def published_show(
    context: typer.Context, name: PublishedName, output: Output = OutputFormat.table, as_json: AsJson = False
) -> None:
    """Show a published name and all versions of it that are kept.

    Example: lorafleet published show team-a/policy
    """
    with context.obj.orchestrator() as api:
        print_item(api.call("GET", f"/v1/published/{url_path(name)}"), name, output, as_json)


@app.command("rm")
def published_rm(context: typer.Context, name: PublishedName) -> None:
    """Remove a published name with all its versions, each after its requests in flight.

    Example: lorafleet published rm team-a/policy
    """
    with context.obj.orchestrator() as api:
        api.call("DELETE", f"/v1/published/{url_path(name)}")
    typer.echo(f"{name} is being removed, with all its versions")
