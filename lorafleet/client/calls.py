"""Each operation of the client as a generator that does no I/O: it yields calls and pauses, and gets answers.

`Fleet` and `AsyncFleet` run the same generators.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from lorafleet.client.archive import AdapterArchive
from lorafleet.client.results import FleetError, Published, Pushed, PushProgress
from lorafleet.engine.acceptance import FILE_NAME as ACCEPTANCE_NAME
from lorafleet.service.failure import CommandFailed
from lorafleet.service.network.urls import url_path

T = TypeVar("T")
Folder: TypeAlias = str | PathLike[str]

_ATTEMPTS = 6
"""Attempts in a row that bring no byte further. With the pauses between them: a leader changes in five seconds."""
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.5, 5.0
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
# An upload that went on where another ended, or from what is gone: ask again where it is.
_AGAIN_CODES = frozenset({"upload_offset", "upload_superseded", "upload_incomplete", "upload_unknown"})
_PUBLISH_S = 110.0
_POLL_S = 30.0


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. `body`: pieces of the body, with `length` bytes in all; `json`: a body as JSON."""

    method: str
    path: str
    params: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    body: Iterator[bytes] | None = None
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait of so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its JSON; status 0: no server answered, `error` says why."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    error: str = ""


Operation: TypeAlias = Generator[Call | Pause, Answer, T]


def push(
    lora_id: str,
    folder: Folder,
    *,
    digest: str | None = None,
    base_model: str | None = None,
    tenants: Sequence[str] = (),
    on_progress: Callable[[PushProgress], None] = lambda _: None,
) -> Operation[Pushed]:
    """Upload the adapter in a folder, and register it under a new lora_id, such as `sql/v2`.

    A broken upload goes on where it was, also that of a program that has died. The same bytes again: nothing is sent.

    digest      that the folder must have; None: any
    base_model  its name in the fleet; None: as in the adapter's config
    tenants     that may use it; empty: the key's own, else all
    raises      FleetError, with the server's own words; TypeError for `tenants` that are one text
    """
    if isinstance(tenants, str):  # it would be a tenant for each letter
        raise TypeError(f"tenants is a text; expected a list of names, such as [{tenants!r}]")
    params = [("base_model", base_model)] if base_model else []
    params += [("tenant", tenant) for tenant in tenants]
    answer = yield from _upload(lora_id, _archive(folder, digest), params, on_progress)
    pushed = _read(lambda: Pushed.read(answer.status, answer.json), answer)
    if not pushed.is_new:
        yield from _send_acceptance(pushed.lora_id, folder)
    return pushed


def publish(
    name: str,
    folder: Folder,
    *,
    base_model: str | None = None,
    expected_version: int | None = None,
    on_progress: Callable[[PushProgress], None] = lambda _: None,
) -> Operation[Published]:
    """Upload the adapter in a folder as the next version of a name, and wait until the name points at it.

    Then every request for the name, at every router, is answered by these very bytes. See `push` for the parameters.
    Raises FleetError; the name points then at what it did before.

    expected_version  number of the version that the name has now, 0: it is new. Where another publish came first,
                      FleetError has code `version_conflict`. None: any
    """
    params = [("publish", "true"), *([("base_model", base_model)] if base_model else [])]
    params += [] if expected_version is None else [("expected_version", str(expected_version))]
    answer = yield from _upload(name, _archive(folder, None), params, on_progress)
    published = _read(lambda: Published.read(answer.json), answer)
    if not published.is_new:
        yield from _send_acceptance(published.lora_id, folder)
    return published


def _send_acceptance(lora_id: str, folder: Folder) -> Operation[None]:
    """Send a folder's acceptance file for an adapter that the fleet has already; without one, nothing.

    Raises FleetError.
    """
    try:
        content = (Path(folder) / ACCEPTANCE_NAME).read_bytes()
    except OSError:
        return
    body, path = {"file": content.decode(errors="replace")}, f"/v1/adapters/{_quoted(lora_id)}/check"
    _require_success((yield Call("POST", path, json=body, timeout_s=_PUBLISH_S)))


def unload(name: str) -> Operation[None]:
    """Remove a published name or an adapter from the fleet; requests in flight finish. Raises FleetError."""
    answer = yield Call("DELETE", f"/v1/published/{_quoted(name)}")
    if answer.status == 404:
        answer = yield Call("DELETE", f"/v1/adapters/{_quoted(name)}")
    _require_success(answer)


def wait_ready(
    lora_id: str, *, replicas: int = 1, timeout_s: float = 300.0, clock: Callable[[], float] = monotonic
) -> Operation[tuple[str, ...]]:
    """Have an adapter loaded, and wait until so many workers have it ready; returns these. Needs scope `load`.

    Raises FleetError, also when the time is over.
    """
    deadline, ready = clock() + timeout_s, tuple[str, ...]()
    while True:
        wait_s = max(0.0, min(_POLL_S, deadline - clock()))
        ask = {"replicas": replicas, "wait_s": wait_s}
        answer = yield Call("POST", f"/v1/adapters/{_quoted(lora_id)}/ensure", json=ask, timeout_s=wait_s + 30)
        if answer.status not in _AGAIN and answer.status:
            _require_success(answer)
            ready = _ready_workers(answer)
            if len(ready) >= replicas:
                return ready
        if clock() >= deadline:
            _require_success(answer)
            message = f"{lora_id} is ready on {len(ready)} of {replicas} workers after {timeout_s:g} s"
            raise FleetError(f"{message}: {answer.json}", status=answer.status)
        yield Pause(_FIRST_PAUSE_S)


def _upload(
    name: str,
    archive: AdapterArchive,
    params: Sequence[tuple[str, str]],
    on_progress: Callable[[PushProgress], None],
) -> Operation[Answer]:
    """Send the archive, from where a broken attempt has ended, until the server has it and has done its part.

    Before each attempt the server is asked what it has: perhaps it needs no byte. Raises FleetError.
    """
    path, size = f"/v1/adapters/{_quoted(name)}", archive.size_bytes
    asked = (*params, ("digest", archive.digest))
    best, failures, start = -1, 0, 0
    while True:
        answer = yield Call("PUT", path, asked, {"content-range": f"bytes */{size}"}, timeout_s=_PUBLISH_S * 3)
        if answer.status in {200, 201}:
            on_progress(PushProgress(size, size))
            return answer
        if answer.status == 202 or _code(answer) == "upload_unknown":
            start = _received_bytes(answer, size) if answer.status == 202 else 0
            failures = 0 if start > best else failures
            best = max(best, start)
            headers = {"content-range": f"bytes {start}-{size - 1}/{size}", "content-length": str(size - start)}
            body = _counted(archive.chunks(start), start, size, on_progress)
            answer = yield Call("PUT", path, asked, headers, body=body, timeout_s=_PUBLISH_S * 3)
            if answer.status in {200, 201}:
                return answer
        if answer.status != 0 and answer.status not in _AGAIN and _code(answer) not in _AGAIN_CODES:
            _require_success(answer)
        failures += 1
        if failures >= _ATTEMPTS:
            _require_success(answer)
            message = f"{name}: the server has taken {max(best, 0)} of {size} bytes; try again"
            raise FleetError(message, status=answer.status)
        yield Pause(max(_retry_after_s(answer), min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1))))


def _counted(
    chunks: Iterator[bytes], start: int, total: int, on_progress: Callable[[PushProgress], None]
) -> Iterator[bytes]:
    """The chunks, with a report of progress before each."""
    sent = start
    for chunk in chunks:
        on_progress(PushProgress(sent, total))
        yield chunk
        sent += len(chunk)
    on_progress(PushProgress(sent, total))


def _archive(folder: Folder, digest: str | None) -> AdapterArchive:
    """The folder's archive. Raises FleetError if it is no adapter's, or has another digest than the given one."""
    archive = AdapterArchive(Path(folder))
    if digest not in (None, archive.digest):
        raise FleetError(f"{folder} has digest {archive.digest}, expected {digest}", code="digest_mismatch")
    return archive


def _ready_workers(answer: Answer) -> tuple[str, ...]:
    """The workers in the answer to an `ensure`. Raises FleetError."""
    return _read(lambda: tuple(answer.json["ready"]), answer)


def _received_bytes(answer: Answer, size: int) -> int:
    """The bytes that the server has of an upload of `size` bytes. Raises FleetError."""
    received = _read(lambda: int(answer.json["received_bytes"]), answer)
    if not 0 <= received <= size:
        message = f"the server says that it has {received} bytes of an upload of {size}: is the URL right?"
        raise FleetError(message, status=answer.status)
    return received


def _quoted(name: str) -> str:
    """A name as a part of a path. Raises FleetError for a name that would lead to another path."""
    try:
        return url_path(name)
    except CommandFailed as exc:
        raise FleetError(str(exc), code="invalid_name") from exc


def _code(answer: Answer) -> str:
    """The code of an error answer; "" without one."""
    error = answer.json.get("error") if isinstance(answer.json, dict) else None
    return str(error.get("code", "")) if isinstance(error, dict) else ""


def _require_success(answer: Answer) -> None:
    """Raise FleetError for an answer that is an error, or none."""
    if 200 <= answer.status < 300:
        return
    error = answer.json.get("error") if isinstance(answer.json, dict) else None
    message = str(error.get("message", "")) if isinstance(error, dict) else ""
    shown = message or answer.error or f"HTTP {answer.status}, and not as a fleet answers: is the URL right?"
    raise FleetError(shown, status=answer.status or None, code=_code(answer))


def _read(read: Callable[[], T], answer: Answer) -> T:
    """The result in an answer. Raises FleetError for one that is not a fleet's."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        message = f"the server answers as no fleet does ({exc!r}): is the URL right?"
        raise FleetError(message, status=answer.status) from exc


def _retry_after_s(answer: Answer) -> float:
    """The seconds in an answer's Retry-After; 0 without."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0.0
