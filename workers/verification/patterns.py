"""Matching of the expressions in an adapter's config with its modules, with an end for those that take too long.

vLLM matches `rank_pattern` and `alpha_pattern` with the package `regex`, between two steps and without an end. So the
same package is used here, and an expression that takes long is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import regex

_MATCHING_S = 2.0
"""CPU seconds for all expressions of an adapter with all its modules; a usual one takes milliseconds."""
_PLAIN = re.compile(r"[\w.\-]+")
MOST_CHARACTERS = 1000


class SlowExpressionError(ValueError):
    """The expressions of a config take too long on the adapter's own modules."""


@dataclass(slots=True)
class MatchTime:
    """CPU time that is left for the expressions of one adapter. `clock` is a thread's CPU time in seconds."""

    clock: Callable[[], float]
    left_s: float = _MATCHING_S

    def fullmatch(self, expression: "regex.Pattern[str]", text: str) -> bool:
        """Whether the expression matches the whole text. Counts its time; raises SlowExpressionError at the end."""
        began_s = self.clock()
        try:
            matched = expression.fullmatch(text, timeout=max(self.left_s, 0.001)) is not None
        except TimeoutError as exc:
            self.left_s = 0.0
            raise SlowExpressionError(f"{text}: not decided in {_MATCHING_S:g} s") from exc
        self.left_s -= self.clock() - began_s
        if self.left_s <= 0:
            raise SlowExpressionError(f"{text}: not decided in {_MATCHING_S:g} s")
        return matched


@dataclass(frozen=True, slots=True)
class NameEnd:
    """An expression for a module's name, or for its end after a dot, as PEFT matches it.

    source   vLLM 0.32 lora/peft_helper.py _match_pattern: `(.*\\.)?(expression)$`
    """

    text: str
    expression: "regex.Pattern[str] | None" = field(default=None, compare=False)

    def matches(self, name: str, time: MatchTime) -> bool:
        """Whether it matches a module's name. Raises SlowExpressionError."""
        if self.expression is not None:
            return time.fullmatch(self.expression, name)
        start = len(name) - len(self.text)
        if start < 0 or (start > 0 and name[start - 1] != "."):
            return False
        # A dot of an expression stands for any character.
        return all(want in (found, ".") for want, found in zip(self.text, name[start:], strict=True))


def name_end(text: str) -> NameEnd:
    """The expression of a text. Raises ValueError if it is none, or too long; names are not compiled."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters, at most {MOST_CHARACTERS} are accepted")
    if _PLAIN.fullmatch(text):
        return NameEnd(text)
    compiled(text)  # alone first: inside the brackets below an unbalanced expression may become valid
    return NameEnd(text, compiled(rf"(.*\.)?({text})"))


def compiled(text: str) -> "regex.Pattern[str]":
    """The compiled expression. Raises ValueError if it is none."""
    try:
        return regex.compile(text)
    except (regex.error, RecursionError, OverflowError) as exc:
        raise ValueError(str(exc)) from exc
