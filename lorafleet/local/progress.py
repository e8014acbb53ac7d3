"""Steps that take a while, said while they do: spinners on a terminal, one flushed line a step elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_REMIND_S = 10.0


class StartProgress:
    """Where `lorafleet up` says what it does. On stderr, so that stdout holds the ready line and what follows it."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._began = time.monotonic()
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        if self._out.isatty():
            columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), TimeElapsedColumn())
            self._live = Progress(*columns, console=Console(file=self._out))

    def __enter__(self) -> "StartProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """No more spinners; `say` goes on."""
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """One line that stays."""
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            self._out.write(f"[{time.monotonic() - self._began:6.1f} s] {line}\n")
            self._out.flush()

    def begin(self, name: str, doing: str) -> None:
        """A step has begun. Steps may overlap."""
        self._said[name] = time.monotonic()
        if self._live is not None:
            self._tasks[name] = self._live.add_task(f"{name}: {doing}", total=1)
        else:
            self.say(f"{name}: {doing}")

    def still(self, name: str, doing: str) -> None:
        """The step goes on; call as often as you like."""
        if self._live is not None:
            self._live.update(self._tasks[name], description=f"{name}: {doing}")
        elif time.monotonic() - self._said[name] >= _REMIND_S:
            self._said[name] = time.monotonic()
            self.say(f"{name}: still {doing}")

    def done(self, name: str, result: str) -> None:
        if self._live is not None:
            self._live.update(self._tasks[name], description=f"{name}: {result}", completed=1)
        else:
            self.say(f"{name}: {result}")

    @contextmanager
    def step(self, name: str, doing: str) -> Iterator[None]:
        """A step that is as long as its block."""
        self.begin(name, doing)
        yield
        self.done(name, "done")
