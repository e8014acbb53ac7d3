"""`lorafleet top` on a terminal: the frame, refreshed, and its keys."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static

from lorafleet.cli.top.frame import FrameLine, TopView, explanation, frame
from lorafleet.cli.top.orders import AdapterOrder
from lorafleet.cli.top.snapshot import TopSnapshot
from lorafleet.service.failure import CommandFailed

Order = TypeVar("Order", bound=StrEnum)
_ROWS = 200
"""More rows than anybody scrolls through, and few enough to lay out within a refresh."""


class TopApp(App[None]):
    """The live screen.

    first       the snapshot shown at the start
    read        reads the next one; raises CommandFailed
    last_decision  reads the router's last decision, None without any; raises CommandFailed
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = "Static { width: 100%; } VerticalScroll { scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("space", "pause", "pause"),
        Binding("s", "sort_adapters", "sort"),
        Binding("w", "sort_workers", "sort workers"),
        Binding("e", "explain", "explain last"),
        Binding("escape", "close", "back", show=False),
    ]

    def __init__(
        self,
        first: TopSnapshot,
        read: Callable[[], TopSnapshot],
        last_decision: Callable[[], Mapping[str, Any] | None],
        *,
        every_s: float,
        adapters_by: AdapterOrder = AdapterOrder.requests,
    ) -> None:
        super().__init__(ansi_color=True)
        self.snapshot = first
        self.view = TopView(width=80, adapters_by=adapters_by, rows=_ROWS)
        self.error = ""
        self.explained: Mapping[str, Any] | None = None
        self._read = read
        self._last_decision = last_decision
        self._every_s = every_s
        self._is_reading = False

    def compose(self) -> ComposeResult:
        """One scrolling text, and the keys below it."""
        with VerticalScroll():
            yield Static(id="fleet")
        yield Footer()

    def on_mount(self) -> None:
        """Show the first snapshot, and read the next ones."""
        self.draw()
        self.set_interval(self._every_s, self.action_read)

    def on_resize(self, event: Resize) -> None:
        """Lay out for the new width, without the column of the scroll bar."""
        self.view = replace(self.view, width=max(20, event.size.width - 1))
        self.draw()

    def lines(self) -> Sequence[FrameLine]:
        """What the screen shows now."""
        failed = [FrameLine(self.error, "red")] if self.error else []
        if self.explained is not None:
            back = FrameLine("escape: back to the fleet", "dim")
            return [*failed, *explanation(self.explained, self.view.width), FrameLine(""), back]
        return [*failed, *frame(self.snapshot, self.view)]

    def draw(self) -> None:
        """Put the lines on the screen."""
        text = Text("\n").join(Text(line.text, style=line.style) for line in self.lines())
        self.query_one("#fleet", Static).update(text)

    def action_read(self) -> None:
        """Begin to read a snapshot, unless the screen is paused or a read is under way."""
        if not (self.view.is_paused or self._is_reading):
            self._is_reading = True
            self.run_worker(self._refresh(), exit_on_error=True)

    async def _refresh(self) -> None:
        """Read one snapshot in a thread and show it, or why it could not be read above the last one."""
        try:
            self.snapshot, self.error = await asyncio.to_thread(self._read), ""
        except CommandFailed as exc:
            self.error = str(exc)
        finally:
            self._is_reading = False
        self.draw()

    def action_pause(self) -> None:
        """Stop reading, or go on."""
        self.view = replace(self.view, is_paused=not self.view.is_paused)
        self.draw()

    def action_sort_adapters(self) -> None:
        """Sort adapters by the next key."""
        self.view = replace(self.view, adapters_by=_next_order(self.view.adapters_by))
        self.draw()

    def action_sort_workers(self) -> None:
        """Sort workers by the next key."""
        self.view = replace(self.view, workers_by=_next_order(self.view.workers_by))
        self.draw()

    async def action_explain(self) -> None:
        """Show the router's last decision."""
        try:
            self.explained, self.error = await asyncio.to_thread(self._last_decision), ""
            if self.explained is None:
                self.error = "the router has decided nothing yet"
        except CommandFailed as exc:
            self.error = str(exc)
        self.draw()

    def action_close(self) -> None:
        """Go back to the fleet."""
        self.explained, self.error = None, ""
        self.draw()


def _next_order(order: Order) -> Order:
    """The order after this one, the first after the last."""
    orders = list(type(order))
    return orders[(orders.index(order) + 1) % len(orders)]
