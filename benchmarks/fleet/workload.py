"""A trace's sessions as chat requests, an eighth as long, for sim engines an eighth as fast.

One token stands for `SCALE` tokens of the trace, so times are those of engines with real speeds, and two cores drive
them.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from benchmarks.relay.prompts import BASE
from benchmarks.texts import english_words
from benchmarks.trace.engine import Hardware
from benchmarks.trace.workload import BLOCK, TICK_S, TraceLine, session_of
from lorafleet.tokenizer.chat import ChatTokenizer

SCALE = 8
_BLOCK_TOKENS = BLOCK // SCALE
_KV_BLOCK = 16


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One chat request. Tokens are those of the trace; `at_s` counts from the beginning."""

    at_s: float
    body: bytes
    prompt_tokens: int
    output_tokens: int


def engine_flags(hardware: Hardware) -> tuple[str, ...]:
    """A sim's flags for an engine of this hardware, every token of which stands for `SCALE` tokens."""
    flags = {
        "--num-gpu-blocks-override": hardware.blocks * hardware.block_size // SCALE // _KV_BLOCK,
        "--block-size": _KV_BLOCK,
        "--max-num-seqs": hardware.max_num_seqs,
        "--max-num-batched-tokens": hardware.max_num_batched_tokens // SCALE,
        "--max-model-len": 2**15,
        "--sim-prefill-tokens-per-s": f"{1 / hardware.prefill_s / SCALE:.6g}",
        "--sim-decode-tokens-per-s": f"{1 / hardware.decode_s / SCALE:.6g}",
    }
    return tuple(str(word) for pair in flags.items() for word in pair)


def thinned(lines: Sequence[TraceLine], count: int, seed: int) -> list[TraceLine]:
    """About so many lines: whole sessions, drawn evenly. All lines where there are no more."""
    sizes = Counter(map(session_of, lines))
    sessions = list(sizes)
    Random(seed).shuffle(sessions)
    kept: set[int] = set()
    for session in sessions:
        if sum(sizes[each] for each in kept) >= count:
            break
        kept.add(session)
    return [line for line in lines if session_of(line) in kept]


def chats(lines: Sequence[TraceLine], rate: float, tokenizer: ChatTokenizer, seed: int) -> list[FleetRequest]:
    """The lines as chats in order of arrival, `rate` a second on average, jittered within the trace's ticks."""
    rng, writer = Random(seed), PromptWriter(tokenizer)
    times = sorted((line.at_s + rng.random() * TICK_S, number) for number, line in enumerate(lines))
    began_s, lasts_s = times[0][0], max(times[-1][0] - times[0][0], TICK_S)
    pace = len(lines) / rate / lasts_s
    return [
        FleetRequest(
            at_s=(at_s - began_s) * pace,
            body=_body(writer.text(lines[number]), max(1, lines[number].output_tokens // SCALE)),
            prompt_tokens=lines[number].prompt_tokens,
            output_tokens=lines[number].output_tokens,
        )
        for at_s, number in times
    ]


def _body(text: str, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"model": BASE, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return json.dumps(body).encode()


class PromptWriter:
    """Writes a prompt whose shared blocks have the same words, `_BLOCK_TOKENS` tokens each."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._lengths = {
            word: len(tokenizer.encode(f" {word}", add_special_tokens=False)) for word in sorted({*english_words()})
        }
        self._block_words = cache(self._new_block)

    def text(self, line: TraceLine) -> str:
        """The prompt's text; the last block may be partial, and begins as the whole one."""
        tokens = max(1, line.prompt_tokens // SCALE)
        blocks = -(-tokens // _BLOCK_TOKENS)
        words = [word for block in line.ids[: blocks - 1] for word in self._block_words(block)]
        last = self._block_words(line.ids[blocks - 1])
        return " ".join([*words, *self._first(last, tokens - (blocks - 1) * _BLOCK_TOKENS)])

    def _new_block(self, block: int) -> tuple[str, ...]:
        rng, words = Random(block), list(self._lengths)
        return tuple(self._first((rng.choice(words) for _ in range(_BLOCK_TOKENS)), _BLOCK_TOKENS))

    def _first(self, words: Iterable[str], tokens: int) -> Iterable[str]:
        for word in words:
            if tokens <= 0:
                return
            tokens -= self._lengths[word]
            yield word
