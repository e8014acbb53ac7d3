"""Doubts about our token ids: answers that contradict them, by base model.

An answer contradicts our ids if its engine counts another number of prompt tokens, or if far more or less of the prompt
was cached there than the index says. A leaky bucket counts both, as for a worker's KV events. Which of the two is
wrong, ids or index, a new probe of the engine decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from router.core.fleet import Incarnation

# Four contradictions in a row are enough, fewer than make a worker degraded (prediction_accuracy.py): a probe costs
# little. Reasoned, nothing measured.
_ADDED, _FULL = 3, 12
# Seconds without another doubt after a probe that agreed, doubled each time.
_PAUSE_S, _MOST_PAUSE_S = 60.0, 3600.0


class Doubt(NamedTuple):
    """Engines whose answers contradict our ids, and the body of the last such request; None: not known."""

    engines: frozenset[Incarnation]
    body: Mapping[str, Any] | None


@dataclass(slots=True)
class _Evidence:
    errors: int = 0
    suspects: set[Incarnation] = field(default_factory=set)
    pause_s: float = _PAUSE_S
    paused_until: float = 0.0


class TokenDoubts:
    """The evidence against our token ids of each base model."""

    def __init__(self) -> None:
        self._evidence: dict[str, _Evidence] = {}

    def record(
        self, base_model: str, engine: Incarnation, body: Mapping[str, Any] | None, now: float, *, contradicts: bool
    ) -> Doubt | None:
        """Count one answer to a prompt of our ids: the doubt that it completes, or None.

        body  of the request, for another probe of the engine
        """
        evidence = self._evidence.get(base_model)
        if not contradicts:
            if evidence is not None and evidence.errors:
                evidence.errors -= 1
            return None
        if evidence is None:
            evidence = self._evidence[base_model] = _Evidence()
        if now < evidence.paused_until:
            return None
        evidence.errors += _ADDED
        evidence.suspects.add(engine)
        if evidence.errors < _FULL:
            return None
        doubt = Doubt(frozenset(evidence.suspects), body)
        evidence.errors = 0
        evidence.suspects.clear()
        return doubt

    def record_verdict(self, base_model: str, now: float, *, agrees: bool) -> None:
        """Record what a doubted engine's probe said: if it agrees, the next doubt is not before a pause."""
        evidence = self._evidence.setdefault(base_model, _Evidence())
        if agrees:
            evidence.paused_until = now + evidence.pause_s
            evidence.pause_s = min(_MOST_PAUSE_S, 2 * evidence.pause_s)
        else:
            evidence.pause_s, evidence.paused_until = _PAUSE_S, 0.0
