"""What is read of an answer, and what is changed in it: its model's name, its usage, an error in its first event."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.core.errors import StreamBroken

# What ends an event: a blank line, with either line end.
_END, _CRLF_END = b"\n\n", b"\r\n\r\n"
# The longest single event held back while its end is awaited.
MAX_EVENT_BYTES = 8 * 2**20
# The event with an answer's usage is the last but `[DONE]`, and each may come in a chunk of its own; a third for what
# an engine sends without a closing blank line.
_TAIL_CHUNKS = 3
# The quotes would be escaped in an answer's text.
_NO_CHOICES = b'"choices":[]'
_EVENT = re.compile(rb".+?(?:\r?\n\r?\n|$)", re.DOTALL)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Of chat, completions and embeddings; `/v1/responses` and `/v1/messages` have names of their own for the same."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: int | None = None


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


class Echo:
    """Puts back the client's name for the model wherever the engine wrote its own.

    Only `"model":"<engine's name>"` is replaced: inside a JSON string the quotes would be escaped, so a text
    that talks about it cannot match. A name may fall between two chunks, so whole events are replaced.
    """

    __slots__ = ("_held", "_pairs")

    def __init__(self, engine_model: str, asked: str) -> None:
        self._held = b""
        self._pairs: tuple[tuple[bytes, bytes], ...] = ()
        if engine_model != asked:
            ours, theirs = msgspec.json.encode(engine_model), msgspec.json.encode(asked)
            self._pairs = tuple((key + ours, key + theirs) for key in (b'"model":', b'"model": '))

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


class Tail:
    """The end of what was relayed, in whole events and unparsed: `usage` is in it."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=_TAIL_CHUNKS)

    def note(self, events: bytes) -> None:
        self._chunks.append(events)

    def usage(self) -> EngineUsage | None:
        """A stream carries it only where it was asked for: `stream_options.include_usage`."""
        return last_event_usage(b"".join(self._chunks))


def without_usage(events: bytes) -> bytes:
    """Whole events without the one that has nothing but the usage: no choices (vLLM 0.32 serving.py, seen running)."""
    if _NO_CHOICES not in events:
        return events
    kept = [event for event in _EVENT.findall(events) if not (_NO_CHOICES in event and b'"usage":{' in event)]
    return b"".join(kept)


def error_event(body: Mapping[str, Any]) -> bytes:
    """The end of a stream that broke: OpenAI's error in an event, then the usual last line."""
    return b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n"


def last_event_usage(events: bytes) -> EngineUsage | None:
    """The usage in the last event that has one; vLLM may send one with each, but only the last says what was cached.

    The quotes of a "usage" in a JSON string would be escaped, and so would a line's end.
    """
    at = events.rfind(b'"usage"')
    line = events[events.rfind(b"\n", 0, max(at, 0)) + 1 :].split(b"\n", 1)[0]
    return usage_of(line.removeprefix(b"data:")) if line.startswith(b"data:") else None


def usage_of(body: bytes) -> EngineUsage | None:
    """The usage in a whole answer; None where there is none that we understand."""
    if b'"usage"' not in body:
        return None
    try:
        usage = _decode_usage(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # an engine with other shapes tells nothing
    if usage is None:
        return None
    prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    if prompt_tokens is None:
        return None
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return EngineUsage(
        prompt_tokens,
        usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens,
        details.cached_tokens if details else usage.cache_read_input_tokens,
    )


def has_first_event(got: bytes) -> bool:
    """Whether a whole `data:` event is in it; comments and other fields may come before."""
    start = _data_at(got)
    return start is not None and end_of_events(got) > start


def event_error(event: bytes) -> tuple[int, bytes] | None:
    """(status, body) when the first event is an error, as vLLM puts it in a stream that began with 200."""
    line = event[(_data_at(event) or 0) + len(b"data:") :].split(b"\n", 1)[0].strip()
    if not line.startswith((b'{"error"', b'{"object":"error"', b'{"type":"error"')):
        return None
    try:
        error = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return 500, line
    inner = error.get("error")
    code = (inner if isinstance(inner, dict) else error).get("code")
    return (code if isinstance(code, int) and 400 <= code < 600 else 500), line


def end_of_events(held: bytes) -> int:
    """How many of these bytes are complete events."""
    at, crlf_at = held.rfind(_END), held.rfind(_CRLF_END)
    return max(at + len(_END) if at >= 0 else 0, crlf_at + len(_CRLF_END) if crlf_at >= 0 else 0)


def _data_at(events: bytes) -> int | None:
    if events.startswith(b"data:"):
        return 0
    found = events.find(b"\ndata:")
    return None if found < 0 else found + 1
