"""Structured log lines: `timestamp, level, component, event, …`, one JSON object a line or a console's colours."""

import atexit
import logging
import os
import queue
import sys
import threading
import time
from types import TracebackType
from typing import Any

import structlog

log = structlog.get_logger()

# A frame's locals hold prompts and keys; neither belongs in a log.
_without_locals = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)
# Of a few hundred bytes each: seconds of a bad minute, and a few MB.
_MOST_LINES = 10_000
_MOST_BYTES = 8 << 20
_FLUSH_S = 1.0
_FULL_PAUSE_S = 0.01


def configure(component: str, *, log_format: str = "json", level: str = "info") -> None:
    """Send our own and the libraries' lines to stderr in one form. Call once, at a process's start.

    No line raises or waits, see `LogWriter`.
    """
    descriptor = _stderr()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
        _component(component),
    ]
    renderer: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=os.isatty(descriptor), exception_formatter=structlog.dev.plain_traceback)]
        if log_format == "console"
        else [_without_locals, structlog.processors.JSONRenderer()]
    )

    sink = LogWriter(descriptor, what="log lines")
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sink),  # type: ignore[arg-type]  # it writes and flushes
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    sys.excepthook = _log_last_error  # Python's own would wait for whoever reads stderr


def _stderr() -> int:
    # Without a stderr, 2 is the descriptor of whatever was opened next.
    return os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()


def other_output(what: str) -> "LogWriter":
    """A way to stderr for lines that are no log lines; however many there are, ours are not dropped for them."""
    return LogWriter(_stderr(), what=what)


class LogWriter:
    """A stream whose `write` neither raises nor waits: a thread of its own writes, to a file descriptor.

    Whoever reads stderr may have ended, or have stopped reading, and its disk may be full: what we serve goes on, and
    lines that cannot be kept or written are dropped and counted. The next one that can be written comes after a line
    that says how many. At the process's end what is still here is written for up to a second.
    """

    def __init__(self, descriptor: int, *, what: str) -> None:
        """`what` it is that may be dropped, as the line says that tells how many were."""
        self._descriptor = descriptor
        self._what = what
        self._begin()
        # A child has none of our threads, and what waits here is ours to write.
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self.drain, _FLUSH_S)

    def _begin(self) -> None:
        self._waiting: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._lock = threading.RLock()  # a destructor may log in the middle of a line
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._is_torn = False

    def write(self, text: str) -> None:
        """Have this written soon, or drop it. One call is one line."""
        self.write_bytes(text.encode(errors="backslashreplace"))

    def write_bytes(self, line: bytes) -> None:
        """As `write`."""
        with self._lock:
            if self._waiting.qsize() < _MOST_LINES and self._waiting_bytes < _MOST_BYTES:
                self._waiting.put(line)
                self._waiting_bytes += len(line)
            else:
                self._dropped += 1
            self._see_to_thread()

    def flush(self) -> None:
        """Nothing: for those who flush streams after each line."""

    def drain(self, within_s: float) -> None:
        """Wait until all that was written here is out, or so long."""
        done = threading.Event()
        with self._lock:
            self._waiting.put(done)
            self._see_to_thread()
        done.wait(within_s)

    def _see_to_thread(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._write_on, daemon=True, name="log")
        try:
            self._thread.start()
        except RuntimeError:  # no more threads for now: the next line tries again
            self._thread = None

    def _write_on(self) -> None:
        while True:
            item = self._waiting.get()
            if self._dropped:
                self._own_up()
            if isinstance(item, threading.Event):
                item.set()
                continue
            if not self._written(item):
                self._drop(1)
            with self._lock:
                self._waiting_bytes -= len(item)

    def _own_up(self) -> None:
        lines = self._dropped
        event: Any = {"event": f"{lines} {self._what} were dropped", "lines": lines}
        for processor in structlog.get_config()["processors"]:
            event = processor(None, "warning", event)
        if self._written(f"{event}\n".encode()):
            self._drop(-lines)

    def _drop(self, lines: int) -> None:
        with self._lock:
            self._dropped += lines

    def _written(self, line: bytes) -> bool:
        # Not by sys.stderr: a thread that waits in it when the interpreter ends holds its lock, and that aborts.
        data = (b"\n" if self._is_torn else b"") + line
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody who has the same pipe has made it so
                time.sleep(_FULL_PAUSE_S)
            except OSError:
                return False
            self._is_torn = bool(data)
        return True


def _log_last_error(_kind: type[BaseException], exc: BaseException, _traceback: TracebackType | None) -> None:
    log.critical("the process ends by an error", exc_info=exc)


def _component(component: str) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event.setdefault("component", component)
        return event

    return add
