"""Server-sent events of an engine's answer: which are complete, what the last ones say, and model names in them."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.service.http import envelope
from router.core.errors import StreamBroken
from router.http.error_shapes import status_of_type
from router.protocols.chat_completion import ChatStream, chat_answer
from router.protocols.routes import ErrorShape, UsageKind, event_type

# The end of an event: a blank line, with either line end.
_END, _CRLF_END = b"\n\n", b"\r\n\r\n"
# The longest event that is kept until its end has come.
MAX_EVENT_BYTES = 8 * 2**20
_EVENT = re.compile(rb".+?(?:\r?\n\r?\n|$)", re.DOTALL)
# Inside a JSON string the quotes would be escaped.
_FINGERPRINT = re.compile(rb'"system_fingerprint": ?(?:null|"[^"\\]*")')
# An adapter's engine name: its lora_id and the beginning of its digest, see lorafleet/identity.py.
_ENGINE_NAME = re.compile(rb'("model": ?"[^"]+)@[0-9a-f]{12}"')


class AnswerRewriter(Protocol):
    """Rewrites an engine's answer for its client."""

    @property
    def usage(self) -> UsageKind | None:
        """The form of the usage in what it makes of a stream; None: the engine's."""

    def whole(self, body: bytes) -> bytes:
        """A complete body, rewritten."""

    def rewrite(self, chunk: bytes) -> bytes:
        """The events that this chunk completes, rewritten; the rest is kept for the next chunk. Raises StreamBroken."""

    def end(self) -> bytes:
        """The kept rest of a stream that has ended, rewritten."""

    def discard_partial_event(self) -> None:
        """Forget the kept rest: the stream goes on with whole events of our own."""


class ModelRenamer:
    """Replaces the engine's name of the model by the client's.

    Only `"model":"<engine's name>"` is replaced: inside a JSON string the quotes would be escaped, so that no text can
    match. A name may be cut between two chunks, so replacements are made in whole events.
    """

    __slots__ = ("_held", "_pairs")
    usage: UsageKind | None = None

    def __init__(self, engine_model: str, asked: str) -> None:
        self._held = b""
        self._pairs = _model_name_replacements(engine_model, asked) if engine_model != asked else ()

    def whole(self, body: bytes) -> bytes:
        """A complete body or event, renamed."""
        for ours, theirs in self._pairs:
            body = body.replace(ours, theirs)
        return body

    def rewrite(self, chunk: bytes) -> bytes:
        """The events that this chunk completes, renamed; the rest is kept for the next chunk.

        No half event goes out: if the engine broke off then, the error event would be glued to it and lost.
        raises  StreamBroken for an event of over MAX_EVENT_BYTES
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
        """The kept rest of a stream that ends without a blank line, renamed; it is kept no longer."""
        left, self._held = self._held, b""
        return self.whole(left)

    def discard_partial_event(self) -> None:
        """Forget the kept rest: the stream goes on with whole events of our own."""
        self._held = b""


@functools.lru_cache(maxsize=4096)
def _model_name_replacements(engine_model: str, asked: str) -> tuple[tuple[bytes, bytes], ...]:
    """(bytes from the engine, bytes for the client), for both spellings of a JSON field."""
    ours, theirs = msgspec.json.encode(engine_model), msgspec.json.encode(asked)
    return tuple((key + ours, key + theirs) for key in (b'"model":', b'"model": '))


class WeightSigner(ModelRenamer):
    """Also puts the name of the weights into each answer and event of choices, as its `system_fingerprint`.

    Engines have theirs on a stream's last events alone, or none at all.
    """

    __slots__ = ("_field",)

    def __init__(self, engine_model: str, asked: str, weights: str) -> None:
        """weights  the name, see `RequestTarget.weights`"""
        super().__init__(engine_model, asked)
        self._field = b'"system_fingerprint":' + msgspec.json.encode(weights)

    def whole(self, body: bytes) -> bytes:
        """A complete body or event, renamed and signed; an error stays as it is."""
        return self._signed(super().whole(body))

    def rewrite(self, chunk: bytes) -> bytes:
        """The events that this chunk completes, renamed and signed; the rest is kept. Raises StreamBroken."""
        return b"".join([self._signed(event) for event in _EVENT.findall(super().rewrite(chunk))])

    def _signed(self, event: bytes) -> bytes:
        """A body or event with the fingerprint, in place of the engine's own where it has one."""
        if b'"choices"' not in event:
            return event
        found = _FINGERPRINT.search(event)
        if found is not None:
            return event[: found.start()] + self._field + event[found.end() :]
        cut = event.rfind(b"}")
        return event[:cut] + b"," + self._field + event[cut:] if cut >= 0 else event


class StoredAnswerRewriter(ModelRenamer):
    """Also cuts the digest off an adapter's name: for stored responses, where the client's name is not known."""

    __slots__ = ()

    def whole(self, body: bytes) -> bytes:
        """A complete body, renamed, and without digests."""
        return _ENGINE_NAME.sub(rb'\1"', super().whole(body))

    def rewrite(self, chunk: bytes) -> bytes:
        """The events that this chunk completes, renamed, and without digests; the rest is kept. Raises StreamBroken."""
        return _ENGINE_NAME.sub(rb'\1"', super().rewrite(chunk))


class ChatRewriter:
    """Makes a chat's answer of a completion's, behind another rewriter."""

    __slots__ = ("_inner", "_stream")
    usage: UsageKind | None = None

    def __init__(self, inner: AnswerRewriter) -> None:
        self._inner, self._stream = inner, ChatStream()

    def whole(self, body: bytes) -> bytes:
        """A complete body, rewritten. Raises ReplicaUnreachable for what is no completion."""
        return chat_answer(self._inner.whole(body))

    def rewrite(self, chunk: bytes) -> bytes:
        """The events that this chunk completes, rewritten; the rest is kept. Raises StreamBroken."""
        return self._stream.events(self._inner.rewrite(chunk))

    def end(self) -> bytes:
        """The kept rest of a stream that has ended, rewritten. Raises StreamBroken."""
        return self._stream.events(self._inner.end())

    def discard_partial_event(self) -> None:
        """Forget the kept rest: the stream goes on with whole events of our own."""
        self._inner.discard_partial_event()


class CumulativeRewriter(ModelRenamer):
    """Passes whole events through a function that makes each of them repeat the text so far."""

    __slots__ = ("_events",)
    usage: UsageKind | None = "sglang"

    def __init__(self, events: Callable[[bytes], bytes]) -> None:
        super().__init__("", "")
        self._events = events

    def rewrite(self, chunk: bytes) -> bytes:
        """The events that this chunk completes, through the function; the rest is kept. Raises StreamBroken."""
        return self._events(super().rewrite(chunk))

    def end(self) -> bytes:
        """The kept rest of a stream that has ended, through the function. Raises StreamBroken."""
        return self._events(super().end())


def error_event(body: Mapping[str, Any], shape: ErrorShape = "openai") -> bytes:
    """The last event of a stream that broke: an error; for OpenAI's clients `[DONE]` follows."""
    data = b"data: " + msgspec.json.encode(body) + b"\n\n"
    return b"event: error\n" + data if shape == "anthropic" else data + b"data: [DONE]\n\n"


def refusal_event(status: int, body: bytes, shape: ErrorShape = "openai") -> bytes:
    """An engine's refusal as the last event of a stream that has begun already."""
    try:
        error = msgspec.json.decode(body, type=dict[str, Any])
    except DECODE_ERRORS:
        error = envelope(status, "", body.decode(errors="replace"))
    return error_event(error, shape)


def has_first_event(got: bytes) -> bool:
    """Whether these bytes have a whole `data:` event; comments and other fields may come before it."""
    start = _data_at(got)
    return start is not None and end_of_events(got) > start


_CODE_IN_TEXT = re.compile(rb"'code': (\d{3})\}")


class StreamedError(NamedTuple):
    """An error that an engine sent as an event of a stream with status 200."""

    status: int
    body: bytes


def event_error(event: bytes) -> StreamedError | None:
    """The error in a first event that is one, as vLLM sends it in a stream with status 200; else None."""
    line = event[(_data_at(event) or 0) + len(b"data:") :].split(b"\n", 1)[0].strip()
    if not line.startswith((b'{"error"', b'{"object":"error"', b'{"type":"error"')):
        return None
    try:
        error = msgspec.json.decode(line, type=dict[str, Any])
    except DECODE_ERRORS:
        return StreamedError(500, line)
    inner = error.get("error")
    details = inner if isinstance(inner, dict) else error
    code = details.get("code")
    if not isinstance(code, int):
        # In vLLM's /v1/messages: 0.33 has a type for each status; 0.32 puts the chat route's error into the text of an
        # `internal_error` (anthropic/serving.py).
        match = _CODE_IN_TEXT.search(line)
        code = int(match[1]) if match else status_of_type(details.get("type")) or 500
    return StreamedError(code if 400 <= code < 600 else 500, line)


_DONE = b"data: [DONE]"
# Bytes of the tail that may have it, with spaces and line ends of any kind.
_MAX_DONE_BYTES = 32
# Events that say by their type alone that the answer ended in an error: of messages, and of responses.
_ERROR_TYPES = frozenset({b"error", b"response.failed"})
# A choice's `finish_reason`: null until its last event. Inside a JSON string the quotes would be escaped.
_FINISH = re.compile(rb'"finish_reason": ?(n?)')


def says_done(events: bytes) -> bool:
    """Whether the last of these events is `[DONE]`."""
    return events[-_MAX_DONE_BYTES:].rstrip().endswith(_DONE)


def is_plain(events: bytes) -> bool:
    """Whether these events of a stream of choices certainly end nothing: no choice, no usage, not the stream."""
    return b'"finish_reason":"' not in events and b'"choices":[]' not in events and b"[DONE]" not in events


def last_type(events: bytes) -> bytes:
    """The type of the last of these events; empty: it has none."""
    text = events.rstrip().replace(b"\r\n", b"\n")
    return event_type(text[text.rfind(_END) + 1 :])


def has_finish_reason(events: bytes) -> bool:
    """Whether the last choice in these events has a finish reason."""
    found = _FINISH.findall(events)
    return bool(found) and not found[-1]


def last_event_error(events: bytes) -> StreamedError | None:
    """The error in the last of these events, `[DONE]` apart; None where it is no error.

    vLLM 0.32 and SGLang 0.5.23 end a stream so when a request, or the whole engine, fails in the middle of its answer.
    """
    text = events.rstrip().replace(b"\r\n", b"\n").removesuffix(_DONE).rstrip()
    last = text[text.rfind(_END) + 1 :].lstrip(b"\n")
    found = event_error(last)
    if found is None and event_type(last) in _ERROR_TYPES:
        return StreamedError(500, last[(_data_at(last) or 0) + len(b"data:") :].strip())
    return found


def end_of_events(held: bytes) -> int:
    """The number of bytes that are complete events."""
    at, crlf_at = held.rfind(_END), held.rfind(_CRLF_END)
    return max(at + len(_END) if at >= 0 else 0, crlf_at + len(_CRLF_END) if crlf_at >= 0 else 0)


def _data_at(events: bytes) -> int | None:
    """Offset of the first line of data; None: there is none."""
    if events.startswith(b"data:"):
        return 0
    found = events.find(b"\ndata:")
    return None if found < 0 else found + 1
