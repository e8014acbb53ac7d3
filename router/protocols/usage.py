"""The usage that an engine reports in an answer or stream, in each API's form."""

import re
from collections.abc import Callable, Mapping, MutableMapping

import msgspec

from lorafleet.service.decoding import DECODE_ERRORS
from router.protocols.routes import UsageKind


class EngineUsage(msgspec.Struct, frozen=True):
    """Token counts that an engine reports. None means not reported, which is not 0.

    prompt_tokens  of all prompts of the request
    cached_tokens  of one prompt alone (vLLM 0.32 serving.py of chat_completion and completion), so the two can be
                   compared only for a request with one prompt
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
    """A whole answer has its usage at the top, a stream's last event one level down."""

    usage: _ResponsesUsage | None = None
    response: _ResponseObject | None = None


class _MessagesAnswer(msgspec.Struct):
    usage: _MessagesUsage | None = None


class _SglangMeta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class _SglangAnswer(msgspec.Struct):
    meta_info: _SglangMeta


_openai = msgspec.json.Decoder(_OpenAIAnswer).decode
_responses = msgspec.json.Decoder(_ResponsesAnswer).decode
_messages = msgspec.json.Decoder(_MessagesAnswer).decode

_sglang = msgspec.json.Decoder(_SglangAnswer | list[_SglangAnswer]).decode


# The field that has an answer's usage.
_USAGE_MARK, _SGLANG_MARK = b'"usage"', b'"meta_info"'


def usage_of(kind: UsageKind, body: bytes) -> EngineUsage | None:
    """The usage in a whole answer or in the data of one event; None if there is none or its form is unknown."""
    # Searched from the end, where engines write it.
    if kind == "none" or body.rfind(_SGLANG_MARK if kind == "sglang" else _USAGE_MARK) < 0:
        return None
    try:
        return _READERS[kind](body)
    except DECODE_ERRORS:
        return None  # an unknown form


def usage_of_events(kind: UsageKind, whole_events: bytes) -> EngineUsage | None:
    """The usage in the last of these events that has one; None if none has.

    vLLM may send a usage with every event, but only the last one has the cached tokens. Inside a JSON string the quotes
    of "usage" would be escaped, so a plain search finds the field.
    """
    at = whole_events.rfind(_SGLANG_MARK if kind == "sglang" else _USAGE_MARK)
    line = whole_events[whole_events.rfind(b"\n", 0, max(at, 0)) + 1 :].split(b"\n", 1)[0]
    return usage_of(kind, line.removeprefix(b"data:")) if line.startswith(b"data:") else None


# Inside a JSON string the quotes would be escaped.
_NO_CHOICES, _USAGE, _FINISHED = b'"choices":[]', b'"usage":{', b'"finish_reason":"'
_FINGERPRINT = re.compile(rb'"system_fingerprint":"[^"\\]*"')
_EVENT = re.compile(rb".+?(?:\r?\n\r?\n|$)", re.DOTALL)


class UsageFilter:
    """Removes from a stream the usage that the router requested and the client did not.

    vLLM 0.32 puts its `system_fingerprint` on the usage event if there is one, else on the event that ends each choice
    (openai/*/serving.py). So the filter adds the engine's last known fingerprint to the event that ends a choice. Until
    one is known, that event waits for the usage event. In the first stream of several choices from an unknown engine,
    choices that end early may lack it.

    pending  events that wait
    """

    __slots__ = ("_engine", "_fingerprints", "pending")

    def __init__(self, fingerprints: MutableMapping[str, bytes] | None, engine: str) -> None:
        """
        fingerprints  engine -> its fingerprint; shared by all streams and updated here; None: these streams have none
        engine        this stream's engine
        """
        self._fingerprints = fingerprints
        self._engine = engine
        self.pending = b""

    def events(self, events: bytes) -> bytes:
        """The client's events for whole events of the engine; some wait for the next call.

        Keeps the engine's fingerprint.
        """
        at = _first_final_event(events)
        if at == len(events) and not self.pending:
            return events
        kept: list[bytes] = []
        if at:
            kept += self.end(), events[:at]
        for event in _EVENT.findall(events, at):
            if _NO_CHOICES in event and _USAGE in event:
                found = _FINGERPRINT.search(event)
                if found and self._fingerprints is not None:
                    self._fingerprints[self._engine] = found.group()
                kept.append(self._release_with_fingerprint())
            elif _FINISHED in event and self._fingerprints is not None and self._engine not in self._fingerprints:
                self.pending += event
            else:
                kept.append(self.end())
                kept.append(self._with_fingerprint(event) if _FINISHED in event else event)
        return b"".join(kept)

    def end(self) -> bytes:
        """Take the events that still wait: the stream has ended, or other events follow."""
        pending, self.pending = self.pending, b""
        return pending

    def _release_with_fingerprint(self) -> bytes:
        """Take the events that wait, each with the engine's fingerprint."""
        return b"".join(map(self._with_fingerprint, _EVENT.findall(self.end())))

    def _with_fingerprint(self, event: bytes) -> bytes:
        """An event with the engine's fingerprint, if that is known."""
        fingerprint = None if self._fingerprints is None else self._fingerprints.get(self._engine)
        cut = event.rfind(b"}")
        if fingerprint is None or cut < 0:
            return event
        return event[:cut] + b"," + fingerprint + event[cut:]


def _first_final_event(events: bytes) -> int:
    """The offset of the first event that ends a choice or has no choices; the length if there is none.

    One read may bring hundreds of events, and splitting them all would cost more than the rest of the relay.
    """
    finished, bare = events.find(_FINISHED), events.find(_NO_CHOICES)
    at = min(finished, bare) if finished >= 0 and bare >= 0 else max(finished, bare)
    if at < 0:
        return len(events)
    lf, crlf = events.rfind(b"\n\n", 0, at), events.rfind(b"\n\r\n", 0, at)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def _read_openai(body: bytes) -> EngineUsage | None:
    """The usage in a body of chats, completions or embeddings. None: it has none."""
    usage = _openai(body).usage
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return EngineUsage(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details else None)


def _read_responses(body: bytes) -> EngineUsage | None:
    """The usage in a response, or in the last event of its stream. None: it has none."""
    answer = _responses(body)
    usage = answer.usage or (answer.response.usage if answer.response else None)
    if usage is None:
        return None
    details = usage.input_tokens_details
    return EngineUsage(usage.input_tokens, usage.output_tokens, details.cached_tokens if details else None)


def _read_messages(body: bytes) -> EngineUsage | None:
    """The usage in an answer of messages, or in its stream's last event with one; None without.

    Anthropic's input_tokens leaves out tokens read from and written to the cache; the prompt is the sum of all.
    """
    usage = _messages(body).usage
    if usage is None:
        return None
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return EngineUsage(prompt, usage.output_tokens, usage.cache_read_input_tokens)


def _read_sglang(body: bytes) -> EngineUsage | None:
    """The usage in SGLang's own answer; of several texts to one prompt, their sum. None: it has none."""
    answers = _sglang(body)
    found = [answer.meta_info for answer in (answers if isinstance(answers, list) else [answers])]
    if not found:
        return None
    return EngineUsage(found[0].prompt_tokens, sum(one.completion_tokens for one in found), found[0].cached_tokens)


_READERS: Mapping[UsageKind, Callable[[bytes], EngineUsage | None]] = {
    "openai": _read_openai,
    "responses": _read_responses,
    "messages": _read_messages,
    "sglang": _read_sglang,
}
