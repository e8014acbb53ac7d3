"""`lorafleet export`, `import` and `sync`: a fleet's adapters, aliases and policy, in a file or in another fleet."""

# ruff: noqa: PLC0415  (`lorafleet --help` must not wait for httpx, rich tables or YAML)

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafleet.cli.columns import Column, ListView
from lorafleet.cli.context import LONG_TIMEOUT_S, print_json
from lorafleet.cli.output import print_table
from lorafleet.service.failure import CommandFailed

if TYPE_CHECKING:
    from lorafleet.cli.client import RestClient

app = typer.Typer(no_args_is_help=True)

Change = Mapping[str, Any]
_PARTS = ("adapters", "aliases", "policy")
_POLL_S = 1.0
_SHOWN = 60
_DIGEST_DIGITS = 64
_EVERY_PART = ",".join(_PARTS)

DryRun = Annotated[bool, typer.Option("--dry-run", help="show what differs, and change nothing")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask before the changes are made")]
Prune = Annotated[bool, typer.Option("--prune", help="also delete adapters and aliases that the record does not have")]
Only = Annotated[str, typer.Option(help="comma-separated parts: adapters, aliases, policy")]
AsJson = Annotated[bool, typer.Option("--json", help="print the orchestrator's whole answer")]


@app.command("export")
def export_record(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="a file; default: standard output", show_default=False)] = None,
) -> None:
    """Write the fleet's record: adapters with their digests, aliases and policy, as JSON. No files, no secrets.

    Examples:

      lorafleet export fleet.json

      lorafleet export | jq '.adapters[].lora_id'
    """
    import json

    from lorafleet.service import files

    with context.obj.orchestrator(LONG_TIMEOUT_S) as api:
        record = api.call("GET", "/v1/export")
    if file is None:
        print_json(record)
        return
    try:
        files.write_atomically(file, json.dumps(record, indent=2).encode() + b"\n")
    except OSError as exc:
        raise CommandFailed(f"{file}: {files.write_error_text(exc, file.absolute().parent)}") from exc
    typer.echo(f"{file}: {len(record['adapters'])} adapters, {len(record['names'])} names and the policy")


@app.command("import")
def import_record(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="a file that `lorafleet export` wrote, as JSON or YAML")],
    dry_run: DryRun = False,
    yes: Yes = False,
    prune: Prune = False,
    only: Only = _EVERY_PART,
    as_json: AsJson = False,
) -> None:
    """Give this fleet the adapters, aliases and policy of a file; each adapter is fetched from its own source.

    Shows what differs first. A second import changes nothing. What only this fleet has stays, unless --prune.

    Examples:

      lorafleet import fleet.json --dry-run

      lorafleet import fleet.json --only adapters,aliases --yes
    """
    try:
        record = _read_record(file)
    except (OSError, ValueError) as exc:
        raise CommandFailed(f"{file}: {exc}; expected a file that `lorafleet export` wrote", status=2) from exc
    with context.obj.orchestrator(LONG_TIMEOUT_S) as api:
        changes = _bring_over(api, {"record": record}, str(file), dry_run, yes, prune, only, as_json=as_json)
    fail_if_blocked(changes, dry_run=dry_run)


@app.command()
def sync(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    source: Annotated[str, typer.Option("--from", metavar="URL", help="the other fleet's orchestrator")],
    from_token: Annotated[
        str,
        typer.Option(
            envvar="LORAFLEET_FROM_TOKEN", help="key for the other fleet, with scope export", show_default=False
        ),
    ] = "",
    from_token_file: Annotated[
        Path | None, typer.Option(help="file with that key, in place of --from-token", show_default=False)
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    prune: Prune = False,
    only: Only = _EVERY_PART,
    keep_sources: Annotated[
        bool,
        typer.Option("--keep-sources", help="fetch hf, s3, gs, az and https sources from there, not from the fleet"),
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="seconds to wait until this fleet has the new adapters' files")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Give this fleet the adapters, aliases and policy of another one, and the files by digest from its workers.

    Shows what differs first. Interrupted, it is run again: downloads go on where they were. Run again when all is
    equal, it does nothing. This fleet's orchestrator fetches the files, so its `peer_fleets` must name the URL.

    Examples:

      lorafleet sync --from https://orchestrator.eu.example --from-token-file eu.key --dry-run

      lorafleet sync --from https://orchestrator.eu.example --from-token-file eu.key --only adapters,aliases --yes
    """
    from lorafleet.cli.client import RestClient

    if from_token_file is not None:
        try:
            from_token = from_token_file.read_text().strip()
        except (OSError, ValueError) as exc:
            raise CommandFailed(f"--from-token-file {from_token_file}: {exc}", status=2) from exc
    key_option = "--from-token KEY, or LORAFLEET_FROM_TOKEN"
    with RestClient(source, from_token, flag="--from", key_option=key_option) as other:
        record = other.call("GET", "/v1/export")
    body = {"record": record, "from_fleet": other.url, "keep_sources": keep_sources}
    with context.obj.orchestrator(LONG_TIMEOUT_S) as api:
        changes = _bring_over(api, body, other.url, dry_run, yes, prune, only, as_json=as_json)
        added = [c["name"] for c in changes if (c["subject"], c["change"]) == ("adapter", "add")]
        if added and not dry_run and wait:
            _wait_for_files(api, added, wait)
    fail_if_blocked(changes, dry_run=dry_run)


def _read_record(file: Path) -> Any:
    """The JSON or YAML value of a file. Raises OSError, ValueError."""
    from lorafleet.service import yamls

    return yamls.parse_json_or_yaml(file.read_text(encoding="utf-8"))


def _bring_over(  # noqa: PLR0917
    api: "RestClient",
    body: dict[str, Any],
    place: str,
    dry_run: bool,
    yes: bool,
    prune: bool,
    only: str,
    *,
    as_json: bool,
) -> list[dict[str, Any]]:
    """Show the differences, ask, and make the changes; returns those made or, for a dry run, those to make.

    Raises CommandFailed for an unknown part, and without consent. What is not possible is returned as `blocked`.
    """
    parts = [part.strip() for part in only.split(",") if part.strip()]
    if unknown := sorted(set(parts) - set(_PARTS)):
        raise CommandFailed(f"--only {', '.join(unknown)}: not a part; there are {', '.join(_PARTS)}", status=2)
    body = body | {"parts": parts, "prune": prune}
    return make_changes(
        api, "/v1/import", body, place, dry_run=dry_run, ask_before=_always_unless(yes), as_json=as_json
    )


def _always_unless(yes: bool) -> Callable[[Change], bool]:
    """Whether consent is needed for a change: for each of them, or for none with --yes."""
    return lambda _change: not yes


def make_changes(
    api: "RestClient",
    path: str,
    body: Mapping[str, Any],
    place: str,
    *,
    dry_run: bool,
    ask_before: Callable[[Change], bool],
    as_json: bool,
) -> list[dict[str, Any]]:
    """Show what a call of `path` would change, ask where needed, and make the changes; returns them.

    place       what the fleet is compared with, for messages
    ask_before  whether consent is needed for this change

    Raises CommandFailed without consent. What is not possible is returned as `blocked`.
    """
    answer = api.call("POST", path, body, dry_run=True)
    changes = answer["changes"]
    if as_json and dry_run:
        print_json(answer)
        return list(changes)
    if not as_json:
        _print_changes(changes, api.url, place)
    possible = [change for change in changes if change["change"] != "blocked"]
    if dry_run or not possible:
        if as_json:
            print_json(answer)
        return list(changes)
    if any(map(ask_before, possible)):
        _confirm_changes(len(possible), api.url)
    answer = api.call("POST", path, body)
    changes = answer["changes"]
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{sum(change['change'] != 'blocked' for change in changes)} changes made")
    return list(changes)


def _short_value_text(value: Any) -> str:
    """A value as text of at most 60 characters; a digest by its first 12, as everywhere."""
    text = "-" if value is None else str(value)
    if len(text) == _DIGEST_DIGITS and text.isalnum():
        return text[:12]
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _changed_values_of_side(side: int) -> Callable[[Mapping[str, Sequence[Any]]], str]:
    """The values of changed fields as text: here (0), or there (1)."""
    return lambda fields: ", ".join(f"{name}={_short_value_text(pair[side])}" for name, pair in fields.items())


_CHANGES = ListView(
    (
        Column("change"),
        Column("subject"),
        Column("name"),
        Column("here", "fields", _changed_values_of_side(0)),
        Column("there", "fields", _changed_values_of_side(1)),
        Column("reason"),
    )
)


def _print_changes(changes: Sequence[Mapping[str, Any]], here: str, place: str) -> None:
    """Print the differences as a table, or that there are none."""
    if not changes:
        typer.echo(f"nothing to do: {here} has all that {place} has")
        return
    print_table(_CHANGES, changes)


def _confirm_changes(count: int, here: str) -> None:
    """Ask for consent; raises CommandFailed without it, and where nobody can be asked."""
    if not sys.stdin.isatty():
        raise CommandFailed(f"{count} changes to {here} need consent: give --yes, or --dry-run to see them", status=2)
    if not typer.confirm(f"make {count} changes to {here}?"):
        raise CommandFailed("nothing was changed")


def fail_if_blocked(changes: Sequence[Mapping[str, Any]], *, dry_run: bool) -> None:
    """Raise CommandFailed with the blocked changes of an import. A dry run only shows them."""
    blocked = [change for change in changes if change["change"] == "blocked"]
    if blocked and not dry_run:
        first = blocked[0]
        raise CommandFailed(f"{len(blocked)} of {len(changes)} not made; {first['name']}: {first['reason']}")


def _wait_for_files(api: "RestClient", lora_ids: Sequence[str], within_s: float) -> None:
    """Wait until workers have verified the files of these adapters. Raises CommandFailed when some are missing then."""
    from lorafleet.cli.client import read_patiently
    from lorafleet.local.progress import StartProgress

    deadline, missing, errors = time.monotonic() + within_s, set(lora_ids), dict[str, str]()
    with StartProgress() as steps, steps.step("files", f"{len(missing)} adapters are fetched by digest"):
        while missing and time.monotonic() < deadline:
            items = read_patiently(lambda: api.list_all("/v1/adapters"))
            found = {item["lora_id"]: item["status"] for item in items if item["lora_id"] in missing}
            missing = {lora_id for lora_id in missing if lora_id in found and found[lora_id]["card"] is None}
            errors = {lora_id: found[lora_id]["error"] for lora_id in missing if found[lora_id]["error"]}
            if missing:
                time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
    for lora_id, error in sorted(errors.items()):
        typer.echo(f"{lora_id}: {error}")
    if missing:
        raise CommandFailed(
            f"the files of {len(missing)} of {len(lora_ids)} adapters are not here yet after {within_s:g} s, such as"
            f" {min(missing)}; they are registered, and workers go on fetching them"
        )
    typer.echo(f"the files of {len(lora_ids)} adapters are here")
