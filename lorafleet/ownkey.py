"""The bearer key of our own calls to other houses: fixed, or in a file that may change while we run."""

import time
from collections.abc import Callable, Generator
from pathlib import Path

import httpx
import structlog

from lorafleet.auth import KeyFileError
from lorafleet.urls import plain_key

log = structlog.get_logger()

_RECHECK_S = 1.0  # as key files, which whoever is called reads


class OwnKey(httpx.Auth):
    """The key as it is now; also an `auth` of httpx, which asks for it at each request.

    A file comes before a fixed key, and is read again when it has changed. While it cannot be read, or is empty, the
    last good key stays.
    """

    def __init__(self, key: str = "", file: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeyFileError when the file is unreadable now, at the start."""
        self._file = file
        self._clock = clock
        self._stamp = _stamp(file)
        self._key = key if file is None else _read(file)
        self._checked_at = clock()
        self._trouble = ""

    @property
    def key(self) -> str:
        """Empty where there is none."""
        if self._file is not None and self._clock() - self._checked_at >= _RECHECK_S:
            self._checked_at = self._clock()
            self._read_if_changed(self._file)
        return self._key

    @property
    def headers(self) -> dict[str, str]:
        """What a call brings: `authorization`, or nothing."""
        key = self.key
        return {"authorization": f"Bearer {key}"} if key else {}

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """A request that brings another's key keeps it."""
        if "authorization" not in request.headers:
            request.headers.update(self.headers)
        yield request

    def _read_if_changed(self, file: Path) -> None:
        stamp = _stamp(file)
        if stamp == self._stamp:
            return
        try:
            key = _read(file)
        except KeyFileError as exc:
            self._say(str(exc))
            return
        self._stamp, self._trouble = stamp, ""
        if key != self._key:
            self._key = key
            log.info("own key read again", file=str(file))

    def _say(self, trouble: str) -> None:
        """Once, however often it is tried again."""
        if trouble != self._trouble:
            log.error("own key not read again, the last good one stays", error=trouble)
        self._trouble = trouble


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """Of what the name leads to: Kubernetes changes a mounted Secret by pointing a link elsewhere."""
    if file is None:
        return None
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _read(file: Path) -> str:
    try:
        key = plain_key(file.read_text())
    except (OSError, ValueError) as exc:  # the words of the second do not repeat the key
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise KeyFileError(f"token_file {file}: {why}; expected one key, as `lorafleet keys new` prints it") from exc
    if not key:
        raise KeyFileError(f"token_file {file} is empty; expected one key, as `lorafleet keys new` prints it")
    return key
