"""Which engines make the same token ids as our tokenizer of their base model: each one's own answer, for each boot.

A worker's engine may come back with another model, tokenizer or chat template under the name that it had. So an answer
is worth something for the boot that gave it, and until there is one nothing is known.
"""

from dataclasses import dataclass

from router.core.fleet import Incarnation
from router.core.kv.index import WorkerId


@dataclass(slots=True)
class _EngineAgreement:
    """tokenizer: the number of the one it was held against, 0 for none yet; agrees: None where it answered no probe."""

    base_model: str
    boot_id: str
    tokenizer: int = 0
    agrees: bool | None = None
    is_settled: bool = False


class TokenizerAgreement:
    """The engines that were heard of, by worker. Tokenizers go by numbers from 1 on, each new one by its own."""

    def __init__(self) -> None:
        self._engines: dict[WorkerId, _EngineAgreement] = {}

    def heard(self, base_model: str, incarnation: Incarnation) -> None:
        """It is there; what another boot of it said counts no more."""
        worker, boot_id = incarnation
        known = self._engines.get(worker)
        if known is None or (known.base_model, known.boot_id) != (base_model, boot_id):
            self._engines[worker] = _EngineAgreement(base_model, boot_id)

    def answered(self, incarnation: Incarnation, tokenizer: int, agrees: bool | None) -> None:
        """Note its answer, if it is still the same boot. One that answered no probe is to be asked again."""
        engine = self._known(incarnation)
        if engine is not None:
            engine.tokenizer, engine.agrees, engine.is_settled = tokenizer, agrees, agrees is not None

    def is_settled(self, incarnation: Incarnation, tokenizer: int) -> bool:
        """Whether it need not be asked about this tokenizer."""
        engine = self._known(incarnation)
        return engine is not None and engine.is_settled and engine.tokenizer == tokenizer

    def agrees(self, incarnation: Incarnation, tokenizer: int) -> bool:
        """Whether this boot has answered as this tokenizer does."""
        engine = self._known(incarnation)
        return engine is not None and engine.tokenizer == tokenizer and engine.agrees is True

    def is_outvoted(self, base_model: str, tokenizer: int) -> bool:
        """Whether more than half of the base model's engines disagree with it, those not asked yet among the others."""
        against = others = 0
        for engine in self._engines.values():
            if engine.base_model == base_model:
                is_asked = engine.tokenizer == tokenizer
                against += is_asked and engine.agrees is False
                others += not is_asked or engine.agrees is True
        return against > others

    def unsettle(self, base_model: str) -> None:
        """Those that disagree are to be asked again: one of them may have the files of a better tokenizer."""
        for engine in self._engines.values():
            if engine.base_model == base_model and engine.agrees is False:
                engine.is_settled = False

    def forget(self, worker: WorkerId) -> str | None:
        """Drop a worker that is gone; returns its base model."""
        engine = self._engines.pop(worker, None)
        return None if engine is None else engine.base_model

    def _known(self, incarnation: Incarnation) -> _EngineAgreement | None:
        worker, boot_id = incarnation
        engine = self._engines.get(worker)
        return engine if engine is not None and engine.boot_id == boot_id else None
