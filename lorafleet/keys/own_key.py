"""The bearer key that a service sends to other services: fixed, or read from a file that may change."""

import time
from collections.abc import Callable, Generator
from pathlib import Path

import httpx
import structlog

from lorafleet.keys.key_files import RECHECK_S, KeyFileError
from lorafleet.service.files import stamp_of
from lorafleet.service.network.urls import checked_key

log = structlog.get_logger()


class OwnKey(httpx.Auth):
    """The current key. Also an `auth` of httpx, which asks for the key at each request.

    A file comes before a fixed key, and is read again when it has changed. While it cannot be read, or is empty, the
    last good key stays.
    """

    def __init__(self, key: str = "", file: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeyFileError when the file is unreadable now, at the start."""
        self._file = file
        self._clock = clock
        self._stamp = None if file is None else stamp_of(file)
        self._key = key if file is None else _read_key(file)
        self._checked_at = clock()
        self._trouble = ""

    @property
    def key(self) -> str:
        """The current key; empty without one. Checks the file once a second at most, and reads it if it has changed."""
        if self._file is not None and self._clock() - self._checked_at >= RECHECK_S:
            self._checked_at = self._clock()
            self._read_if_changed(self._file)
        return self._key

    @property
    def headers(self) -> dict[str, str]:
        """The `authorization` header with the current key; empty without a key."""
        key = self.key
        return {"authorization": f"Bearer {key}"} if key else {}

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the key, unless the request has an `authorization` header already."""
        if "authorization" not in request.headers:
            request.headers.update(self.headers)
        yield request

    def _read_if_changed(self, file: Path) -> None:
        """Read the key file again if its stamp has changed; a read error is logged and the last good key stays.

        A new key is logged.
        """
        stamp = stamp_of(file)
        if stamp == self._stamp:
            return
        try:
            key = _read_key(file)
        except KeyFileError as exc:
            self._log_trouble(str(exc))
            return
        self._stamp, self._trouble = stamp, ""
        if key != self._key:
            self._key = key
            log.info("token_file read again: calls send the new key", file=str(file))

    def _log_trouble(self, trouble: str) -> None:
        """Log a read error unless it is the last one logged, and remember it."""
        if trouble != self._trouble:
            log.error("token_file not read again: calls send the last good key; mend the file", error=trouble)
        self._trouble = trouble


def _read_key(file: Path) -> str:
    """The key in a file; raises KeyFileError."""
    try:
        key = checked_key(file.read_text())
    except (OSError, ValueError) as exc:  # the words of the second do not repeat the key
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise KeyFileError(f"token_file {file}: {why}; expected one key, as `lorafleet keys new` prints it") from exc
    if not key:
        raise KeyFileError(f"token_file {file} is empty; expected one key, as `lorafleet keys new` prints it")
    return key
