"""Writes of one event-loop tick, sent together at its end.

The first write wakes the process that waits for it, and that process finds the others there. Written one by one, with
tens of microseconds of work in between, each would wake it again: on loopback 7 of a write's 10 us are that wake-up.
"""

import asyncio

import structlog

log = structlog.get_logger()

# Writes that wait at most: those of a millisecond's work or less.
MAX_WRITES = 32


class Outbox:
    """Writes that wait for the end of the tick, in order. Flush before you close a connection that may be in it.

    flushed  flushes so far: a write waits while this is the number at which it came
    is_due   a flush is coming; set by a caller that flushes itself, so that no write schedules one
    """

    __slots__ = ("_waiting", "flushed", "is_due")

    def __init__(self) -> None:
        self.flushed = 0
        self.is_due = False
        self._waiting: list[tuple[asyncio.WriteTransport, bytes]] = []

    def write(self, transport: asyncio.WriteTransport, data: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Queue these bytes: sent at the end of the tick, or at once with all others when MAX_WRITES wait."""
        waiting = self._waiting
        waiting.append((transport, data))
        if not self.is_due:
            self.is_due = True
            loop.call_soon(self.flush)
        elif len(waiting) >= MAX_WRITES:
            self.flush()

    def flush(self) -> None:
        """Write all now, and count the flush. Drops writes to connections closed meanwhile.

        A write that fails is logged, and its connection aborted.
        """
        self.flushed += 1
        self.is_due = False
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception:
                    log.exception("unexpected error: not written", size_bytes=len(data))
                    transport.abort()  # the client must not take the writes behind it for the whole
