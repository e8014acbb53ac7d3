"""`lorafleet placements`, `workers drain`, `workers unload`, `policy set` and `pauses end`."""

from typing import Annotated

import typer

from lorafleet.cli.columns import Item
from lorafleet.cli.context import parse_setting
from lorafleet.cli.output import AsJson, Output, OutputFormat
from lorafleet.cli.resources import ADAPTERS, PAUSES, PLACEMENTS, POLICY, WORKERS, drain_text
from lorafleet.cli.verbs import change, follow, print_all
from lorafleet.service.failure import CommandFailed
from lorafleet.service.network.urls import url_path

app = typer.Typer(no_args_is_help=True)
workers_app = WORKERS.app()
policy_app = POLICY.app()
pauses_app = PAUSES.app()
_POLL_S = 0.5


@app.command()
def placements(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """List which adapter is on which worker, and whether it is wanted there.

    Example: lorafleet placements
    """
    print_all(context, PLACEMENTS, output, as_json)


@workers_app.command("drain")
def workers_drain(
    context: typer.Context,
    worker: Annotated[str, WORKERS.argument()],
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
    path = WORKERS.path(worker)
    with context.obj.orchestrator() as api:
        item = api.call("POST", f"{path}/drain", {} if deadline_s is None else {"deadline_s": deadline_s})
        typer.echo(_drain_line(item))
        if wait:
            # 404: the orchestrator was restarted, and has not heard from the worker since.
            item = follow(
                api,
                path,
                item,
                line=_drain_line,
                is_over=_is_drain_over,
                step=_drain_step,
                every_s=_POLL_S,
                passing=(404,),
            )
            _require_drained(item)


def _drain_line(item: Item) -> str:
    """A worker, its state and its drain's progress, in one line."""
    progress = drain_text(item.get("drain"))
    return f"{item['id']} is {item['state']}" + (f": {progress}" if progress else "")


def _is_drain_over(item: Item) -> bool:
    """Whether the worker is drained, or does not drain any more."""
    return bool(item["state"] != "draining" or (item.get("drain") or {}).get("phase") == "drained")


def _drain_step(item: Item) -> tuple[object, ...]:
    """What makes a new line of progress: the state, the phase and the number of moved adapters."""
    drain = item.get("drain") or {}
    return item["state"], drain.get("phase"), drain.get("moved")


def _require_drained(item: Item) -> None:
    """Raise CommandFailed when adapters are left on the worker, or it does not drain any more."""
    if item["state"] != "draining":
        raise CommandFailed(f"{item['id']} is {item['state']}: its drain was taken back, or it is gone")
    if left := item["drain"]["left"]:
        raise CommandFailed(f"these adapters of {item['id']} are ready nowhere else: {', '.join(left)}")


@workers_app.command("unload")
def workers_unload(
    context: typer.Context,
    worker: Annotated[str, WORKERS.argument()],
    lora_id: Annotated[str, ADAPTERS.argument()],
    wait: Annotated[bool, typer.Option("--wait", help="return when the copy is gone")] = False,
) -> None:
    """Unload one adapter from one worker, and keep it out of there until `workers allow`. Its requests finish first.

    LORA_ID may be the engine name of a copy that another client loaded.

    Examples:

      lorafleet workers unload w1 sql-expert/v1

      lorafleet workers unload w1 sql-expert/v1 --wait
    """

    def line(item: Item) -> str:
        """Whether the copy is there still."""
        state = "drains" if lora_id in item["adapters"] else "is not loaded"
        return f"{lora_id} {state} on {item['id']}, which keeps it out until `workers allow`"

    with context.obj.orchestrator() as api:
        item = api.call("DELETE", f"{WORKERS.path(worker)}/adapters/{url_path(lora_id)}")
        typer.echo(line(item))
        if wait:
            follow(
                api,
                WORKERS.path(worker),
                item,
                line=line,
                is_over=lambda item: lora_id not in item["adapters"],
                every_s=_POLL_S,
                passing=(404,),
            )


@workers_app.command("allow")
def workers_allow(
    context: typer.Context,
    worker: Annotated[str, WORKERS.argument()],
    lora_id: Annotated[str, ADAPTERS.argument()],
) -> None:
    """Let an adapter be placed on a worker again that `workers unload` keeps out. Loads nothing by itself.

    Example: lorafleet workers allow w1 sql-expert/v1
    """
    with context.obj.orchestrator() as api:
        item = api.call("POST", f"{WORKERS.path(worker)}/adapters/{url_path(lora_id)}")
    typer.echo(f"{lora_id} may be placed on {item['id']} again")


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
    change(context, POLICY, None, dict(map(parse_setting, changes)), if_match)


@pauses_app.command("end")
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
        ended = api.call("DELETE", PAUSES.route, tenant=tenant, namespace=namespace or None)["data"]
    typer.echo(f"ended: {ended[0]['scope']}, paused by {ended[0]['owner']}" if ended else "nothing was paused")
