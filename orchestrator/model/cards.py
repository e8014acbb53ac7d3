"""The model card of an adapter: what workers report of one, and what is stored and answered of a registered one."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from orchestrator.model.names import MESSAGE

AdapterEffectState = Literal["", "applied", "seen", "zero", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """The model card of an adapter: what its files say, where they come from, and what it does in an engine."""

    __pydantic_config__ = MESSAGE

    base_model: str = ""
    rank: int = 0
    """The largest of its modules; 0: not read yet."""
    alpha: float | None = None
    """Its config's `lora_alpha`. None: not read yet."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of its modules, such as `q_proj`, sorted: of the tensors in its file."""
    dtype: str = ""
    """Of its tensors, as safetensors names it, such as BF16; several are joined by a comma."""
    size_bytes: int = 0
    """Of its files."""
    digest: str = ""
    """Empty for an adapter that another client loaded: the engine may have read other bytes than are there now."""
    source: str = ""
    """The reference that was asked for."""
    files_note: str = ""
    """What lies beside its files at its source and is not served, and a change of weights that is far too large; known
    to the worker that read the source."""
    acceptance_file: str = ""
    """Digest of the `acceptance.jsonl` beside its files, which is no part of their own digest; empty without one."""
    effect: AdapterEffectState = ""
    """Whether it changes the engine's answers. Empty: not checked. applied: the engine has its modules. seen: answers
    differ with it. zero: its weights change nothing. unknown: not proved."""

    @property
    def card(self) -> "AdapterCard":
        """The card alone, of an object that has more fields."""
        return AdapterCard(**card_fields(self))


def card_fields(card: AdapterCard) -> dict[str, Any]:
    """The card's fields by name, for another object that has them."""
    return {each.name: getattr(card, each.name) for each in fields(AdapterCard)}
