"""The last catalog on disk: the whole catalog in one file, and beside it the changes since, one a line.

A router that starts while the orchestrator is away goes on with it. Several processes of one router may write to the
same files: each writes the whole catalog under its own name first, and a change that two of them add is read once.
After a failed write the changes that follow it have a gap before them, so the whole catalog is written again.
"""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from pydantic import ValidationError

from lorafleet.service.files import make_private_file, make_private_folder, private_opener
from lorafleet.service.loops import backoff_s
from lorafleet.service.state_files import is_missing
from lorafleet.telemetry.repeats import RepeatLimiter
from router.fleet.catalog import RouterCatalog, read_catalog, router_catalog, with_changes

log = structlog.get_logger()

_LEAST_REWRITE_BYTES = 1 << 20
_RETRY_S = (1.0, 30.0)  # from a failed write to the next try, the first and the longest: each reads the whole catalog


@dataclass(slots=True)
class SavedCatalog:
    """The files of one catalog. `lines` limits how often a failure to write is logged; `clock` times the next try."""

    file: Path
    lines: RepeatLimiter
    clock: Callable[[], float] = time.monotonic
    _failures: int = field(default=0, init=False)  # in a row
    _retry_at: float | None = field(default=None, init=False)
    _whole_bytes: int = field(default=0, init=False)
    _changes_bytes: int = field(default=0, init=False)

    @property
    def changes_file(self) -> Path:
        """The file of the changes since the whole catalog was written."""
        return self.file.with_suffix(".changes")

    @property
    def wants_whole(self) -> bool:
        """Whether the whole catalog should be written again.

        Its changes have grown large, a write failed lately, or its file was deleted: changes alone cannot be read.
        """
        if self._retry_at is not None and self.clock() >= self._retry_at:
            return True
        if self._retry_at is None and self._whole_bytes and is_missing(self.file):
            return True
        return self._changes_bytes > max(self._whole_bytes, _LEAST_REWRITE_BYTES)

    def save_whole(self, content: bytes) -> None:
        """Write a whole catalog in place of the one before and its changes. A failure is logged, and not raised."""
        partial = self.file.with_suffix(f".{os.getpid()}.partial")
        self._whole_bytes, self._changes_bytes = len(content), 0
        try:
            make_private_folder(self.file.parent)
            with open(partial, "wb", opener=private_opener) as whole:
                whole.write(content)
            partial.replace(self.file)
            self.changes_file.unlink(missing_ok=True)
            self._failures, self._retry_at = 0, None
        except OSError as exc:
            self._record_failure(exc)

    def add_changes(self, content: bytes) -> None:
        """Add changes to those since the whole catalog. A failure is logged, and not raised."""
        self._changes_bytes += len(content) + 1
        try:
            # One write each: lines of several processes do not mix.
            make_private_file(self.changes_file)
            with self.changes_file.open("ab", buffering=0) as changes:
                written = changes.write(content + b"\n")
        except OSError as exc:
            self._record_failure(exc)
            return
        if written <= len(content):
            self._record_failure(OSError(errno.ENOSPC, "only a part of the change could be written"))

    def load(self) -> RouterCatalog | None:
        """The catalog with its changes, without pauses that have ended by this machine's clock.

        None if there is none, or it cannot be read, which is logged.

        A change that is broken, or that does not follow from those before it, is left out, and logged.
        """
        try:
            catalog = router_catalog(read_catalog(self.file.read_bytes()))
            lines = self.changes_file.read_bytes().splitlines() if self.changes_file.exists() else []
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as exc:
            log.warning("saved catalog not used", file=str(self.file), error=str(exc))
            return None
        unused = 0
        for line in lines:
            try:
                changed = with_changes(catalog, read_catalog(line))
            except ValidationError:
                changed = None  # cut off while it was written
            # Not the end: another process's next line may say the same from an earlier revision on.
            catalog, unused = (catalog, unused + 1) if changed is None else (changed, unused)
        if unused:
            log.warning(
                "saved changes not used", file=str(self.changes_file), changes=unused, revision=catalog.revision
            )
        # The orchestrator that would say so may be away.
        return replace(catalog, pauses=tuple(pause for pause in catalog.pauses if pause.expires_at > time.time()))

    def _record_failure(self, exc: OSError) -> None:
        """Log that the catalog could not be written, and have it written whole a little later."""
        now = self.clock()
        if self._retry_at is None or now >= self._retry_at:
            self._failures += 1
            self._retry_at = now + backoff_s(self._failures, *_RETRY_S)
        if failures := self.lines.count(self.file):
            log.warning("catalog not saved", file=str(self.file), error=str(exc), failures=failures)
