"""`lorafleet history` and `backup`: what happened in a fleet, and a copy of its store."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cli.output import AsJson, Output, OutputFormat, print_list
from lorafleet.cli.resources import HISTORY, adapter_names, worker_names
from lorafleet.service.failure import CommandFailed

app = typer.Typer(no_args_is_help=True)


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
    print_list(HISTORY, answer, output, as_json)


def time_of(text: str, option: str) -> str:
    """The time that an option names, as ISO 8601; a duration counts back from now. Raises CommandFailed."""
    from lorafleet.keys.key_edits import is_duration, parse_duration  # noqa: PLC0415

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
