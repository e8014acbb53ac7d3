"""Learns what an engine's step without prefill takes: a time of its own, and more for each sequence and its context.

    step = token_s + sequence_s * sequences + context_token_s * tokens of context

Each observation is a second in which no prompt was computed. Three unknowns from a few seconds of alike batches would
be noise. So the fit leans on what arithmetic says of their proportions, until batches of different sizes were seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Shares of `token_s`. An 8B model on one 80 GB GPU reads 16 GB of weights a step and 128 KB of KV for each token of
# context, with 3 ms of overhead: 8 ms a step, 43 ns a token of context. A sequence's own 0.1 ms is a guess.
SEQUENCE_SHARE = 0.0125
CONTEXT_TOKEN_SHARE = 5.4e-6
# A second far above the fastest quarter of them hides a long prefill that has not been counted yet.
_FASTEST = 0.25
_MOST_ABOVE = 1.3
# By how much a second's mean is off, and how far the proportions may be from the arithmetic's.
_NOISE = 0.05
_DOUBT = (0.5, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class CalmSecond:
    """The mean step of a second without prefill, its sequences and their tokens of context."""

    step_s: float
    sequences: float
    context_tokens: float

    @property
    def scale_s(self) -> float:
        """The `token_s` with which the usual proportions give this step."""
        return self.step_s / (1 + SEQUENCE_SHARE * self.sequences + CONTEXT_TOKEN_SHARE * self.context_tokens)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step without prefill: `token_s`, and what each sequence and each token of context add; 0.0 until measured."""

    token_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0

    @classmethod
    def usual(cls, step_s: float) -> "DecodeStep":
        """The step of usual proportions that takes so long for one sequence with little context."""
        token_s = step_s / (1 + SEQUENCE_SHARE)
        return cls(token_s, token_s * SEQUENCE_SHARE, token_s * CONTEXT_TOKEN_SHARE)

    def seconds(self, sequences: float, context_tokens: float) -> float:
        """One step of so many sequences with so much context in all."""
        return self.token_s + self.sequence_s * sequences + self.context_token_s * context_tokens


def fit_decode_step(seen: Sequence[CalmSecond]) -> DecodeStep:
    """The step that explains these seconds best; never below zero, and right for their mean.

    seen  at least one
    """
    scales = sorted(second.scale_s for second in seen)
    usual_s = scales[int(_FASTEST * (len(scales) - 1))]
    used = [second for second in seen if second.scale_s <= _MOST_ABOVE * usual_s]
    # In units of what is expected of each: the prior is (1, 1, 1).
    rows = [
        (1.0, SEQUENCE_SHARE * second.sequences, CONTEXT_TOKEN_SHARE * second.context_tokens, second.step_s / usual_s)
        for second in used
    ]
    table = [[1 / _DOUBT[i] ** 2 * (i == j) for j in range(3)] + [1 / _DOUBT[i] ** 2] for i in range(3)]
    for row in rows:
        weight = 1 / (_NOISE * row[3]) ** 2
        for i in range(3):
            for j in range(4):
                table[i][j] += weight * row[i] * row[j]
    found = [max(0.0, value) for value in _solve(table)]
    expected = sum(sum(value * part for value, part in zip(found, row[:3], strict=True)) for row in rows)
    right = usual_s * sum(row[3] for row in rows) / expected if expected > 0 else usual_s
    return DecodeStep(right * found[0], right * found[1] * SEQUENCE_SHARE, right * found[2] * CONTEXT_TOKEN_SHARE)


def _solve(table: list[list[float]]) -> list[float]:
    """The solution of a positive definite system, its right side the last column, by elimination."""
    size = len(table)
    for i in range(size):
        for j in range(i + 1, size):
            factor = table[j][i] / table[i][i]
            table[j] = [a - factor * b for a, b in zip(table[j], table[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (table[i][size] - sum(table[i][j] * found[j] for j in range(i + 1, size))) / table[i][i]
    return found
