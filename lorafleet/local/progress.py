"""Progress of steps that take a while: spinners on a terminal, else one flushed line a step."""

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
    """Shows the steps of `lorafleet up` on stderr; stdout has the ready line and what follows."""

    def __init__(self, out: TextIO | None = None) -> None:
        """Spinners are only drawn on a terminal."""
        self._out = out or sys.stderr
        self._began = time.monotonic()
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown_at: dict[str, float] = {}
        if self._out.isatty():
            # No markup: a reason in a step's text may have brackets.
            text = TextColumn("{task.description}", markup=False)
            columns = (SpinnerColumn(finished_text="[green]✓"), text, TimeElapsedColumn())
            self._live = Progress(*columns, console=Console(file=self._out))

    def __enter__(self) -> "StartProgress":
        """Start the spinners, where they are drawn."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Stop the spinners."""
        self.close()

    def close(self) -> None:
        """Stop the spinners; `say` still works."""
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print one line, above the spinners; where none are drawn, with the seconds since the start."""
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            self._out.write(f"[{time.monotonic() - self._began:6.1f} s] {line}\n")
            self._out.flush()

    def begin(self, name: str, doing: str) -> None:
        """Show a new step in the live display, or print it. Steps may overlap."""
        self._shown_at[name] = time.monotonic()
        if self._live is not None:
            self._tasks[name] = self._live.add_task(f"{name}: {doing}", total=1)
        else:
            self.say(f"{name}: {doing}")

    def update(self, name: str, doing: str) -> None:
        """Update a running step; without a terminal a line is printed every 10 s at most."""
        if self._live is not None:
            self._live.update(self._tasks[name], description=f"{name}: {doing}")
        elif time.monotonic() - self._shown_at[name] >= _REMIND_S:
            self._shown_at[name] = time.monotonic()
            self.say(f"{name}: still {doing}")

    def finish(self, name: str, result: str) -> None:
        """Show a step as finished in the live display, or print its result."""
        if self._live is not None:
            self._live.update(self._tasks[name], description=f"{name}: {result}", completed=1)
        else:
            self.say(f"{name}: {result}")

    @contextmanager
    def step(self, name: str, doing: str) -> Iterator[None]:
        """Show a step for as long as its block runs; not as finished if the block raises."""
        self.begin(name, doing)
        yield
        self.finish(name, "done")
