"""`lorafleet placements`, `lorafleet workers` and `lorafleet policy`."""

# ruff: noqa: PLC0415  (rich tables are imported when a command needs them)

from typing import Annotated

import typer

from lorafleet.cli import plan
from lorafleet.cli.completion import WorkerName
from lorafleet.cli.context import if_match_header
from lorafleet.cli.output import AsJson, Output, OutputFormat, print_item, print_list
from lorafleet.service.urls import url_path

app = typer.Typer(no_args_is_help=True)
workers_app = typer.Typer(no_args_is_help=True, help="Workers: an engine with its agent.")
policy_app = typer.Typer(no_args_is_help=True, help="The global placement policy.")


@app.command()
def placements(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """List which adapter is on which worker, and whether it is wanted there.

    Example: lorafleet placements
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        print_list(tables.PLACEMENTS, api.list_all("/v1/placements"), output, as_json)


@workers_app.command("list")
def workers_list(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """List all workers: state, adapters, free slots.

    Example: lorafleet workers list
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        print_list(tables.WORKERS, api.list_all("/v1/workers"), output, as_json)


@workers_app.command("show")
def workers_show(
    context: typer.Context, worker: WorkerName, output: Output = OutputFormat.table, as_json: AsJson = False
) -> None:
    """Show one worker: state, capacity, adapters, files, load, and how far a drain is.

    Example: lorafleet workers show w1
    """
    with context.obj.orchestrator() as api:
        print_item(api.call("GET", f"/v1/workers/{url_path(worker)}"), worker, output, as_json)


@workers_app.command("cordon")
def workers_cordon(context: typer.Context, worker: WorkerName) -> None:
    """Place no new adapters on a worker; it keeps serving those it has.

    Example: lorafleet workers cordon w1
    """
    _post_worker_action(context, worker, "cordon", "is cordoned")


@workers_app.command("uncordon")
def workers_uncordon(context: typer.Context, worker: WorkerName) -> None:
    """Use a cordoned or drained worker again.

    Example: lorafleet workers uncordon w1
    """
    _post_worker_action(context, worker, "uncordon", "is in use again")


@workers_app.command("drain")
def workers_drain(
    context: typer.Context,
    worker: WorkerName,
    deadline_s: Annotated[
        float | None,
        typer.Option(min=0, help="longest time for moving its adapters, in seconds; default: by what is to be moved"),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="show the progress, and return when the worker is drained")
    ] = False,
) -> None:
    """Move a worker's adapters to other workers and send it no more requests. Repeating it changes nothing.

    With --wait, the exit status is 1 if adapters are left at the deadline: requests for them wait for a load then.

    Examples:

      lorafleet workers drain w1

      lorafleet workers drain w1 --wait

      lorafleet workers drain w1 --deadline-s 60
    """
    from lorafleet.cli import drain

    body = {} if deadline_s is None else {"deadline_s": deadline_s}
    with context.obj.orchestrator() as api:
        item = api.call("POST", f"/v1/workers/{url_path(worker)}/drain", body)
        typer.echo(drain.drain_line(item))
        if wait:
            drain.follow_drain(api, item)


def _post_worker_action(context: typer.Context, worker: str, action: str, result: str) -> None:
    """POST an action of a worker, then print the worker's name and `result`."""
    with context.obj.orchestrator() as api:
        api.call("POST", f"/v1/workers/{url_path(worker)}/{action}")
    typer.echo(f"{worker} {result}")


@policy_app.command("show")
def policy_show(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """Show the policy in force and its etag.

    Example: lorafleet policy show
    """
    with context.obj.orchestrator() as api:
        policy, etag = api.get_with_etag("/v1/policy")
    print_item(policy | {"etag": etag.strip('"')}, "policy", output, as_json)


@policy_app.command("set")
def policy_set(
    context: typer.Context,
    changes: Annotated[list[str], typer.Argument(help="NAME=VALUE, see `policy show`")],
    if_match: Annotated[
        str | None, typer.Option(help="change only if the etag of `policy show` is still this one")
    ] = None,
) -> None:
    """Change parts of the policy, effective at once.

    Examples:

      lorafleet policy set loading=eager reserve_slots=0

      lorafleet policy set loading=eager --if-match 3c1f9c6d2ab04e11
    """
    body = dict(map(plan.parse_setting, changes))
    with context.obj.orchestrator() as api:
        from lorafleet.cli import tables

        tables.show(tables.fields(api.call("PATCH", "/v1/policy", body, headers=if_match_header(if_match))))
