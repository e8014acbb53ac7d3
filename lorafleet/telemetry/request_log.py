"""The id of every request, and its lines: one in the log for a failed one, one in the access log, the newest kept.

A request that succeeds costs nothing here unless the access log has all requests, or lines are kept.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from heapq import merge
from math import ceil
from random import getrandbits
from typing import Any, Literal

import msgspec
import structlog

from lorafleet.service.times import utc_text
from lorafleet.telemetry.logs import unlogged_output

log = structlog.get_logger()

AccessLogMode = Literal["off", "errors", "all"]

ID_HEADER = b"x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Failures of one code that are logged in one window; the others are counted.
MOST_LINES = 10
WINDOW_S = 10.0
# Codes with a window of their own; further ones share one. Ours are about fifty.
_MAX_CODES = 256
# Of a cause: an engine's or peer's message may be long.
_MAX_CAUSE_CHARS = 500
# Share of the kept lines that callers without a valid key may take: anybody can send such requests.
_STRANGERS_SHARE = 0.1
_UNAUTHORIZED = 401


def request_id(given: str | None) -> str:
    """The client's own id where it has plain characters only, else a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else f"{getrandbits(128):032x}"


def put_request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The request's id: the client's own where it is valid, else a new one, which replaces it in the headers."""
    given = dict(headers).get(ID_HEADER)
    name = request_id(None if given is None else given.decode("latin-1"))
    if given is None or given != name.encode():
        headers[:] = [*[header for header in headers if header[0] != ID_HEADER], (ID_HEADER, name.encode())]
    return name


class RequestLine(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One request, as the logs and the kept lines show it.

    status      499: the client left before an answer began
    code        of the error; "": none, or an engine's own error
    duration_s  from the whole request to the end of its answer
    limit       the setting, or the limit of the key, that was reached
    asked       the model's name as the client wrote it
    stage       the stage in which it failed
    failures    the failed attempts as (worker, reason)
    waited_s    until it was sent to an engine, or failed before
    read_s, paused_s, held_s, queued_s, failed_s   its parts: until it was read, for the end of a pause, for its
                adapter or for a replica, for room at an engine, and in failed attempts; the rest prepared the request
    held_for, queued_for   what it waited for
    at          Unix seconds at its end; of a kept line alone
    """

    request_id: str
    method: str
    path: str
    status: int
    duration_s: float
    code: str = ""
    cause: str = ""
    client: str = ""
    key: str = ""
    tenant: str = ""
    limit: str = ""
    stage: str = ""
    asked: str = ""
    base_model: str = ""
    adapter: str = ""
    worker: str = ""
    attempts: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    waited_s: float | None = None
    read_s: float = 0.0
    paused_s: float = 0.0
    held_s: float = 0.0
    held_for: str = ""
    queued_s: float = 0.0
    queued_for: str = ""
    failed_s: float = 0.0
    first_data_s: float | None = None
    body_bytes: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    streamed: bool = False
    at: float = 0.0


_LINE_DEFAULTS = dict(
    zip(reversed(RequestLine.__struct_fields__), reversed(RequestLine.__struct_defaults__), strict=False)
)


class KeptLine(msgspec.Struct, frozen=True, gc=False):
    """The line of a request that is over; `decided`: what the service keeps of its decision, nothing with a cycle.

    Thousands are kept, so the garbage collector is not to walk them.
    """

    line: RequestLine
    decided: object = None


class KeptLines:
    """The newest lines: so many of requests that succeeded, and so many of those that failed.

    Failures are kept apart, so that successes do not push them out. Refused callers without a valid key have a place
    of their own, too.
    """

    def __init__(self, most: int) -> None:
        """`most`: of either kind; 0: none are kept."""
        strangers = ceil(most * _STRANGERS_SHARE)
        self._succeeded: deque[KeptLine] = deque(maxlen=most)
        self._failed: deque[KeptLine] = deque(maxlen=most)
        self._strangers: deque[KeptLine] = deque(maxlen=strangers)

    def add(self, line: RequestLine, decided: object = None) -> None:
        """Keep a line, in place of the oldest of its kind where there are too many."""
        if line.status < 400 and not line.code:
            self._succeeded.append(KeptLine(line, decided))
        elif line.status == _UNAUTHORIZED:
            self._strangers.append(KeptLine(line, decided))
        else:
            self._failed.append(KeptLine(line, decided))

    def __len__(self) -> int:
        """Lines kept."""
        return len(self._succeeded) + len(self._failed) + len(self._strangers)

    def __iter__(self) -> Iterator[KeptLine]:
        """The kept lines, the newest first."""
        kinds = (reversed(kind) for kind in (self._succeeded, self._failed, self._strangers))
        return merge(*kinds, key=lambda kept: kept.line.at, reverse=True)


class RequestNotes(msgspec.Struct):
    """Facts of a request that an ASGI app's layers add to its line; in the scope, under `NOTES`."""

    code: str = ""
    cause: str = ""
    key: str = ""
    tenant: str = ""


NOTES = "lorafleet.notes"


class FailureLimiter:
    """How many failures of each code may be logged: MOST_LINES in WINDOW_S. Pure: time is an argument."""

    def __init__(self) -> None:
        self._windows: dict[str, _FailureWindow] = {}

    def admit(self, code: str, now: float) -> bool:
        """Whether this failure is logged; one that is not is counted until `take_omitted`."""
        window = self._windows.get(code)
        if window is None:
            shared = "" if len(self._windows) >= _MAX_CODES else code
            window = self._windows.setdefault(shared, _FailureWindow(now))
        if now - window.began_at >= WINDOW_S:
            window.began_at, window.lines = now, 0
        window.lines += 1
        if window.lines <= MOST_LINES:
            return True
        window.omitted += 1
        return False

    def take_omitted(self) -> dict[str, int]:
        """Failures by code that were not logged since the last call."""
        found = {code: window.omitted for code, window in self._windows.items() if window.omitted}
        for code in found:
            self._windows[code].omitted = 0
        return found


class _FailureWindow(msgspec.Struct):
    """The lines of one code since `began_at`, and the failures that got none."""

    began_at: float
    lines: int = 0
    omitted: int = 0


class RequestLog:
    """Writes the lines of requests: failures into the log, and by its mode the access log.

    The access log is one JSON object a line, on stderr, with a queue of its own: it drops no other log lines.
    """

    def __init__(
        self,
        component: str,
        access: AccessLogMode = "off",
        *,
        most_kept: int = 0,
        write: Callable[[bytes], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        most_kept  lines of `kept`
        write      takes a line of the access log; None: stderr
        """
        self._component = component
        self._access = access
        self._clock = clock
        self._write = write or (unlogged_output("access log lines").write_bytes if access != "off" else _drop)
        self._limiter = FailureLimiter()
        self._timer: asyncio.TimerHandle | None = None
        self.has_all = access == "all"
        self.keeps = most_kept > 0
        self.kept = KeptLines(most_kept)

    def record(self, line: RequestLine, *, is_failure: bool) -> None:
        """Write the line into the access log by its mode, and a failure into the log, unless its code has many."""
        if self.has_all or (self._access == "errors" and (line.status >= 400 or line.code)):
            head = {"timestamp": _now_text(), "component": self._component, "event": "request"}
            self._write(msgspec.json.encode(head | logged(line)) + b"\n")
        if is_failure:
            self._log_failure(line)

    def keep(self, line: RequestLine, decided: object = None) -> None:
        """Keep the line, if lines are kept. Sets its `at`."""
        if self.keeps:
            line.at = time.time()
            line.cause = line.cause[:_MAX_CAUSE_CHARS]
            self.kept.add(line, decided)

    def flush(self) -> None:
        """Log how many failures were left out since the last such line."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        for code, count in self._limiter.take_omitted().items():
            log.warning("failed requests were not logged", code=code, count=count, within_s=WINDOW_S)

    def _log_failure(self, line: RequestLine) -> None:
        """Log one failed request, or count it and have the count logged when the window is over."""
        code = line.code or str(line.status)
        if not self._limiter.admit(code, self._clock()):
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self.flush)
            return
        fields = logged(line) | {"code": code, "cause": line.cause[:_MAX_CAUSE_CHARS]}
        if code == "stream_broken":
            log.warning("stream broken", **fields)
        elif 400 <= line.status < 500:
            log.info("request failed", **fields)
        else:
            log.warning("request failed", **fields)


def logged(line: RequestLine) -> dict[str, Any]:
    """The fields of a line in the logs: without those that have their default; seconds to the microsecond."""
    found = {}
    for name, value in msgspec.to_builtins(line).items():
        if name != "at" and value != _LINE_DEFAULTS.get(name):  # each line of a log has its time
            found[name] = round(value, 6) if isinstance(value, float) else value
    return found


def cause_of(exc: BaseException) -> str:
    """The error's message, and that of the error behind it; with addresses, so for the log only."""
    behind = exc.__cause__
    return str(exc) if behind is None else f"{exc} ({behind!r})"


def _drop(_line: bytes) -> None:
    """Write nothing."""


def _now_text() -> str:
    """The time now, as all log lines have it."""
    return utc_text(datetime.now(UTC), "auto")
