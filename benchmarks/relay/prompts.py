"""What is asked: requests as bytes, each with text of its own, so that nobody answers or tokenizes from memory."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import count, takewhile

from benchmarks import texts
from benchmarks.scenes import BLOCK_SIZE
from lorafleet.local.tiny_model import MODEL_NAME
from lorafleet.tokenizer.chat import ChatTokenizer

BASE = MODEL_NAME
PACE_PER_S = 20
"""Chunks a second of a paced stream."""

# Stands where each request has a number of its own, of as many digits.
_MARK = "@@@@@@@@@@"
_TURN_CHARS = 2000
# One row of them for the whole run: what one round asked, a router still has in its caches in the next.
_numbers = count(10**9)
# The fields that tell a stub engine what to do are OpenAI's own, so that every router lets them pass: `max_tokens` is
# the number of chunks, `seed` 1 asks for pace, `user` holds what its usage is to say.


@dataclass(frozen=True, slots=True)
class ChatKind:
    """A kind of chat request.

    chunks      of a streamed answer; 0: not streamed
    """

    name: str
    messages: tuple[tuple[str, str], ...]
    chunks: int = 0
    is_paced: bool = False

    def body(self, model: str, usage: str = "0/1") -> str:
        """JSON, with marks where a number belongs."""
        fields: dict[str, object] = {"model": model, "user": f"cached={usage};"}
        if self.chunks:
            fields |= {"stream": True, "max_tokens": self.chunks, "seed": int(self.is_paced)}
        fields |= {"temperature": 0.7, "messages": [{"role": role, "content": text} for role, text in self.messages]}
        # As the clients of OpenAI's package send it: text as it is, without escapes.
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)

    def numbered(self, model: str, number: int) -> str:
        """The JSON of one request."""
        return self.body(model).replace(_MARK, str(number))


@cache
def _corpus() -> str:
    return resources.files("lorafleet.local").joinpath("tiny_corpus.txt").read_text(encoding="utf-8")


def _turns(chars: int, *, numbered: bool) -> tuple[tuple[str, str], ...]:
    mark = f"{_MARK} " if numbered else ""
    starts = range(0, chars, _TURN_CHARS)
    return _conversation([mark + _corpus()[1000 + start :][: min(_TURN_CHARS, chars - start)] for start in starts])


def short(chunks: int = 0, *, is_paced: bool = False) -> ChatKind:
    """About 1 KB: the system prompt that all have, and a new question of 180 characters."""
    messages = (("system", _corpus()[2000:2600]), ("user", f"{_MARK} {_corpus()[3000:3180]}"))
    return ChatKind("short", messages, chunks, is_paced)


def short_new() -> ChatKind:
    """About 1 KB, all of it new."""
    return ChatKind("short, new", (("user", f"{_MARK} {_corpus()[3000:3780]}"),))


def long_seen() -> ChatKind:
    """32 KB: a conversation that the engines have cached, and a new question of 600 bytes."""
    return ChatKind("32 KB, seen", (*_turns(31_000, numbered=False), ("user", f"{_MARK} {_corpus()[5000:5600]}")))


def long_new() -> ChatKind:
    """32 KB of which nothing was seen before."""
    return ChatKind("32 KB, new", (*_turns(31_000, numbered=True), ("user", f"{_MARK} {_corpus()[5000:5600]}")))


def of_length(kilobytes: int, *, is_new: bool) -> ChatKind:
    """English of so many thousand characters: all of it new, or a conversation that was seen and a new question."""
    mark = f"{_MARK} " if is_new else ""
    said = texts.turns(texts.english(kilobytes * 1000 - 600), _TURN_CHARS, mark)
    messages = (*_conversation(said), ("user", f"{_MARK} {_corpus()[5000:5600]}"))
    return ChatKind(f"{kilobytes} KB, {'new' if is_new else 'seen'}, English", messages)


def of_script(script: str, chars: int) -> ChatKind:
    """So many characters of one of `texts.SCRIPTS`, all of it new, in one message: a document."""
    messages = (("system", _corpus()[2000:2600]), ("user", f"{_MARK} {texts.SCRIPTS[script](chars)}"))
    return ChatKind(f"{chars} characters of {script}", messages)


def _conversation(said: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(role, text) of each turn."""
    return tuple(zip(["system"] + ["user", "assistant"] * len(said), said, strict=False))


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """How an engine counts a prompt: all of its tokens, and those that every request of its kind begins with."""

    shared: "array[int]"
    tokens: int

    @property
    def cached_tokens(self) -> int:
        """What an engine has that keeps the shared beginning, and nothing else: whole blocks."""
        return len(self.shared) // BLOCK_SIZE * BLOCK_SIZE


def shape(ask: ChatKind, tokenizer: ChatTokenizer) -> CountedPrompt:
    """Of two requests of this kind that share nothing but what all share."""
    one, other = (tokenizer.chat_ids(json.loads(ask.numbered(BASE, number))) for number in (10**9, 7 * 10**9 + 7))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return CountedPrompt(array("I", [token for token, _ in shared]), len(one))


class Requests:
    """Whole HTTP requests of one kind, for a router at `port`; the models take turns."""

    def __init__(self, ask: ChatKind, models: tuple[str, ...], port: int, of: CountedPrompt) -> None:
        self.ask = ask
        usage = f"{of.cached_tokens}/{of.tokens}"
        self._made = [self._parts(ask.body(model, usage), port) for model in models]

    def next(self) -> bytes:
        """One that was never asked before."""
        number = next(_numbers)
        return str(number).encode().join(self._made[number % len(self._made)])

    @staticmethod
    def _parts(body: str, port: int) -> list[bytes]:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\n"
            f"Host: 127.0.0.1:{port}\r\n"
            "Accept: application/json\r\n"
            "Content-Type: application/json\r\n"
            "User-Agent: benchmarks.relay\r\n"
            f"Content-Length: {len(body.encode())}\r\n\r\n"
        )
        return (head + body).encode().split(_MARK.encode())
