"""What is read of an answer's events, and what is changed in them."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from lorafleet.service.http import envelope
from router.core.errors import StreamBroken
from router.http.error_shapes import status_of
from router.protocols.routes import ErrorShape, event_type

# What ends an event: a blank line, with either line end.
_END, _CRLF_END = b"\n\n", b"\r\n\r\n"
# The longest single event held back while its end is awaited.
MAX_EVENT_BYTES = 8 * 2**20
# A lora_id with the beginning of its digest, see workers/wire.py engine_name.
_DATED = re.compile(rb'("model": ?"[^"@]+)@[0-9a-f]{12}"')


class Renamed(Protocol):
    """An engine's answer as its client is to see it."""

    def whole(self, body: bytes) -> bytes:
        """A complete body."""

    def chunk(self, chunk: bytes) -> bytes:
        """The events that this chunk completes; the rest is kept for the next. Raises StreamBroken."""

    def end(self) -> bytes:
        """What is left when the stream ends."""


class Echo:
    """Puts back the client's name for the model wherever the engine wrote its own.

    Only `"model":"<engine's name>"` is replaced: inside a JSON string the quotes would be escaped, so a text
    that talks about it cannot match. A name may fall between two chunks, so whole events are replaced.
    """

    __slots__ = ("_held", "_pairs")

    def __init__(self, engine_model: str, asked: str) -> None:
        self._held = b""
        self._pairs = _pairs(engine_model, asked) if engine_model != asked else ()

    def whole(self, body: bytes) -> bytes:
        """A complete body or event, renamed."""
        for ours, theirs in self._pairs:
            body = body.replace(ours, theirs)
        return body

    def chunk(self, chunk: bytes) -> bytes:
        """The events that this chunk completes, renamed; the rest is kept for the next.

        Half an event never goes out: if the engine left then, our error would be glued to it and lost.
        raises  StreamBroken when an event has no end
        """
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not chunk.endswith(_END):
            cut = end_of_events(chunk)
            self._held = chunk[cut:]
            if len(self._held) > MAX_EVENT_BYTES:
                raise StreamBroken(f"an event of over {MAX_EVENT_BYTES} bytes")
            chunk = chunk[:cut]
        for ours, theirs in self._pairs:
            chunk = chunk.replace(ours, theirs)
        return chunk

    def end(self) -> bytes:
        """What is left when the stream ends without a closing blank line."""
        left, self._held = self._held, b""
        return self.whole(left)


@functools.lru_cache(maxsize=4096)
def _pairs(engine_model: str, asked: str) -> tuple[tuple[bytes, bytes], ...]:
    """What the engine writes and what its client is to read, in both spellings of a JSON field."""
    ours, theirs = msgspec.json.encode(engine_model), msgspec.json.encode(asked)
    return tuple((key + ours, key + theirs) for key in (b'"model":', b'"model": '))


class Undated(Echo):
    """As above, and takes the digest off an adapter's name: of an answer that an engine keeps, asked for by its id."""

    __slots__ = ()

    def whole(self, body: bytes) -> bytes:
        return _DATED.sub(rb'\1"', super().whole(body))

    def chunk(self, chunk: bytes) -> bytes:
        return _DATED.sub(rb'\1"', super().chunk(chunk))


class GrowingEcho(Echo):
    """Whole events, through a function of our own."""

    __slots__ = ("_events",)

    def __init__(self, events: Callable[[bytes], bytes]) -> None:
        super().__init__("", "")
        self._events = events

    def chunk(self, chunk: bytes) -> bytes:
        return self._events(super().chunk(chunk))

    def end(self) -> bytes:
        return self._events(super().end())


def error_event(body: Mapping[str, Any], shape: ErrorShape = "openai") -> bytes:
    """The end of a stream that broke: an error in an event; for OpenAI's clients the usual last line, too."""
    data = b"data: " + msgspec.json.encode(body) + b"\n\n"
    return b"event: error\n" + data if shape == "anthropic" else data + b"data: [DONE]\n\n"


def refusal_event(status: int, body: bytes, shape: ErrorShape = "openai") -> bytes:
    """An engine's refusal, where a stream had begun before it came."""
    try:
        told = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        told = envelope(status, "", body.decode(errors="replace"))
    return error_event(told, shape)


def has_first_event(got: bytes) -> bool:
    """Whether a whole `data:` event is in it; comments and other fields may come before."""
    start = _data_at(got)
    return start is not None and end_of_events(got) > start


_SAID_CODE = re.compile(rb"'code': (\d{3})\}")


def event_error(event: bytes) -> tuple[int, bytes] | None:
    """(status, body) when the first event is an error, as vLLM puts it in a stream that began with 200."""
    line = event[(_data_at(event) or 0) + len(b"data:") :].split(b"\n", 1)[0].strip()
    if not line.startswith((b'{"error"', b'{"object":"error"', b'{"type":"error"')):
        return None
    try:
        error = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return 500, line
    inner = error.get("error")
    told = inner if isinstance(inner, dict) else error
    code = told.get("code")
    if not isinstance(code, int):
        # Of vLLM's messages: 0.33 has a word for the status, in 0.32 what its chat route said is the text of an
        # `internal_error` (anthropic/serving.py).
        said = _SAID_CODE.search(line)
        code = int(said[1]) if said else status_of(told.get("type")) or 500
    return (code if 400 <= code < 600 else 500), line


_DONE = b"data: [DONE]"
# The longest tail that is looked at for it: with spaces and line ends of any kind.
_DONE_WITHIN = 32
# Of a choice: null until its last event. Inside a JSON string the quotes would be escaped.
_FINISH = re.compile(rb'"finish_reason": ?(n?)')


def says_done(events: bytes) -> bool:
    """Whether the last of these events is `[DONE]`."""
    return events[-_DONE_WITHIN:].rstrip().endswith(_DONE)


def last_type(events: bytes) -> bytes:
    """The type of the last of these events, empty where it has none."""
    text = events.rstrip().replace(b"\r\n", b"\n")
    return event_type(text[text.rfind(_END) + 1 :])


def is_finished(events: bytes) -> bool:
    """Whether the last events of a stream of choices say why the answer is over, or what went wrong."""
    text = events.rstrip().replace(b"\r\n", b"\n")
    last = text[text.rfind(_END) + 1 :].lstrip(b"\n")
    if event_type(last) == b"error" or event_error(last) is not None:
        return True
    found = _FINISH.findall(text)
    return bool(found) and not found[-1]


def end_of_events(held: bytes) -> int:
    """How many of these bytes are complete events."""
    at, crlf_at = held.rfind(_END), held.rfind(_CRLF_END)
    return max(at + len(_END) if at >= 0 else 0, crlf_at + len(_CRLF_END) if crlf_at >= 0 else 0)


def _data_at(events: bytes) -> int | None:
    if events.startswith(b"data:"):
        return 0
    found = events.find(b"\ndata:")
    return None if found < 0 else found + 1
