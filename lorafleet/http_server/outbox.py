"""What one turn of the loop writes, sent together at its end.

Whoever sleeps until something comes is woken by the first write to it and finds the rest of them there; written one by
one, with tens of microseconds of work between them, each would wake it again. Waking a process on another core takes 7
of the 10 us of a write on loopback (seen with perf), and a virtual network card is told of new packets in the same way.
"""

import asyncio

import structlog

log = structlog.get_logger()

# So many writes are not held back for more: a millisecond's work or less.
_MOST = 32


class Outbox:
    """Writes that wait for the end of the turn, in order. Flush it before a connection that may be in it is closed.

    flushed  how often it was: what has been written since waits still
    is_due   it is about to be flushed: whoever sets this does so, and what is written until then asks for nothing more
    """

    __slots__ = ("_waiting", "flushed", "is_due")

    def __init__(self) -> None:
        self.flushed = 0
        self.is_due = False
        self._waiting: list[tuple[asyncio.WriteTransport, bytes]] = []

    def write(self, transport: asyncio.WriteTransport, data: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """As `transport.write`, in a moment."""
        waiting = self._waiting
        waiting.append((transport, data))
        if not self.is_due:
            self.is_due = True
            loop.call_soon(self.flush)
        elif len(waiting) >= _MOST:
            self.flush()

    def flush(self) -> None:
        """Write all of it now; what is for a connection that has been closed meanwhile is dropped."""
        self.flushed += 1
        self.is_due = False
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception:
                    log.exception("unexpected error: not written", size_bytes=len(data))
                    transport.abort()  # what follows it must not be taken for the whole
