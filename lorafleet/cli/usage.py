"""`lorafleet usage`: what each tenant, key, adapter and base model has used."""

from typing import Annotated

import typer

from lorafleet.cli.history import time_of
from lorafleet.cli.output import AsJson, Output, OutputFormat, print_list
from lorafleet.cli.resources import adapter_names, usage_view

app = typer.Typer(no_args_is_help=True)


@app.command()
def usage(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", help="hour, tenant, key, adapter, version or base_model; repeat; default: tenant"),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="30d before now, or a time such as 2026-11-01; default: this month", show_default=False),
    ] = None,
    until: Annotated[str | None, typer.Option(help="the same, for the end; default: now", show_default=False)] = None,
    tenant: Annotated[str | None, typer.Option(help="of this tenant; '': of keys without one")] = None,
    key: Annotated[str | None, typer.Option(help="of the key with this id")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="of this lora_id; '': of base models", autocompletion=adapter_names)
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="of this base model and its adapters")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="print all of it as CSV, whatever --limit says")] = False,
) -> None:
    """Show what was used, by whole hours: requests, tokens, engine-seconds, and the cost if there is a price file.

    Examples:

      lorafleet usage --since 2026-11-01 --until 2026-12-01

      lorafleet usage --by hour --by adapter --tenant acme --since 24h

      lorafleet usage --by tenant --by base_model --csv > november.csv
    """
    group_by = [name for given in by or ["tenant"] for name in given.replace("-", "_").split(",")]
    query = {
        "group_by": group_by,
        "since": since and time_of(since, "--since"),
        "until": until and time_of(until, "--until"),
        "tenant": tenant,
        "key": key,
        "adapter": adapter,
        "base_model": base_model,
    }
    with context.obj.orchestrator() as api:
        if as_csv:
            typer.echo(api.download("/v1/usage", format="csv", **query).decode().replace("\r\n", "\n"), nl=False)
            return
        answer = api.call("GET", "/v1/usage", limit=limit, **query)
    print_list(usage_view(group_by, answer.get("currency")), answer, output, as_json)
    if answer.get("next") is not None:
        typer.echo(f"the first {limit}: give --limit for more, or --csv for all", err=True)
