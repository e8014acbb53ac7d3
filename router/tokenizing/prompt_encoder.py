"""Token ids of prompts by our own tokenizers: from caches, on the event loop while that is short, else in steps."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from jinja2 import TemplateError

from lorafleet.telemetry.fast_metrics import MetricValue
from lorafleet.tokenizer.chat import ChatTokenizer
from lorafleet.tokenizer.encoding import INLINE_CHARS, EncodingSteps, ThreadWork
from lorafleet.tokenizer.messages import Untokenizable
from lorafleet.tokenizer.template import StrftimeNow
from router.tokenizing.prompt_cache import PieceTokenCache
from router.tokenizing.threads import SliceTurns, TokenizerThreads, TooManyLongPrompts
from router.tokenizing.tokens import NO_TOKENS, SlowTokens, Tokens

log = structlog.get_logger()

# Longer prompts have their own threads, so that shorter ones do not wait for them.
_LONG_CHARS = 65_536
# Prose and code have fewer characters a token, so a longer prompt is too long for its engine. White space may have more
# (128 in Qwen 2.5's vocabulary), and then gets an approximate prompt.
_MAX_CHARS_PER_TOKEN = 16


_NO_IDS: "array[int]" = array("I")

# Errors for a prompt that our tokenizer cannot handle.
TOKENIZE_ERRORS = (Untokenizable, TemplateError, TypeError, ValueError, RecursionError)


class LoadedTokenizer(NamedTuple):
    """One of our tokenizers.

    pieces    its unique name in the piece cache
    strftime  the `strftime_now` of its engines' chat templates
    """

    number: int
    tokenizer: ChatTokenizer
    pieces: str
    strftime: StrftimeNow


class PromptEncoder:
    """Encodes prompts, with a cache of their pieces. Used by the event loop alone."""

    def __init__(self, cache_bytes: int, threads: int, counts: tuple[MetricValue, MetricValue] | None) -> None:
        """
        cache_bytes  size of the piece cache
        threads      for long prompts, and as many again for very long ones
        counts       counters of tokens from the piece cache, and of all others
        """
        self.cache = PieceTokenCache(cache_bytes)
        self._counts = counts
        self._long = TokenizerThreads(threads, "tokenize")
        self._very_long = TokenizerThreads(threads, "tokenize-long")
        self._turns = SliceTurns()

    def close(self) -> None:
        """Cancel waiting prompts and let the threads end."""
        self._long.close()
        self._very_long.close()

    def encode(
        self, local: LoadedTokenizer, body: Mapping[str, Any], remote: SlowTokens, max_model_len: int, owner: str = ""
    ) -> Tokens | SlowTokens:
        """Encode piece by piece, only pieces that are not cached; raises TOKENIZE_ERRORS.

        owner  whose requests alone find the pieces of this one; empty: everyone's

        NO_TOKENS for a text that is far too long for the model. A call is returned if it takes longer than a step;
        that call asks `remote` on errors, and returns NO_TOKENS if too many long prompts are being encoded.
        """
        pieces, special = local.tokenizer.prompt_pieces(body, local.strftime)
        cache_name = local.pieces + owner
        found: list[array[int]] = []
        missing, chars, last = [], 0, len(pieces) - 1
        for at, piece in enumerate(pieces):
            # The last piece grows with the next turn, so caching it is useless.
            ids = self.cache.get(cache_name, piece) if at < last else None
            if ids is None:
                missing.append(at)
                chars += len(piece)
                ids = _NO_IDS
            found.append(ids)
        if chars > INLINE_CHARS and 0 < max_model_len * _MAX_CHARS_PER_TOKEN < chars:
            return NO_TOKENS
        steps = local.tokenizer.encoding_steps([pieces[at] for at in missing], add_special_tokens=special)

        def assembled(encoded: "list[array[int]]") -> Tokens:
            return self._assemble(local, cache_name, pieces, found, missing, encoded)

        try:
            step = next(steps)
        except StopIteration as done:
            return assembled(done.value)
        threads = self._long if chars <= _LONG_CHARS else self._very_long

        async def finish() -> Tokens:
            try:
                return assembled(await self._take_steps(steps, step, threads))
            except TooManyLongPrompts:
                return NO_TOKENS  # asking the engine would load it with the longest prompts just then
            except TOKENIZE_ERRORS as exc:
                log.debug("not tokenized here", error=str(exc))
                return await remote()

        return finish

    async def _take_steps(
        self, steps: EncodingSteps, step: ThreadWork | None, threads: TokenizerThreads
    ) -> "list[array[int]]":
        """Take the steps from this one on, work in threads and the rest in turns on the event loop; the ids.

        Raises TooManyLongPrompts, and the errors of the encoding.
        """
        with threads.admit():
            try:
                while True:
                    encoded = None if step is None else await threads.run(step)
                    await self._turns.wait()
                    step = next(steps) if encoded is None else steps.send(encoded)
            except StopIteration as done:
                ids: list[array[int]] = done.value
                return ids

    def _assemble(
        self,
        local: LoadedTokenizer,
        cache_name: str,
        pieces: Sequence[str],
        ids_of_piece: "list[array[int]]",
        missing: Sequence[int],
        encoded: "Sequence[array[int]]",
    ) -> Tokens:
        """The tokens of a whole prompt. Caches new pieces, counts tokens, and completes `ids_of_piece`.

        missing  numbers of the pieces that the cache did not have; their ids are in `encoded`
        """
        last = len(pieces) - 1
        new = 0
        for at, ids in zip(missing, encoded, strict=True):
            ids_of_piece[at] = ids
            new += len(ids)
            if at < last:
                self.cache.put(cache_name, pieces[at], ids)
        whole = ids_of_piece[0] if not last else array("I", b"".join(ids_of_piece))
        if self._counts is not None:
            by_cache, by_tokenizer = self._counts
            by_tokenizer.inc(new)
            by_cache.inc(len(whole) - new)
        kept = len(whole) - len(ids_of_piece[last])
        seen = kept if missing[0] == last else sum([len(ids) for ids in ids_of_piece[: missing[0]]])
        return Tokens(whole, "local", seen, kept, local.number)
