"""Answer texts: words of the model's vocabulary, chosen pseudo-randomly from adapter and prompt."""

import hashlib
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from lorafleet.sim.timing import FinishReason
from lorafleet.tokenizer.chat import ChatTokenizer

WORD = re.compile(r" [a-z]{2,}")


@dataclass(frozen=True, slots=True)
class SimReply:
    """A complete answer, generated before its first token is sent."""

    token_ids: list[int]
    pieces: list[str]
    """The text each token adds."""
    finish_reason: FinishReason
    stop_reason: str | None


class TextGenerator:
    """Generates the answers of one model; equal prompts get equal answers."""

    def __init__(self, tokenizer: ChatTokenizer, *, vocabulary: int, eos: int, seed: int, natural_tokens: int) -> None:
        """`natural_tokens`: answers end with the end token `eos` at this length; 0: never.

        Raises ValueError for a tokenizer without plain words.
        """
        self.eos = eos
        self.seed = seed
        self.natural_tokens = natural_tokens
        texts = {token: tokenizer.decode([token]) for token in range(min(vocabulary, 20_000))}
        self.texts = {token: text for token, text in texts.items() if WORD.fullmatch(text)}
        if not self.texts:
            raise ValueError("the model's tokenizer has no token that is a plain word: no text can be made with it")
        self.choices = list(self.texts)

    def reply(
        self,
        digest: bytes,
        prompt: Sequence[int],
        *,
        choice: int,
        max_tokens: int,
        ignore_eos: bool,
        stops: Sequence[str],
    ) -> SimReply:
        """Generate an answer of up to `max_tokens` tokens, cut at the first of `stops`; equal arguments, equal answers.

        digest  the adapter's; b"" for the base model
        choice  number of the answer among those to one prompt
        """
        ends_itself = 0 < self.natural_tokens <= max_tokens and not ignore_eos
        length = self.natural_tokens if ends_itself else max_tokens
        seed = hashlib.sha256(b"%d %d " % (self.seed, choice) + digest + array("q", prompt).tobytes()).digest()
        ids = Random(seed).choices(self.choices, k=length)  # a longer answer begins like the shorter one
        pieces = [self.texts[token] for token in ids]
        if ends_itself:
            ids[-1], pieces[-1] = self.eos, ""
        return _cut_at_stop(
            SimReply(ids, pieces, FinishReason.STOP if ends_itself else FinishReason.LENGTH, None), stops
        )


def top_logprobs(digest: bytes, prompt: Sequence[int], tokens: Sequence[int], count: int) -> list[dict[int, float]]:
    """Pseudo-random log-probabilities of the `count` likeliest tokens at each place of an answer, best first.

    Equal arguments, equal numbers; another digest, other numbers. The answer's own token is the likeliest.
    """
    places = []
    for place, token in enumerate(tokens):
        seed = b"%d " % place + digest + array("q", [*prompt, *tokens[:place]]).tobytes()
        rng = Random(hashlib.sha256(seed).digest())
        values = sorted((-5 * rng.random() - 0.01 for _ in range(max(1, count))), reverse=True)
        others = (other for other in range(count + 1) if other != token)
        places.append(dict(zip((token, *others), values, strict=False)))
    return places


def prompt_logprobs(digest: bytes, prompt: Sequence[int]) -> list[float]:
    """Pseudo-random log-probabilities of a prompt's tokens but the first, by the tokens before each."""
    places = (top_logprobs(digest, prompt[:at], prompt[at : at + 1], 1)[0][prompt[at]] for at in range(1, len(prompt)))
    return list(places)


def _cut_at_stop(reply: SimReply, stops: Sequence[str]) -> SimReply:
    """`reply` cut at the first stop string, whose tokens stay but whose text does not."""
    text = "".join(reply.pieces)
    first_stop = min(((text.index(stop), stop) for stop in stops if stop in text), default=None)
    if first_stop is None:
        return reply
    start, stop = first_stop
    pieces: list[str] = []
    length = 0
    for piece in reply.pieces:
        pieces.append(piece[: max(0, start - length)])
        length += len(piece)
        if length >= start + len(stop):
            break
    return SimReply(reply.token_ids[: len(pieces)], pieces, FinishReason.STOP, stop)
