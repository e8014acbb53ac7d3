"""Which engines produce the same token ids as our tokenizer of their base model, by engine boot.

A restarted engine may have another model, tokenizer or chat template under the same name. So an engine's answer counts
only for the boot that gave it.
"""

from dataclasses import dataclass

from router.core.fleet import Incarnation
from router.core.kv.index import WorkerId


@dataclass(slots=True)
class _EngineAgreement:
    """One engine boot's answer.

    tokenizer  number of the tokenizer that it was compared with; 0 for none yet
    agrees     None if it answered no probe
    """

    base_model: str
    boot_id: str
    tokenizer: int = 0
    agrees: bool | None = None
    is_settled: bool = False


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

    def is_settled(self, incarnation: Incarnation, tokenizer: int) -> bool:
        """Whether the engine need not be probed with this tokenizer again."""
        engine = self._engine_of(incarnation)
        return engine is not None and engine.is_settled and engine.tokenizer == tokenizer

    def agrees(self, incarnation: Incarnation, tokenizer: int) -> bool:
        """Whether this engine boot has returned the same token ids as this tokenizer."""
        engine = self._engine_of(incarnation)
        return engine is not None and engine.tokenizer == tokenizer and engine.agrees is True

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
        return engine if engine is not None and engine.boot_id == boot_id else None
