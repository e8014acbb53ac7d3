"""`lorafleet logs`: the logs of the services that `lorafleet up` runs."""

import contextlib
import heapq
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cli.context import default_state_dir
from lorafleet.service.failure import CommandFailed, printable

app = typer.Typer(no_args_is_help=True)
_POLL_S = 0.25
_ON_KUBERNETES = (
    "on Kubernetes: kubectl logs -l app.kubernetes.io/component=router --prefix -f (or orchestrator, worker);"
    " with docker: docker logs -f CONTAINER"
)
# The beginning of a line of ours, in both log formats; an engine's own lines have other ones, or none.
_TIME = re.compile(r'(?:\{"timestamp": ?"|\x1b\[\d*m)*(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?)')


def _log_files(folder: Path) -> dict[str, Path]:
    """The log file of each service and engine of a fleet, by the name that the command takes."""
    found = {path.stem: path for path in sorted((folder / "logs").glob("*.log"))}
    engines = {f"{path.parent.name}-engine": path for path in sorted((folder / "workers").glob("*/engine.log"))}
    return dict(sorted((found | engines).items()))


def service_names(context: typer.Context, incomplete: str) -> list[str]:
    """Services with a log that begin with `incomplete`, for completion."""
    folder = context.params.get("state_dir") or default_state_dir()
    with contextlib.suppress(OSError):
        return [name for name in _log_files(Path(folder)) if name.startswith(incomplete)]
    return []


@app.command("logs")
def show_logs(
    services: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SERVICE",
            help="router, orchestrator, w0, w0-engine, ...; default: all",
            autocompletion=service_names,
            show_default=False,
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="the fleet's, as for `up`; default ~/.local/state/lorafleet", show_default=False),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="last lines of each; 0: all")] = 50,
    since: Annotated[str | None, typer.Option(help="lines of the last 10m or 8h, or since 2026-11-26T18:00Z")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with new lines until Ctrl-C")] = False,
) -> None:
    """Show the logs of the services that `lorafleet up` runs on this machine, in the order of their times.

    On Kubernetes: kubectl logs -l app.kubernetes.io/component=router --prefix -f

    Examples:

      lorafleet logs

      lorafleet logs router orchestrator --since 10m

      lorafleet logs w0-engine --follow
    """
    folder = state_dir or default_state_dir()
    files = _chosen_files(folder, services or [])
    after = None if since is None else _time_of(since)
    logs = [_FollowedLog(name, path) for name, path in files.items()]
    width = max(map(len, files)) if len(files) > 1 else 0
    pieces = [log.read_last(lines, after) for log in logs]
    for _, name, line in heapq.merge(*pieces, key=lambda piece: piece[0]):
        _print_line(name, line, width)
    while follow:
        time.sleep(_POLL_S)
        for log in logs:
            for line in log.read_new():
                _print_line(log.name, line, width)


def _chosen_files(folder: Path, services: list[str]) -> dict[str, Path]:
    """The log files of these services; of all where none is named. Raises CommandFailed."""
    try:
        files = _log_files(folder)
    except OSError as exc:
        raise CommandFailed(f"{folder}: {exc.strerror}; name the fleet's folder with --state-dir") from exc
    if not files:
        expected = f"no logs in {folder}: `lorafleet up` writes them there; name its folder with --state-dir"
        raise CommandFailed(f"{expected}; {_ON_KUBERNETES}")
    if unknown := [name for name in services if name not in files]:
        raise CommandFailed(f"no log of {', '.join(unknown)}; there are: {', '.join(files)}", status=2)
    return {name: files[name] for name in services} or files


def _time_of(text: str) -> datetime:
    """The time that --since names. Raises CommandFailed."""
    from lorafleet.cli.history import time_of  # noqa: PLC0415  (it imports YAML)

    found = datetime.fromisoformat(time_of(text, "--since"))
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _print_line(name: str, line: str, width: int) -> None:
    """Print a line, behind the service's name where there are several."""
    typer.echo(f"{name:<{width}} | {printable(line)}" if width else printable(line))


@dataclass(slots=True)
class _FollowedLog:
    """A log file, and how far it has been read."""

    name: str
    path: Path
    _read_bytes: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def read_last(self, lines: int, after: datetime | None) -> Iterator[tuple[datetime, str, str]]:
        """(time, name, line) of the last lines (0: of all), of those after a time only."""
        # A line without a time belongs to the one before it, such as a traceback.
        at, found = datetime.min.replace(tzinfo=UTC), list[tuple[datetime, str, str]]()
        for line in self.read_new():
            at = line_time(line) or at
            if after is None or at >= after:
                found.append((at, self.name, line))
        return iter(found[-lines:] if lines else found)

    def read_new(self) -> list[str]:
        """Whole lines since the last call. A file that was begun anew is read from its start."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read_bytes:
                    self._read_bytes, self._rest = 0, b""
                file.seek(self._read_bytes)
                content = file.read()
        except OSError:
            return []  # a restarted fleet makes it anew
        self._read_bytes += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def line_time(line: str) -> datetime | None:
    """The time at the beginning of a log line, as UTC; None where there is none."""
    match = _TIME.match(line)
    if match is None:
        return None
    try:
        found = datetime.fromisoformat(match[1])
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
