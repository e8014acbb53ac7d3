"""What an engine says an answer took, wherever each kind of answer has it."""

import re
from collections.abc import Callable, Mapping, MutableMapping

import msgspec

from router.protocols.routes import UsageKind


class EngineUsage(msgspec.Struct, frozen=True):
    """None is what the engine did not say, which is not 0.

    prompt_tokens  of all prompts of the request; `cached_tokens` is of one of them alone (vLLM 0.32 serving.py of
                   chat_completion and completion), so the two belong together only where there is one prompt
    """

    prompt_tokens: int
    completion_tokens: int | None
    cached_tokens: int | None


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OpenAIUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _ResponsesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = None
    input_tokens_details: _TokenDetails | None = None


class _MessagesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _OpenAIAnswer(msgspec.Struct):
    usage: _OpenAIUsage | None = None


class _ResponseObject(msgspec.Struct):
    usage: _ResponsesUsage | None = None


class _ResponsesAnswer(msgspec.Struct):
    """The whole answer has it on top, a stream's last event one level down."""

    usage: _ResponsesUsage | None = None
    response: _ResponseObject | None = None


class _MessagesAnswer(msgspec.Struct):
    usage: _MessagesUsage | None = None


_openai = msgspec.json.Decoder(_OpenAIAnswer).decode
_responses = msgspec.json.Decoder(_ResponsesAnswer).decode
_messages = msgspec.json.Decoder(_MessagesAnswer).decode


def usage_of(kind: UsageKind, body: bytes) -> EngineUsage | None:
    """The usage in a whole answer, or in the data of one event; None where there is none, or in another shape."""
    # From the end, which is where engines write it.
    if kind == "none" or body.rfind(b'"usage"') < 0:
        return None
    try:
        return _READERS[kind](body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # an engine with other shapes tells nothing


def usage_of_events(kind: UsageKind, events: bytes) -> EngineUsage | None:
    """The usage in the last of these whole events that has one; vLLM may send one with each, but only the last says
    what was cached.

    The quotes of a "usage" in a JSON string would be escaped, and so would a line's end.
    """
    at = events.rfind(b'"usage"')
    line = events[events.rfind(b"\n", 0, max(at, 0)) + 1 :].split(b"\n", 1)[0]
    return usage_of(kind, line.removeprefix(b"data:")) if line.startswith(b"data:") else None


# Inside a JSON string the quotes would be escaped.
_NO_CHOICES, _USAGE, _FINISHED = b'"choices":[]', b'"usage":{', b'"finish_reason":"'
_SIGNATURE = re.compile(rb'"system_fingerprint":"[^"\\]*"')
_EVENT = re.compile(rb".+?(?:\r?\n\r?\n|$)", re.DOTALL)


class UsageFilter:
    """A stream without the usage that the router asked for and the client did not, otherwise as if nobody had asked.

    vLLM 0.32 signs a stream with its `system_fingerprint`: on the usage event where there is one, else on the event
    that ends each choice (openai/*/serving.py). So what comes last of a choice is signed with what the engine signed
    with before, or waits for the usage right behind it. Only the first stream of several choices from an engine that
    nothing is known of may lack it on those that end early.
    """

    __slots__ = ("_engine", "_held", "_known")

    def __init__(self, known: MutableMapping[str, bytes], engine: str) -> None:
        """
        known   engine -> what it signs with; shared by all streams, and kept up to date here
        engine  this one's name in it
        """
        self._known = known
        self._engine = engine
        self._held = b""

    def events(self, events: bytes) -> bytes:
        """Whole events of the engine's -> those for the client; some wait for the next."""
        at = _first_of_note(events)
        if at == len(events) and not self._held:
            return events
        shown: list[bytes] = []
        if at:
            shown += self.end(), events[:at]
        for event in _EVENT.findall(events, at):
            if _NO_CHOICES in event and _USAGE in event:
                found = _SIGNATURE.search(event)
                if found:
                    self._known[self._engine] = found.group()
                shown.append(self._signed_held())
            elif _FINISHED in event and self._engine not in self._known:
                self._held += event
            else:
                shown.append(self.end())
                shown.append(self._signed(event) if _FINISHED in event else event)
        return b"".join(shown)

    def end(self) -> bytes:
        """What still waits when the stream is over."""
        held, self._held = self._held, b""
        return held

    def _signed_held(self) -> bytes:
        return b"".join(map(self._signed, _EVENT.findall(self.end())))

    def _signed(self, event: bytes) -> bytes:
        signature = self._known.get(self._engine)
        cut = event.rfind(b"}")
        if signature is None or cut < 0:
            return event
        return event[:cut] + b"," + signature + event[cut:]


def _first_of_note(events: bytes) -> int:
    """Where the first event begins that ends a choice or has no choices; the end of all where there is none.

    A read may bring hundreds of events, and taking each apart would cost more than all else that is done with them.
    """
    finished, bare = events.find(_FINISHED), events.find(_NO_CHOICES)
    at = min(finished, bare) if finished >= 0 and bare >= 0 else max(finished, bare)
    if at < 0:
        return len(events)
    lf, crlf = events.rfind(b"\n\n", 0, at), events.rfind(b"\n\r\n", 0, at)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def _read_openai(body: bytes) -> EngineUsage | None:
    usage = _openai(body).usage
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return EngineUsage(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details else None)


def _read_responses(body: bytes) -> EngineUsage | None:
    answer = _responses(body)
    usage = answer.usage or (answer.response.usage if answer.response else None)
    if usage is None:
        return None
    details = usage.input_tokens_details
    return EngineUsage(usage.input_tokens, usage.output_tokens, details.cached_tokens if details else None)


def _read_messages(body: bytes) -> EngineUsage | None:
    """Anthropic's input is what was neither read from a cache nor written to one; the prompt is all three."""
    usage = _messages(body).usage
    if usage is None:
        return None
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return EngineUsage(prompt, usage.output_tokens, usage.cache_read_input_tokens)


_READERS: Mapping[UsageKind, Callable[[bytes], EngineUsage | None]] = {
    "openai": _read_openai,
    "responses": _read_responses,
    "messages": _read_messages,
}
