"""Which engines produce the same token ids as our tokenizer of their base model, by engine boot.

A restarted engine may have another model, tokenizer or chat template under the same name. So an engine's answer counts
only for the boot that gave it, and only until answers to requests contradict it (`doubt`).
"""

from dataclasses import dataclass
from math import inf

from router.core.fleet import Incarnation
from router.core.kv.index import WorkerId
from router.tokenizing.dates import ShownDate


@dataclass(slots=True)
class _EngineAgreement:
    """One engine boot's answer.

    boot_id      empty: a restart would not be noticed
    tokenizer    number of the tokenizer that it was compared with; 0 for none yet
    agrees       None if it answered no probe
    is_doubted   answers to requests contradict our ids
    date         that its chat template shows; None while that is not known
    date_due_at  when the date must be read again
    """

    base_model: str
    boot_id: str
    tokenizer: int = 0
    agrees: bool | None = None
    is_settled: bool = False
    is_doubted: bool = False
    date: ShownDate | None = None
    date_due_at: float = inf


class TokenizerAgreement:
    """The known engines by worker, and how they compare with our tokenizers, which are numbered from 1."""

    def __init__(self) -> None:
        self._engines: dict[WorkerId, _EngineAgreement] = {}

    def add_engine(self, base_model: str, incarnation: Incarnation) -> None:
        """Add an engine boot, in place of the worker's earlier boots; does nothing for a known one."""
        worker, boot_id = incarnation
        known = self._engines.get(worker)
        if known is None or (known.base_model, known.boot_id) != (base_model, boot_id):
            self._engines[worker] = _EngineAgreement(base_model, boot_id)

    def record_answer(self, incarnation: Incarnation, tokenizer: int, agrees: bool | None) -> None:
        """Record whether an engine's ids agree with a tokenizer's, if the engine is still the same boot.

        agrees  None if the engine answered no probe; then it is probed again
        """
        engine = self._engine_of(incarnation)
        if engine is not None:
            engine.tokenizer, engine.agrees, engine.is_settled = tokenizer, agrees, agrees is not None
            engine.is_doubted = engine.is_doubted and agrees is None
            engine.date, engine.date_due_at = None, inf

    def record_date(self, incarnation: Incarnation, date: ShownDate, due_at: float) -> None:
        """Record the date that an agreeing engine shows, and when it must be read again."""
        engine = self._engine_of(incarnation)
        if engine is not None and engine.agrees:
            engine.date, engine.date_due_at = date, due_at

    def dates(self, base_model: str, tokenizer: int) -> frozenset[ShownDate]:
        """The dates that the engines which agree with this tokenizer show."""
        engines = [e for e in self._engines.values() if e.base_model == base_model and e.tokenizer == tokenizer]
        return frozenset([engine.date for engine in engines if engine.agrees and engine.date is not None])

    def is_settled(self, incarnation: Incarnation, tokenizer: int) -> bool:
        """Whether the engine need not be compared with this tokenizer again; its date may be due."""
        engine = self._engine_of(incarnation)
        return engine is not None and engine.is_settled and engine.tokenizer == tokenizer

    def is_date_due(self, incarnation: Incarnation, now: float) -> bool:
        """Whether the date that this engine shows must be read again."""
        engine = self._engine_of(incarnation)
        return engine is not None and engine.date_due_at <= now

    def agrees(self, incarnation: Incarnation, tokenizer: int, now: float) -> bool:
        """Whether this engine boot returns the same token ids as this tokenizer now.

        False for an engine whose restart would not be noticed, and while its date is due.
        """
        engine = self._engine_of(incarnation)
        if engine is None or not engine.boot_id or engine.tokenizer != tokenizer:
            return False
        return engine.agrees is True and now < engine.date_due_at

    def doubt(self, incarnation: Incarnation) -> None:
        """Have an engine that agreed probed again; until then it agrees no longer, and has no vote."""
        engine = self._engine_of(incarnation)
        if engine is not None and engine.agrees:
            engine.agrees, engine.is_settled, engine.is_doubted = None, False, True

    def is_doubted(self, incarnation: Incarnation) -> bool:
        """Whether answers contradict our ids, and no probe has been answered since."""
        engine = self._engine_of(incarnation)
        return engine is not None and engine.is_doubted

    def agreeing(self, base_model: str) -> list[Incarnation]:
        """The engines that agree with our tokenizer."""
        return [(id_, e.boot_id) for id_, e in self._engines.items() if e.base_model == base_model and e.agrees]

    def is_outvoted(self, base_model: str, tokenizer: int) -> bool:
        """Whether more than half of the base model's engines disagree; engines not probed yet count as agreeing."""
        against = others = 0
        for engine in self._engines.values():
            if engine.base_model == base_model:
                is_asked = engine.tokenizer == tokenizer
                against += is_asked and engine.agrees is False
                others += not is_asked or engine.agrees is True
        return against > others

    def reopen(self, base_model: str) -> None:
        """Mark disagreeing engines to be probed again: one of them may have the files of a better tokenizer."""
        for engine in self._engines.values():
            if engine.base_model == base_model and engine.agrees is False:
                engine.is_settled = False

    def forget(self, worker: WorkerId) -> str | None:
        """Drop a worker that is gone; returns its base model, None if it was unknown."""
        engine = self._engines.pop(worker, None)
        return None if engine is None else engine.base_model

    def _engine_of(self, incarnation: Incarnation) -> _EngineAgreement | None:
        """The entry of an engine boot; None if it is not the worker's current boot."""
        worker, boot_id = incarnation
        engine = self._engines.get(worker)
        return engine if engine is not None and engine.boot_id in {"", boot_id} else None
