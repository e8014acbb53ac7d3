"""Encoding of texts in steps that an event loop can take one at a time.

A step is short, or is work for a thread: the tokenizer library releases Python's lock, looking words up does not.
"""

from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from lorafleet.tokenizer.word_cache import SLICE_CHARS, Encode, WordCache

# Characters looked up in one step, about half a millisecond; and characters that the library encodes in one step, a
# millisecond; more are work for a thread. A text alone costs the library as much as some characters of a longer one.
STEP_CHARS = SLICE_CHARS
INLINE_CHARS = 4_096
_TEXT_COST_CHARS = 16


class ThreadWork(NamedTuple):
    """Encoding that takes long: `run` may be called in any thread, and its result is sent to the generator."""

    chars: int
    run: Callable[[], list[bytes]]


EncodingSteps = Generator[ThreadWork | None, list[bytes], "list[array[int]]"]
"""Yields None where other work may have a turn, and ThreadWork whose result it needs. Returns each text's ids."""


class SpecialFrame(NamedTuple):
    """The ids that a post-processor puts before and after every text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def from_post_processor(
        cls, post_processor: Mapping[str, Any] | None, tokenizer: Tokenizer
    ) -> "SpecialFrame | None":
        """The frame of a tokenizer's post-processor; None if it does more, or not the same to every text."""
        match post_processor:
            case {"type": "Sequence", "processors": [{"type": "ByteLevel"}, dict(template)]}:
                pass
            case template:
                pass
        match template:
            case {"type": "TemplateProcessing", "single": list(parts), "special_tokens": dict(tokens)}:
                names = [part.get("SpecialToken", {}).get("id") for part in parts]
            case _:
                return None
        if names.count(None) != 1 or any(name is not None and name not in tokens for name in names):
            return None
        at = names.index(None)
        before, after = (
            tuple([id_ for name in some for id_ in tokens[name]["ids"]]) for some in (names[:at], names[at + 1 :])
        )
        plain, framed = (tokenizer.encode("a b", add_special_tokens=special).ids for special in (False, True))
        return cls(before, after) if framed == [*before, *plain, *after] else None


def steps_through_cache(
    texts: Sequence[str],
    cache: WordCache,
    encode: Encode,
    frame: SpecialFrame = SpecialFrame(),  # noqa: B008  (frozen)
) -> EncodingSteps:
    """Encode texts slice by slice; what is not cached is encoded and cached. The frame's ids go around each text.

    encode  called in threads, too. Its errors are raised
    """
    found = []
    looked_up = inline = 0
    for text in texts:
        ids = array("I", frame.before)
        for stretches in cache.slices(text):
            lookup = cache.look_up(stretches)
            looked_up += lookup.chars
            unknown = lookup.to_encode
            encoded: list[bytes] = []
            if unknown:
                work = partial(cache.encode_apart, unknown, encode)
                chars = sum(map(len, unknown))
                inline += chars + len(unknown) * _TEXT_COST_CHARS
                if inline <= INLINE_CHARS:
                    encoded = work()
                else:
                    encoded = yield ThreadWork(chars, work)
                    looked_up = STEP_CHARS  # many words to learn are a step of their own
                cache.learn(unknown, encoded)
            ids.frombytes(lookup.ids(unknown, encoded))
            if looked_up >= STEP_CHARS:
                yield None
                looked_up = inline = 0
        ids.extend(frame.after)
        found.append(ids)
    return found


def steps_through_library(texts: Sequence[str], encode: Encode) -> EncodingSteps:
    """Encode texts by the library alone: in one step, or one piece of work if they are long."""

    def work() -> list[bytes]:
        return [array("I", encode(text)).tobytes() for text in texts]

    chars = sum(map(len, texts))
    encoded = work() if chars <= INLINE_CHARS else (yield ThreadWork(chars, work))
    return [array("I", ids) for ids in encoded]


def run_steps(steps: EncodingSteps) -> "list[array[int]]":
    """Run all steps in this thread; the ids of each text. Raises what the encoding raises."""
    try:
        step = next(steps)
        while True:
            step = steps.send(step.run()) if step is not None else next(steps)
    except StopIteration as done:
        ids: list[array[int]] = done.value
        return ids
