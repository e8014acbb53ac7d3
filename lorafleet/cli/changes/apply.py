"""`lorafleet apply`: give a fleet what a file says; run it again, and nothing changes."""

# ruff: noqa: PLC0415  (YAML is imported when a command needs it)

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafleet.cli.changes.record import AsJson, DryRun, fail_if_blocked, make_changes
from lorafleet.cli.context import LONG_TIMEOUT_S
from lorafleet.service.failure import CommandFailed

if TYPE_CHECKING:
    from yaml.nodes import Node

app = typer.Typer(no_args_is_help=True)


@app.command("apply")
def apply_file(
    context: typer.Context,
    file: Annotated[str, typer.Option("--file", "-f", help="YAML or JSON; - is standard input")],
    dry_run: DryRun = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="also delete what the file's sections do not have; asks first")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask before a prune")] = False,
    as_json: AsJson = False,
) -> None:
    """Give the fleet the adapters, aliases, policy and settings of published names that a file has.

    Shows what differs, then changes it. A second run changes nothing. Fields and sections that the file leaves out stay
    as they are. A folder as a source is relative to the file.

    Examples:

      lorafleet apply -f fleet.yaml --dry-run

      lorafleet apply -f fleet.yaml

      lorafleet apply -f fleet.yaml --prune --yes

      cat fleet.yaml | lorafleet apply -f -
    """
    from lorafleet.cli.client import RestError

    text, folder = read_text(file)
    body = {"file": with_whole_paths(_parsed_mapping(text, file), folder), "prune": prune}
    with context.obj.orchestrator(LONG_TIMEOUT_S) as api:
        try:
            changes = make_changes(
                api,
                "/v1/apply",
                body,
                file,
                dry_run=dry_run,
                ask_before=lambda change: change["change"] == "remove" and not yes,
                as_json=as_json,
            )
        except RestError as exc:
            if exc.param.partition(".")[0] != "file":
                raise
            raise CommandFailed(with_lines(str(exc), text, file), status=2) from exc
    fail_if_blocked(changes, dry_run=dry_run)


def read_text(file: str) -> tuple[str, Path]:
    """The text of a file, or of standard input for `-`, and the folder that its paths are relative to.

    Raises CommandFailed.
    """
    try:
        if file == "-":
            return sys.stdin.read(), Path.cwd()
        return Path(file).read_text(encoding="utf-8"), Path(file).resolve().parent
    except (OSError, UnicodeDecodeError) as exc:
        raise CommandFailed(f"{file}: {exc}; expected a YAML file with adapters, aliases, ...", status=2) from exc


def _parsed_mapping(text: str, file: str) -> Any:
    """The value of the text. Raises CommandFailed, with the line, for what is no mapping in YAML or JSON."""
    from lorafleet.service import yamls

    try:
        value = yamls.parse_json_or_yaml(text)
    except yamls.InvalidYaml as exc:
        raise CommandFailed(f"{file}: {' '.join(str(exc).split())}", status=2) from exc
    if not isinstance(value, dict):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise CommandFailed(f"{file}: expected adapters, aliases, published or policy, found {found}", status=2)
    return value


def with_whole_paths(value: Any, folder: Path) -> Any:
    """The file's value, with sources that are paths made absolute; the orchestrator checks all else."""
    adapters = value.get("adapters")
    if not isinstance(adapters, list):
        return value

    def whole(adapter: Any) -> Any:
        """The adapter with an absolute path."""
        source = adapter.get("source") if isinstance(adapter, dict) else None
        if not isinstance(source, str) or not source or "://" in source:
            return adapter
        return adapter | {"source": str((folder / Path(source).expanduser()).resolve())}

    return value | {"adapters": [whole(adapter) for adapter in adapters]}


def with_lines(message: str, text: str, file: str) -> str:
    """The orchestrator's findings, each with the file's name, and the line of its field where that is known."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:  # JSON with tabs
        root = None
    found = []
    for finding in message.split("; "):
        path, colon, rule = finding.partition(": ")
        section, _, field = path.removesuffix("...").partition(".")
        if section != "file" or not colon:
            found.append(finding)
        else:
            place = file if root is None else f"{file}:{line_of(root, field.split('.'))}"
            found.append(f"{place}: {field}: {rule}" if field else f"{file}: {rule}")
    return "; ".join(found)


def line_of(root: "Node | None", path: Sequence[str]) -> int:
    """The line, from 1, of the field that a path names; of the innermost part that the file has, if it is missing."""
    from yaml.nodes import MappingNode, SequenceNode

    line, node = 1, root
    for part in path:
        if isinstance(node, MappingNode):
            pair = next(((key, value) for key, value in node.value if getattr(key, "value", None) == part), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        # Any other part is not the file's own, such as the kind of value that was expected.
    return line
