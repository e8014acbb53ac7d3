"""Runs the rows of a benchmark one after the other: progress, an estimate, and what was measured in any case."""

import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.report import ReportRow, write


class RowFailed(Exception):
    """A row could not be measured; the message says why. The other rows go on."""


@dataclass(slots=True)
class RowRunner:
    """The rows of one run.

    names    of the rows, in order
    about_s  seconds that each takes, roughly: for the estimate alone
    into     file that gets the rows as JSON after each name, so that a run that is killed leaves them
    """

    names: Sequence[str]
    about_s: Mapping[str, float]
    into: Path | None = None
    rows: list[ReportRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_interrupted: bool = False
    _began: float = field(default_factory=time.monotonic)
    _done: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def measuring(self, name: str) -> Iterator[list[ReportRow]]:
        """Print that this row begins, and keep what is put into the list, also when it fails or is interrupted.

        A failure is printed and kept, and the run goes on.
        """
        number = len(self._done) + 1
        print(f"[{number}/{len(self.names)}] {name}: {self._estimate(name)}", file=sys.stderr, flush=True)
        found: list[ReportRow] = []
        is_interrupted = True
        try:
            yield found
            is_interrupted = False
        except RowFailed as exc:
            is_interrupted = False
            self.failures.append(f"{name}: {exc}")
            print(f"{name} failed: {exc}", file=sys.stderr, flush=True)
        except Exception as exc:  # noqa: BLE001  (the rows measured so far, and those to come, are worth more)
            is_interrupted = False
            self.failures.append(f"{name}: {exc!r}")
            traceback.print_exc()
        finally:
            if not is_interrupted:
                self._done.append(name)
            self.rows += [replace(row, row=name) for row in found]
            write(self.rows, self.into)

    def _estimate(self, name: str) -> str:
        """Seconds of this row, and of all that is left, corrected by how long the rows so far took."""
        expected_s = sum([self.about_s[done] for done in self._done])
        pace = (time.monotonic() - self._began) / expected_s if expected_s else 1.0
        left_s = sum([self.about_s[one] for one in self.names if one not in self._done])
        return f"about {_said(self.about_s[name] * pace)}, {_said(left_s * pace)} to the end"

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM end the rows early and nothing more: what follows the block is still run."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        except KeyboardInterrupt:
            self.is_interrupted = True
            left = ", ".join(name for name in self.names if name not in self._done)
            print(f"interrupted; not measured in whole: {left}", file=sys.stderr, flush=True)
        finally:
            signal.signal(signal.SIGTERM, before)

    @property
    def status(self) -> int:
        """The exit status: 130 where it was interrupted, 1 where a row failed."""
        return 130 if self.is_interrupted else int(bool(self.failures))


def _said(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
