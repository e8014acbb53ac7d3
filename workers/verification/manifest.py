"""Checks of an adapter's config and tensor headers, and its manifest: digest, rank, modules. No tensor is loaded.

An adapter is refused if an engine would refuse it, or would load it and serve it wrongly: vLLM 0.32 accepts adapters
of another base model, with more layers or without any matching module, and then serves the base model.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lorafleet.identity import FileEntry
from lorafleet.identity import files_digest as digest
from orchestrator.model.cards import AdapterCard
from workers.core.errors import SourceError
from workers.verification.base_check import (
    NOTHING_COMPARED,
    BaseModelCheck,
    ModuleVerdict,
    check_against_base,
    embeddings_taken,
    is_same_base,
    with_single_ranks,
)
from workers.verification.base_model import BaseModel
from workers.verification.lora_tensors import AdapterTensors, adapter_tensors
from workers.verification.patterns import MatchTime
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES, LoraConfig, invalid_config, parse_config
from workers.verification.tensors import TensorHeader

__all__ = [
    "CONFIG_NAME",
    "MAX_CONFIG_BYTES",
    "RULES_VERSION",
    "AdapterDescription",
    "AdapterRules",
    "FileEntry",
    "Manifest",
    "check_adapter",
    "digest",
    "is_same_base",
]


RULES_VERSION: Final = 1
"""Grows with each rule that refuses what was accepted before: adapters of older rules are verified again."""

# Limit for rank_pattern keys times modules, a microsecond each: 4,000 modules with a key each are fine.
_MOST_MATCHES = 16_000_000
# Of a card, which each heartbeat may have a hundred times.
_MOST_TARGETS, _MOST_TARGET_CHARACTERS = 32, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(AdapterCard):
    """A verified adapter: its card, and how many modules it has. `base_model`: "" if its config names none."""

    modules: int


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """An adapter by its config and tensor headers: a Manifest without digest and size.

    experts   how many of its modules are of experts
    numbers   in its matrices; `width`: of each module's by its rank, so that a slot of rank R has `width * R`
    verdict   what becomes of its modules in the engine
    scale     the largest factor by which engines multiply a module's change
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    dtype: str
    base_model: str
    modules: int
    numbers: int = 0
    width: int = 0
    experts: int = 0
    verdict: ModuleVerdict = NOTHING_COMPARED
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """The rules that adapters of this worker must keep.

    max_rank     largest rank that the engine accepts; None: any, for inspections
    base_names   names of the worker's base model
    base         the base model's modules; None if unknown: then adapters are not compared with them
    max_bytes    largest total size of an adapter's files; None: no limit
    tokenizer    the folder with the engine's tokenizer; None: not on this disk
    takes_unmatched  describe an adapter of which nothing takes effect, in place of refusing it
    """

    max_rank: int | None
    base_names: frozenset[str]
    base_check: BaseModelCheck = "name"
    base: BaseModel | None = None
    max_bytes: int | None = None
    allow_pickle: bool = False
    tokenizer: Path | None = None
    takes_unmatched: bool = False


def check_adapter(
    config: bytes,
    tensors: Mapping[str, TensorHeader],
    rules: AdapterRules,
    *,
    clock: Callable[[], float] = time.thread_time,
) -> AdapterDescription:
    """Check an adapter against the rules and describe it; raises SourceError with the first rule that it breaks.

    config    bytes of its adapter_config.json
    tensors   of its adapter_model.safetensors, by name
    clock     CPU time of this thread, which ends expressions of the config that take too long
    """
    embeddings = embeddings_taken(rules.base)
    lora_config = parse_config(config, embeddings=embeddings)
    _check_base_name(lora_config.base_model, rules)
    check_rank(lora_config.max_rank, rules)
    parts = adapter_tensors(tensors, lora_config.saved, embeddings)
    _check_embedding_copies(parts, tensors, rules.base)
    _check_against_config(parts, lora_config, rules.base, MatchTime(clock))
    verdict = NOTHING_COMPARED
    if rules.base:
        verdict = check_against_base(parts, rules.base, takes_unmatched=rules.takes_unmatched)
    ranks = with_single_ranks(parts.pairs, rules.base)
    rank = max(ranks.values())
    check_rank(rank, rules)
    return AdapterDescription(
        rank=rank,
        alpha=lora_config.alpha,
        target_modules=_target_modules(parts.pairs),
        dtype=",".join(sorted({tensor.dtype for tensor in tensors.values()})),
        base_model=lora_config.base_model,
        modules=len(parts.pairs),
        numbers=sum(pair.numbers for pair in parts.pairs.values()),
        width=sum(pair.numbers // ranks[module] for module, pair in parts.pairs.items()),
        experts=sum(".experts" in module for module in parts.pairs),
        verdict=verdict,
        scale=lora_config.scale,
    )


def _target_modules(modules: Iterable[str]) -> tuple[str, ...]:
    """Last parts of these modules' names, sorted; bounded, since a file may have any names."""
    names = sorted({module.removesuffix(".base_layer").rpartition(".")[2] for module in modules})
    return tuple(name[:_MOST_TARGET_CHARACTERS] for name in names[:_MOST_TARGETS])


def _check_against_config(parts: AdapterTensors, config: LoraConfig, base: BaseModel | None, time: MatchTime) -> None:
    """Raises SourceError if a pair's rank differs from the config's, or its module is not targeted."""
    patterns = len(config.ranks) + len(config.alphas)
    if patterns * len(parts.pairs) > _MOST_MATCHES:
        field = "rank_pattern" if config.ranks else "alpha_pattern"
        message = f"{field} has {patterns} keys for {len(parts.pairs)} modules"
        raise invalid_config(f"{message}; accepted are fewer: each is held against each, here and in the engine")
    ranks = with_single_ranks(parts.pairs, base)
    for module, pair in parts.pairs.items():
        rank, expected = ranks[module], config.rank_of(module, time)
        # Without the number of experts their rank is only known to be a multiple.
        if rank != expected and not (pair.is_stacked and rank == pair.rank and rank % expected == 0):
            message = f"module {module}: its tensors have rank {rank}, {CONFIG_NAME} says {expected}"
            raise SourceError("rank_mismatch", f"{message}; accepted are equal ones, through r or rank_pattern")
        if config.is_targeted(module, time) is False:
            message = f"tensors of module {module}, which target_modules of {CONFIG_NAME} leaves out"
            raise SourceError("module_untargeted", f"{message}; accepted are tensors of targeted modules")


def _check_embedding_copies(parts: AdapterTensors, tensors: Mapping[str, TensorHeader], base: BaseModel | None) -> None:
    """Check copies of the base model's embeddings, which PEFT may save and engines ignore: no tokens may be added.

    Raises SourceError `shape_mismatch`; checks nothing if the base model's shapes are unknown.
    """
    names = base.module_shapes() if base and parts.copies else None
    for name, module in parts.copies.items():
        shape = names.find(module) if names else None
        if shape is not None and tensors[name].shape != shape:
            found = list(tensors[name].shape)
            message = f"tensor {name!r} is {found}, the base model's is {list(shape)}: tokens were added"
            raise SourceError("shape_mismatch", f"{message}; accepted are adapters for the base model's own vocabulary")


def check_rank(rank: int, rules: AdapterRules) -> None:
    """Raises SourceError `rank_too_big` if the rank exceeds the engine's limit."""
    if rules.max_rank is not None and rank > rules.max_rank:
        message = f"rank {rank} is more than this worker's max_lora_rank {rules.max_rank}"
        raise SourceError("rank_too_big", f"{message}; accepted are smaller ones, or a worker with a higher limit")


def _check_base_name(declared: str, rules: AdapterRules) -> None:
    """Raises SourceError `base_model_mismatch` for an adapter of another base model."""
    if not is_same_base(declared, rules.base_names, rules.base_check):
        message = f"the adapter was trained on {declared!r}; this worker serves {', '.join(sorted(rules.base_names))}"
        advice = (
            "accepted are those; if it fits all the same, register it with that base_model, or see base_model_check"
        )
        raise SourceError("base_model_mismatch", f"{message}; {advice}")
