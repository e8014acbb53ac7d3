"""`lorafleet plan`, `orphans`, `history` and `backup`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafleet.cli.completion import adapter_names, worker_names
from lorafleet.cli.context import named_tenants, print_json
from lorafleet.cli.output import AsJson, Output, OutputFormat, print_list
from lorafleet.service.failure import CommandFailed

app = typer.Typer(no_args_is_help=True)
orphans_app = typer.Typer(no_args_is_help=True, help="Orphans: adapters on workers that are not registered.")
app.add_typer(orphans_app, name="orphans")


@app.command()
def plan(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    demand: Annotated[
        list[str] | None,
        typer.Option(help="LORA_ID=x10 (ten times the current rate) or LORA_ID=3.5 (requests a second); repeat"),
    ] = None,
    without_worker: Annotated[list[str] | None, typer.Option(help="plan without this worker; repeat")] = None,
    more_workers: Annotated[
        list[str] | None, typer.Option(help="N, or N:WORKER for N more workers like WORKER; repeat")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the global policy; repeat")] = None,
    adapter_policy: Annotated[
        list[str] | None, typer.Option(help="LORA_ID:NAME=VALUE of one adapter's policy; repeat")
    ] = None,
    passes: Annotated[int, typer.Option(min=1, max=200, help="maximum number of passes to plan ahead")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="print the orchestrator's whole answer")] = False,
) -> None:
    """Show what the orchestrator would do under these assumptions, why, and at what cost. Changes nothing.

    Without options: the next pass. With options: all passes until nothing is left to do. Bytes are the adapters'
    sizes, seconds the median of measured loads; drains are assumed to end at once.

    Examples:

      lorafleet plan

      lorafleet plan --demand sql-expert/v1=x10

      lorafleet plan --without-worker w0 --more-workers 2:w1

      lorafleet plan --policy reserve_slots=0 --adapter-policy legal/v2:min_replicas=3
    """
    from lorafleet.cli import change_tables, tables  # noqa: PLC0415  (`lorafleet --help` must not wait for rich tables)
    from lorafleet.local.progress import StartProgress  # noqa: PLC0415

    body = {
        "demand": dict(map(_parse_demand, demand or ())),
        "workers_gone": without_worker or [],
        "workers_more": [_parse_more_workers(text) for text in more_workers or ()],
        "policy": dict(map(parse_setting, policy or ())),
        "adapter_policies": _parse_adapter_policies(adapter_policy or ()),
    }
    has_assumptions = any(body.values())
    with context.obj.orchestrator() as api, StartProgress() as steps, steps.step("plan", "computing the next passes"):
        answer = api.call("POST", "/v1/placements/plan", body | {"passes": passes} if has_assumptions else None)
    if as_json:
        print_json(answer)
        return
    if answer["actions"]:
        tables.show(change_tables.plan(answer["actions"]))
    for line in change_tables.plan_lines(answer):
        typer.echo(line)


@orphans_app.command("list")
def orphans_list(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """List adapters on workers that are not registered: another client loaded them, or the store was lost or restored.

    Example: lorafleet orphans list
    """
    from lorafleet.cli import tables  # noqa: PLC0415

    with context.obj.orchestrator() as api:
        print_list(tables.ORPHANS, api.list_all("/v1/orphans"), output, as_json)


@orphans_app.command("adopt")
def orphans_adopt(
    context: typer.Context,
    lora_ids: Annotated[
        list[str] | None, typer.Argument(help="lora_ids to adopt; default: all", show_default=False)
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="tenant that may use them; repeat; default: operators only")
    ] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="every tenant may")] = False,
) -> None:
    """Register orphans under their own names, for the whole fleet.

    Those that another client loaded into an engine are loaded again, under the fleet's engine name, and then unloaded
    under the old one. All others stay where they are.

    Their tenants were lost with the store: without --tenant or --everyone no tenant may use them. In a fleet without
    keys everyone may.

    Examples:

      lorafleet orphans adopt

      lorafleet orphans adopt sql-expert/v1 legal/v2 --tenant acme
    """
    tenants = named_tenants(tenant, everyone)
    body = {"lora_ids": lora_ids or None, "tenants": None if everyone else tenants or []}
    with context.obj.orchestrator() as api:
        results = api.call("POST", "/v1/orphans/adopt", body)["data"]
    refused = [item for item in results if item["status"] >= 400]
    typer.echo(f"{len(results) - len(refused)} adopted")
    for item in refused:
        typer.echo(f"{item['lora_id']}: {item['error']}")
    # An adapter that was named and cannot be adopted is a failure; without names it is only reported.
    if refused and lora_ids:
        raise CommandFailed(f"{len(refused)} of {len(results)} not adopted")


@app.command()
def history(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    subject: Annotated[
        str | None, typer.Argument(help="a lora_id, an alias or a worker; default: all", show_default=False)
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="such as alias_set or policy_changed; incident: all incidents; repeat")
    ] = None,
    worker: Annotated[str | None, typer.Option(help="what concerns this worker", autocompletion=worker_names)] = None,
    adapter: Annotated[
        str | None, typer.Option(help="what concerns this lora_id", autocompletion=adapter_names)
    ] = None,
    since: Annotated[str | None, typer.Option(help="8h or 2d before now, or a time such as 2026-11-26T18:00Z")] = None,
    until: Annotated[str | None, typer.Option(help="the same, for the end")] = None,
    severity: Annotated[str | None, typer.Option(help="incidents at least so bad: info, warning or error")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 20,
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
) -> None:
    """List changes with their callers, and incidents with their causes, newest first.

    Examples:

      lorafleet history sql-expert

      lorafleet history --kind policy_changed --limit 5

      lorafleet history --kind incident --severity error --since 12h
    """
    from lorafleet.cli import tables  # noqa: PLC0415

    with context.obj.orchestrator() as api:
        answer = api.call(
            "GET",
            "/v1/history",
            subject=subject,
            kind=kind,
            worker=worker,
            adapter=adapter,
            since=since and time_of(since, "--since"),
            until=until and time_of(until, "--until"),
            severity=severity,
            limit=limit,
        )
    print_list(tables.HISTORY, answer, output, as_json)


def time_of(text: str, option: str) -> str:
    """The time that an option names, as ISO 8601; a duration counts back from now. Raises CommandFailed."""
    from lorafleet.cli.keys import is_duration, parse_duration  # noqa: PLC0415

    if is_duration(text):
        return (datetime.now(UTC) - parse_duration(text, option)).isoformat()
    try:
        return datetime.fromisoformat(text).isoformat()
    except ValueError as exc:
        expected = "expected a duration such as 8h, or a time such as 2026-11-26T18:00Z"
        raise CommandFailed(f"{option} {text}: {expected}", status=2) from exc


@app.command()
def backup(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="a new file; an existing file is never overwritten")],
) -> None:
    """Copy the orchestrator's store while it is in use. To restore, start an orchestrator with `--store` on the copy.

    Deletions, drains and rollouts in progress are left out, so that a restore takes nothing from a fleet.

    Example: lorafleet backup lorafleet-2026-11-21.db
    """
    from lorafleet.service import files  # noqa: PLC0415

    with context.obj.orchestrator() as api:
        content = api.download("/v1/backup")
    try:
        if file.exists() or file.is_symlink():
            raise CommandFailed(f"{file}: exists already; name a new file")
        files.write_atomically(file, content)
    except OSError as exc:
        hint = "" if files.is_full(exc) else "; name a new file in a folder that can be written"
        raise CommandFailed(f"{file}: {files.write_error_text(exc, file.absolute().parent)}{hint}") from exc
    typer.echo(f"{file}: {len(content):,} bytes")


def _parse_demand(text: str) -> tuple[str, dict[str, float]]:
    """A lora_id and its demand from `LORA_ID=x10` or `LORA_ID=3.5`; raises CommandFailed."""
    lora_id, _, amount = text.rpartition("=")
    try:
        if amount.startswith("x"):
            return lora_id, {"factor": float(amount[1:])}
        return lora_id, {"requests_per_s": float(amount)}
    except ValueError as exc:
        raise CommandFailed(f"{text}: write LORA_ID=x10 or LORA_ID=3.5", status=2) from exc


def _parse_more_workers(text: str) -> dict[str, Any]:
    """A number of more workers and the worker they are like, from `N` or `N:WORKER`; raises CommandFailed."""
    count, _, like = text.partition(":")
    if not count.isdecimal():
        raise CommandFailed(f"{text}: write N, or N:WORKER", status=2)
    return {"count": int(count), "like": like or None}


def parse_setting(text: str, names: str = "lorafleet policy show") -> tuple[str, Any]:
    """The name and the YAML value of `name=value`; raises CommandFailed.

    names  the command that lists the names
    """
    from lorafleet.service import yamls  # noqa: PLC0415

    name, equals, value = text.partition("=")
    if not equals:
        raise CommandFailed(f"{text}: write NAME=VALUE; `{names}` has the names", status=2)
    try:
        return name.strip().replace("-", "_"), yamls.parse_yaml(value)
    except yamls.InvalidYaml as exc:
        raise CommandFailed(
            f"{text[:200]}: the value is not YAML ({str(exc).splitlines()[0]}); put text in quotes", status=2
        ) from exc


def _parse_adapter_policies(texts: list[str] | tuple[()]) -> dict[str, dict[str, Any]]:
    """Policy changes by lora_id, from texts `LORA_ID:NAME=VALUE`; raises CommandFailed."""
    policies: dict[str, dict[str, Any]] = {}
    for text in texts:
        # A lora_id may have colons; a policy's fields have none, and come before the first "=".
        named, equals, value_text = text.partition("=")
        lora_id, colon, field = named.rpartition(":")
        if not (colon and equals):
            raise CommandFailed(f"{text}: write LORA_ID:NAME=VALUE", status=2)
        name, value = parse_setting(f"{field}={value_text}")
        policies.setdefault(lora_id, {})[name] = value
    return policies
