"""The agent's events: numbered from 1 at each start, kept in a bounded buffer, streamed to any number of readers."""

from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from lorafleet.service.loops import ChangeSignal
from workers.core.errors import AgentRequestError
from workers.wire import AgentEvent, AgentEventType


class AgentEventLog:
    """One writer, many readers. The stream of a reader that falls out of the buffer ends."""

    def __init__(
        self,
        *,
        boot_id: str,
        instance_id: str = "",
        size: int,
        now: Callable[[], str],
        on_event: Callable[[AgentEvent], None] = lambda _: None,
    ) -> None:
        """Keep the last `size` events.

        `on_event` is called with each event in the event loop; it must return at once and raise nothing.
        """
        self._boot_id = boot_id
        self._instance_id = instance_id
        self._now = now
        self._on_event = on_event
        self._kept: deque[AgentEvent] = deque(maxlen=size)
        self._changes = ChangeSignal()
        self._last = 0
        self._is_closed = False

    def add(
        self,
        kind: AgentEventType,
        *,
        lora_id: str | None = None,
        digest: str | None = None,
        engine_name: str | None = None,
        error: str | None = None,
        source: str | None = None,
        done_bytes: int | None = None,
        total_bytes: int | None = None,
    ) -> None:
        """Number an event, keep it (a full buffer drops its oldest), wake the streams and call `on_event`."""
        self._last += 1
        now = self._now()
        event = AgentEvent(
            id=self._last,
            type=kind,
            at=now,
            timestamp=now,
            instance_id=self._instance_id,
            lora_id=lora_id,
            digest=digest,
            engine_name=engine_name,
            error=error,
            source=source,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )
        self._kept.append(event)
        self._changes.notify()
        self._on_event(event)

    def close(self) -> None:
        """End every stream once it has sent the events so far, for good: later readers get none."""
        self._is_closed = True
        self._changes.notify()

    def position_after(self, last_event_id: str | None) -> int:
        """The event number in a Last-Event-ID header, to go on after; without the header the newest number.

        raises  AgentRequestError `events_gone` if the id is of another boot, or no longer in the buffer
        """
        if not last_event_id:
            return self._last
        boot, _, number = last_event_id.rpartition(":")
        oldest = self._last - len(self._kept)
        is_number = number.isascii() and number.isdigit() and len(number) < 20  # int() refuses thousands of digits
        is_ours = boot in {"", self._boot_id} and is_number
        if not is_ours or not oldest <= int(number) <= self._last:
            raise AgentRequestError(
                "events_gone",
                f"no events after {last_event_id[:100]!r} here (this boot's {oldest} to {self._last} are kept);"
                " read /metadata, then connect without Last-Event-ID",
                param="last-event-id",
            )
        return int(number)

    async def stream(self, after: int, *, keep_alive_s: float) -> AsyncIterator[str]:
        """Server-sent events after a number, until `close` or until the reader falls behind the buffer.

        Sends a comment every `keep_alive_s`. Ids are `boot_id:number`.
        """
        yield ": connected\n\n"
        while True:
            if after < self._last - len(self._kept):
                return  # the reader fell behind: it reconnects and gets `events_gone`
            for event in [event for event in self._kept if event.id > after]:
                after = event.id
                yield f"id: {self._boot_id}:{event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"
            if self._is_closed and after == self._last:
                return
            if not await self._changes.until(partial(self._has_ended_or_newer, after), timeout_s=keep_alive_s):
                yield ": keep-alive\n\n"

    def _has_ended_or_newer(self, after: int) -> bool:
        """Whether a stream at this event number must wake: there is a newer event, or the log is closed."""
        return self._is_closed or self._last > after
