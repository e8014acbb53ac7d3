"""Structured logging: one JSON object a line, or coloured lines on a console."""

import atexit
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any

import structlog

log = structlog.get_logger()

# Without local variables: these may hold prompts and keys.
_without_locals = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)
# Limits of the queue: lines of a few hundred bytes each, in total a few MB.
_MAX_LINES = 10_000
_MAX_BYTES = 8 << 20
# Lines that are kept to be read over REST, at most 2 MB.
_RECENT_LINES = 500
_RECENT_BYTES = 4096
_FLUSH_S = 1.0
_FULL_PAUSE_S = 0.01


def configure(component: str, *, log_format: str = "json", level: str = "info") -> "LogWriter":
    """Send our own and the libraries' log lines to stderr in one form; uncaught errors, too. Returns their writer.

    Call once, at a process's start. Logging never raises or waits, see `LogWriter`.
    """
    descriptor = _stderr()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
        _add_component(component),
    ]
    renderer: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=os.isatty(descriptor), exception_formatter=structlog.dev.plain_traceback)]
        if log_format == "console"
        else [_without_locals, structlog.processors.JSONRenderer()]
    )

    writer = LogWriter(descriptor, line_kind="log lines")
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(writer),  # type: ignore[arg-type]  # it writes and flushes
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    sys.excepthook = _log_uncaught_error  # Python's own hook would wait for stderr's reader
    return writer


def _stderr() -> int:
    """The file descriptor of stderr; of /dev/null if the process has no stderr."""
    # Without a stderr, descriptor 2 belongs to the next opened file.
    return os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()


def unlogged_output(line_kind: str) -> "LogWriter":
    """A writer to stderr for lines that are not log lines, with a queue of its own, so that log lines are kept."""
    return LogWriter(_stderr(), line_kind=line_kind)


class LogWriter:
    """A stream whose `write` neither raises nor waits; a thread writes to the file descriptor.

    The reader of stderr may have ended or stopped reading, or its disk may be full. Then lines are dropped and counted,
    and a line with their number comes before the next written line. At the process's end the rest is written for up to
    a second.
    """

    def __init__(self, descriptor: int, *, line_kind: str) -> None:
        """At the process's end the queue is written for up to a second.

        line_kind  the name of the lines, for the message about dropped ones
        """
        self._recent: deque[bytes] = deque(maxlen=_RECENT_LINES)
        self._descriptor = descriptor
        self._line_kind = line_kind
        self._reset()
        # A forked child has no writer thread, and the queued lines are the parent's.
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.drain, _FLUSH_S)

    def _reset(self) -> None:
        """Start with an empty queue, nothing dropped, and no thread, also in a forked child."""
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._lock = threading.RLock()  # a destructor may log in the middle of a line
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._is_torn = False

    def write(self, text: str) -> None:
        """Queue one line for the writer thread, or drop and count it if the queue is full."""
        self.write_bytes(text.encode(errors="backslashreplace"))

    def write_bytes(self, line: bytes) -> None:
        """Queue a line for the thread, which is started if need be; a full queue drops and counts it."""
        with self._lock:
            self._recent.append(line[:_RECENT_BYTES])
            if self._queue.qsize() < _MAX_LINES and self._queued_bytes < _MAX_BYTES:
                self._queue.put(line)
                self._queued_bytes += len(line)
            else:
                self._dropped += 1
            self._ensure_thread()

    def recent(self, most: int) -> list[str]:
        """The last lines that were written, or would have been, the oldest first; long ones are cut."""
        with self._lock:
            lines = list(self._recent)
        return [line.decode(errors="replace").rstrip("\n") for line in lines[-most:]]

    def flush(self) -> None:
        """Do nothing; loggers flush streams after each line."""

    def drain(self, within_s: float) -> None:
        """Wait until all queued lines are written, for at most `within_s`; starts the thread if need be."""
        drained = threading.Event()
        with self._lock:
            self._queue.put(drained)
            self._ensure_thread()
        drained.wait(within_s)

    def _ensure_thread(self) -> None:
        """Start the writer thread, unless it runs."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._write_lines, daemon=True, name="log")
        try:
            self._thread.start()
        except RuntimeError:  # no more threads now; the next line tries again
            self._thread = None

    def _write_lines(self) -> None:
        """The writer thread: write queued lines for ever, count those that fail as dropped, and report dropped ones.

        A queued Event is set when all before it is written.
        """
        while True:
            item = self._queue.get()
            if self._dropped:
                self._report_dropped()
            if isinstance(item, threading.Event):
                item.set()
                continue
            if not self._write_to_descriptor(item):
                self._add_dropped(1)
            with self._lock:
                self._queued_bytes -= len(item)

    def _report_dropped(self) -> None:
        """Write a line with the number of dropped lines, and start the count again."""
        lines = self._dropped
        event: Any = {"event": f"{lines} {self._line_kind} were dropped", "lines": lines}
        for processor in structlog.get_config()["processors"]:
            event = processor(None, "warning", event)
        if self._write_to_descriptor(f"{event}\n".encode()):
            self._add_dropped(-lines)

    def _add_dropped(self, lines: int) -> None:
        """Change the number of dropped lines."""
        with self._lock:
            self._dropped += lines

    def _write_to_descriptor(self, line: bytes) -> bool:
        """Write a line whole; false if an error ended it, and then the next line begins with a line feed if need be."""
        # Not through sys.stderr: a thread that waits in it holds its lock, and the interpreter's end would abort.
        data = (b"\n" if self._is_torn else b"") + line
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process made the shared pipe non-blocking
                time.sleep(_FULL_PAUSE_S)
            except OSError:
                return False
            self._is_torn = bool(data)
        return True


def _log_uncaught_error(_kind: type[BaseException], exc: BaseException, _traceback: TracebackType | None) -> None:
    """Python's excepthook: log an error that ends the process."""
    log.critical("the process ends by an error", exc_info=exc)


def _add_component(component: str) -> Any:
    """A structlog processor that adds the field `component`."""

    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        """The event itself, with the field `component` set unless it has one."""
        event.setdefault("component", component)
        return event

    return add
