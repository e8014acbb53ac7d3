"""The model card of an adapter: what workers report of one, and what is stored and answered of a registered one."""

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from orchestrator.model.names import MESSAGE

LARGE_CHANGE: Final = 100.0
"""Times ordinary weights: a change beyond it is large. Changes of healthy adapters are below 1; a model's own weights
are about 1 / sqrt(inputs), as they are drawn before training."""

_LARGE_GROWTH: Final = 10.0
"""Times the change of a name's former version: a change beyond it is large, where it is not below `_LEAST_GROWN`."""

_LEAST_GROWN: Final = 1.0
"""Training begins with a change of 0, so the first versions of a run grow by any factor."""

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
    weight_change: float = 0.0
    """The largest change of a module's weights, as a multiple of ordinary weights; 0: none, or not measured."""
    weight_change_in: str = ""
    """The module of that change."""
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


def large_change(card: AdapterCard) -> str:
    """A sentence on a change of the weights that is far beyond ordinary ones; "" without one."""
    if card.weight_change <= LARGE_CHANGE:
        return ""
    return (
        f"its change of {card.weight_change_in} is about {card.weight_change:.3g} times as large as ordinary weights:"
        " its training may have diverged, or its lora_alpha is too large"
    )


def large_growth(card: AdapterCard, former: AdapterCard) -> str:
    """A sentence on a change of the weights that is far beyond a former version's; "" without one."""
    if card.weight_change < _LEAST_GROWN or not 0 < former.weight_change * _LARGE_GROWTH < card.weight_change:
        return ""
    return (
        f"its largest change is about {card.weight_change:.3g} times as large as ordinary weights, in"
        f" {card.weight_change_in}; the former version's is {former.weight_change:.3g}, in {former.weight_change_in}"
    )
