"""Acceptance: whether an engine's log-probabilities with an adapter are those of the trainer."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.model.names import MESSAGE

AcceptanceMode = Literal["off", "warn", "require"]
"""off: engines are not asked. warn: what they answer is shown. require: served by engines alone that are `equal`."""
AcceptanceResult = Literal["equal", "differs", "unknown"]
Likeness = Literal["", "base", "other_base", "scaled", "part", "other"]
"""base: the base model without the adapter. other_base: already the base model answers otherwise, by another revision
or quantised weights. scaled: the adapter at another scale. part: the adapter in part, or another version of it. other:
another adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterAcceptance:
    """How far an engine's log-probabilities with an adapter are from those in its acceptance file."""

    __pydantic_config__ = MESSAGE

    result: AcceptanceResult
    distance: float | None = None
    """Mean difference of a token's log-probability between engine and trainer, with the adapter. None: not asked."""
    noise: float | None = None
    """The same with the base model: what engine and trainer differ by without any adapter."""
    looks_like: Likeness = ""
    """Of `differs`: what the engine's answers resemble, as far as they tell."""
    scale: float | None = None
    """How much of the adapter's change the engine shows: 1 all of it, 0 none, 0.5 half its scale."""
    why: str = ""
    """The result as a sentence."""
    file: str = ""
    """Digest of the acceptance file; empty: the adapter has none, or the engine's answers cannot be compared."""

    @property
    def is_unanswered(self) -> bool:
        """Whether the engine was asked and gave no answer: a busy engine may give one later."""
        return bool(self.file) and self.distance is None
