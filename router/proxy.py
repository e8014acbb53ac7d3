"""open -> relay: one attempt at one replica, and its bytes to the client."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from router.core.errors import ReplicaUnreachable, StreamBroken

Send = Callable[[bytes], Awaitable[None]]

# What ends an event: a blank line, with either line end.
_BOUNDARIES = (b"\n\n", b"\r\n\r\n")
# The longest single event held back while its end is awaited.
_MAX_EVENT_BYTES = 8 * 2**20
# vLLM 0.32 answers so, with 500, while SIGTERM waits for requests in flight (seen running).
_SHUTTING_DOWN = b"cannot schedule new futures after shutdown"

# vLLM 0.32 v1/engine/exceptions.py EngineDeadError.
_DEAD = b"EngineCore encountered an issue"

# The event with an answer's usage is the last but `[DONE]`, and each may come in a chunk of its own; a third for what
# an engine sends without a closing blank line.
_TAIL_CHUNKS = 3


# The quotes would be escaped in an answer's text.
_NO_CHOICES = b'"choices":[]'
_EVENT = re.compile(rb".+?(?:\r?\n\r?\n|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and bytes that bound one attempt."""

    connect_s: float
    first_data_s: float
    idle_s: float
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent. `engine_model` is the name in `body`; `has_adapter`: that name is an adapter's."""

    url: str
    body: bytes
    headers: Mapping[str, str]
    engine_model: str
    has_adapter: bool
    replica: str


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_decode_usage = msgspec.json.Decoder(_WithUsage).decode


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What the engine says an answer took. None is what it did not say, which is not 0.

    prompt_tokens  of all prompts of the request; `cached_tokens` is of one of them alone (vLLM 0.32 serving.py of
                   chat_completion and completion), so the two belong together only where there is one prompt
    """

    prompt_tokens: int
    completion_tokens: int | None
    cached_tokens: int | None


class Opened:
    """An answer that has begun: a status and the first bytes are there, nothing has gone to the client."""

    def __init__(
        self, response: aiohttp.ClientResponse, first: bytes, *, streamed: bool, replica: str, idle_s: float
    ) -> None:
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")
        self.first = first
        self.streamed = streamed
        self.in_band_error = False
        self._response = response
        self._replica = replica
        self._idle_s = idle_s
        self._tail: deque[bytes] = deque(maxlen=_TAIL_CHUNKS)

    @property
    def usage(self) -> EngineUsage | None:
        """The engine's usage, once all of the answer has been relayed; None where it has told none.

        Parses at each call. A stream carries it only where it was asked for: `stream_options.include_usage`.
        """
        return _last_event_usage(b"".join(self._tail)) if self.streamed else _usage(self.first)

    def note(self, events: bytes) -> None:
        """Keep the end of what is relayed, in whole events and unparsed: `usage` is in it."""
        self._tail.append(events)

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows `first`; raises StreamBroken when the engine leaves in the middle or falls silent."""
        read = self._response.content.readany
        try:
            while True:
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with a chunk, and the
                # engine would go on for a client that left.
                async with asyncio.timeout(self._idle_s):
                    chunk = await read()
                if not chunk:
                    return
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise StreamBroken(f"replica {self._replica} broke off in the middle of its answer: {exc!r}") from exc

    def close(self) -> None:
        """Free the connection; one whose answer was not read to its end is closed, and the engine aborts."""
        self._response.close()


async def open_answer(session: aiohttp.ClientSession, call: Call, limits: Limits, *, streamed: bool) -> Opened:
    """Send one request and wait for its first `data:` event, or its whole body.

    vLLM sends a streamed 200 head long before its first token, so the head decides nothing.

    raises  ReplicaUnreachable when another replica may do better: no connection, 502, 503, an adapter that the
            replica had reported but no longer knows, an engine shutting down, an error in place of the first event
    """
    response: aiohttp.ClientResponse | None = None
    try:
        async with asyncio.timeout(limits.first_data_s):
            timeout = aiohttp.ClientTimeout(sock_connect=limits.connect_s)
            response = await session.post(call.url, data=call.body, headers=call.headers, timeout=timeout)
            opened = await _begun(response, call, limits, streamed=streamed)
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        if response is not None:
            response.close()
        raise ReplicaUnreachable(f"{call.replica}: {exc!r}", reason=_failure_reason(exc)) from exc
    except BaseException:
        if response is not None:
            response.close()
        raise
    reason_to_retry = _retry_reason(opened, call)
    if reason_to_retry is not None:
        opened.close()
        raise ReplicaUnreachable(f"{call.replica}: {opened.status} {opened.first[:200]!r}", reason=reason_to_retry)
    return opened


async def _begun(response: aiohttp.ClientResponse, call: Call, limits: Limits, *, streamed: bool) -> Opened:
    # The engine has the last word on whether it streams: it takes `"stream": "true"` and 1 for true as well.
    is_stream = streamed or response.content_type == "text/event-stream"
    if not is_stream or response.status != 200:
        whole = await _whole_body(response, limits.answer_bytes)
        return Opened(response, whole, streamed=False, replica=call.replica, idle_s=limits.idle_s)
    first = await _first_event(response)
    failure = _event_error(first)
    opened = Opened(response, first, streamed=failure is None, replica=call.replica, idle_s=limits.idle_s)
    if failure is not None:
        opened.status, opened.first = failure
        opened.content_type = "application/json"
        opened.in_band_error = True
    return opened


class Echo:
    """Puts back the client's name for the model wherever the engine wrote its own.

    Only `"model":"<engine's name>"` is replaced: inside a JSON string the quotes would be escaped, so a text
    that talks about it cannot match. A name may fall between two chunks, so whole events are replaced.
    """

    def __init__(self, engine_model: str, asked: str) -> None:
        self._same = engine_model == asked
        ours, theirs = msgspec.json.encode(engine_model), msgspec.json.encode(asked)
        self._pairs = tuple((key + ours, key + theirs) for key in (b'"model":', b'"model": '))
        self._held = b""

    def whole(self, body: bytes) -> bytes:
        """A complete body or event, renamed."""
        if not self._same:
            for ours, theirs in self._pairs:
                body = body.replace(ours, theirs)
        return body

    def chunk(self, chunk: bytes) -> bytes:
        """The events that this chunk completes, renamed; the rest is kept for the next.

        Half an event never goes out: if the engine left then, our error would be glued to it and lost.
        """
        self._held += chunk
        cut = _end_of_events(self._held)
        if not cut:
            if len(self._held) > _MAX_EVENT_BYTES:
                raise StreamBroken(f"an event of over {_MAX_EVENT_BYTES} bytes")
            return b""
        ready, self._held = self._held[:cut], self._held[cut:]
        return self.whole(ready)

    def end(self) -> bytes:
        """What is left when the stream ends without a closing blank line."""
        left, self._held = self._held, b""
        return self.whole(left)


async def relay(opened: Opened, echo: Echo, send: Send, *, hide_usage: bool = False) -> None:
    """Send a stream's bytes on as they come; raises StreamBroken when the engine leaves.

    hide_usage  the event with the usage is ours: we asked for it, the client did not
    """

    async def pass_on(ready: bytes) -> None:
        if ready:
            opened.note(ready)
            if hide_usage and _NO_CHOICES in ready:
                ready = without_usage(ready)
            if ready:
                await send(ready)

    await pass_on(echo.chunk(opened.first))
    async for chunk in opened.rest():
        await pass_on(echo.chunk(chunk))
    await pass_on(echo.end())


def without_usage(events: bytes) -> bytes:
    """Whole events without the one that has nothing but the usage: no choices (vLLM 0.32 serving.py, seen running)."""
    kept = [event for event in _EVENT.findall(events) if not (_NO_CHOICES in event and b'"usage":{' in event)]
    return b"".join(kept)


def error_event(body: Mapping[str, Any]) -> bytes:
    """The end of a stream that broke: OpenAI's error in an event, then the usual last line."""
    return b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n"


def _last_event_usage(events: bytes) -> EngineUsage | None:
    """The usage in the last event that has one; vLLM may send one with each, but only the last says what was cached.

    The quotes of a "usage" in a JSON string would be escaped, and so would a line's end.
    """
    at = events.rfind(b'"usage"')
    line = events[events.rfind(b"\n", 0, max(at, 0)) + 1 :].split(b"\n", 1)[0]
    return _usage(line.removeprefix(b"data:")) if line.startswith(b"data:") else None


def _usage(body: bytes) -> EngineUsage | None:
    if b'"usage"' not in body:
        return None
    try:
        usage = _decode_usage(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # an engine with other shapes tells nothing
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return EngineUsage(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details else None)


async def _first_event(response: aiohttp.ClientResponse) -> bytes:
    """Bytes up to and including the first `data:` event, with what came along in the same chunk."""
    got = b""
    async for chunk in response.content.iter_any():
        got += chunk
        start = _data_at(got)
        if start is not None and _end_of_events(got) > start:
            return got
        if len(got) > _MAX_EVENT_BYTES:
            raise aiohttp.ClientPayloadError(f"no event within {_MAX_EVENT_BYTES} bytes")
    raise aiohttp.ClientPayloadError("the stream ended before its first event")


def _data_at(events: bytes) -> int | None:
    """Where the first `data:` line begins; comments and other fields may come before it."""
    if events.startswith(b"data:"):
        return 0
    found = events.find(b"\ndata:")
    return None if found < 0 else found + 1


def _end_of_events(held: bytes) -> int:
    """How many of these bytes are complete events."""
    ends = ((held.rfind(boundary), len(boundary)) for boundary in _BOUNDARIES)
    return max(at + size if at >= 0 else 0 for at, size in ends)


def _event_error(event: bytes) -> tuple[int, bytes] | None:
    """(status, body) when the first event is an error, as vLLM puts it in a stream that began with 200."""
    line = event[(_data_at(event) or 0) + len(b"data:") :].split(b"\n", 1)[0].strip()
    if not line.startswith((b'{"error"', b'{"object":"error"')):
        return None
    try:
        error = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return 500, line
    inner = error.get("error")
    code = (inner if isinstance(inner, dict) else error).get("code")
    return (code if isinstance(code, int) and 400 <= code < 600 else 500), line


async def _whole_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    got = bytearray()
    async for chunk in response.content.iter_any():
        got += chunk
        if len(got) > most_bytes:
            raise aiohttp.ClientPayloadError(f"an answer of over {most_bytes} bytes")
    return bytes(got)


def _failure_reason(exc: Exception) -> str:
    if isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return "connection"
    # aiohttp's own are ServerTimeoutErrors; the bare one is ours, over the whole wait.
    return "no_answer_in_time" if type(exc) is TimeoutError else "no_answer"


def _retry_reason(opened: Opened, call: Call) -> str | None:
    """Why another replica may do better, or None: the answer is the client's, error or not."""
    if opened.status in (502, 503):
        return "engine_unavailable"
    # An engine names the model that it does not know; any other 404 (a route that it does not serve) is the client's.
    if opened.status == 404 and call.has_adapter and call.engine_model.encode() in opened.first:
        return "adapter_missing"
    if opened.status == 500 and _SHUTTING_DOWN in opened.first:
        return "engine_draining"
    if opened.status == 500 and _DEAD in opened.first:
        return "engine_dead"
    if opened.in_band_error and opened.status >= 500:
        return "first_event_error"
    return None
