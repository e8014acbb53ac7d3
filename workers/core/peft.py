"""An adapter's `adapter_config.json`, read and held against what engines can do.

source   PEFT 0.17 tuners/lora/config.py for the fields; vLLM 0.32 lora/peft_helper.py for what it refuses
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workers.core.errors import SourceError

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20

# Ways to begin training that leave the base model as it is; all others change its weights when PEFT loads the adapter.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")

# Features that change what the weights mean and that the engine does not know; set to anything true, they are refused.
_FEATURES: Mapping[str, tuple[str, str]] = {
    "use_dora": ("dora_unsupported", "accepted are plain LoRA weights; merge the magnitudes or train without DoRA"),
    "lora_bias": ("bias_unsupported", "accepted are adapters without biases"),
    "modules_to_save": (
        "modules_to_save_unsupported",
        "whole modules cannot be served beside the base model's; accepted are LoRA weights alone",
    ),
    "alora_invocation_tokens": ("peft_feature_unsupported", "accepted are adapters that act on every token"),
    "layer_replication": ("peft_feature_unsupported", "accepted are adapters for the base model's own layers"),
    "use_bdlora": ("peft_feature_unsupported", "accepted are plain LoRA weights"),
    "use_qalora": ("peft_feature_unsupported", "accepted are plain LoRA weights"),
    "trainable_token_indices": ("peft_feature_unsupported", "accepted are adapters without tokens of their own"),
}


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """One entry of `rank_pattern` or `alpha_pattern`."""

    key: str
    expression: "re.Pattern[str]"
    value: float


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What a config says. `is_targeted` answers None where only the trainer could tell."""

    rank: int
    ranks: tuple[ModulePattern, ...]
    base_model: str
    is_targeted: Callable[[str], bool | None]

    @property
    def max_rank(self) -> int:
        """The largest rank it mentions: what the engine compares with its own limit, used or not."""
        return max([self.rank, *(int(pattern.value) for pattern in self.ranks)])

    def rank_of(self, module: str) -> int:
        """The rank of a module: the first pattern that matches its whole name, or its end after a dot."""
        for pattern in self.ranks:
            if pattern.expression.match(module):
                return int(pattern.value)
        return self.rank


def parse_config(raw: bytes) -> LoraConfig:
    """The config of a LoRA adapter; raises SourceError naming the first rule that it breaks."""
    try:
        config = json.loads(raw.decode())
    except (ValueError, RecursionError) as exc:
        raise invalid_config(f"not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise invalid_config(f"found {type(config).__name__}, expected an object")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise SourceError("peft_type_unsupported", f"{CONFIG_NAME}: peft_type is {kind!r}; accepted is 'LORA'")
    for name in ("r", "lora_alpha", "target_modules"):
        if name not in config:
            raise invalid_config(f"{name} is missing")
    _check_features(config)
    rank, alpha = config["r"], config["lora_alpha"]
    if not _is_rank(rank):
        raise invalid_config(f"r is {rank!r}; accepted is a rank of 1 or more")
    if not _is_scale(alpha):
        raise invalid_config(f"lora_alpha is {alpha!r}; accepted is a number other than 0")
    list(_patterns(config, "alpha_pattern", _is_scale, "numbers other than 0"))
    return LoraConfig(
        rank=rank,
        ranks=tuple(_patterns(config, "rank_pattern", _is_rank, "ranks of 1 or more")),
        base_model=_base_model(config),
        is_targeted=_targets(config),
    )


def invalid_config(message: str) -> SourceError:
    return SourceError("adapter_config_invalid", f"{CONFIG_NAME}: {message}")


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1 << 16


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and 0 < abs(value) < 1e9 and math.isfinite(value)


def _check_features(config: Mapping[str, Any]) -> None:
    for name, (code, accepted) in _FEATURES.items():
        if value := config.get(name):
            raise SourceError(code, f"{CONFIG_NAME}: {name} is {_short(value)}; {accepted}")
    if (bias := config.get("bias", "none")) != "none":
        raise SourceError("bias_unsupported", f"{CONFIG_NAME}: bias is {_short(bias)}; accepted is 'none'")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        message = f"{CONFIG_NAME}: init_lora_weights is {_short(init)}, which changes the base model's weights;"
        accepted = ", ".join(repr(name) for name in _PLAIN_INITS)
        hint = f" accepted are true, false, {accepted}; convert it with path_initial_model_for_weight_conversion"
        raise SourceError("peft_feature_unsupported", message + hint)
    rslora = config.get("use_rslora")
    if rslora is not None and type(rslora) is not bool:
        raise invalid_config(f"use_rslora is {_short(rslora)}; accepted are true and false")


def _base_model(config: Mapping[str, Any]) -> str:
    name = config.get("base_model_name_or_path") or ""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 1000:
        raise invalid_config(f"base_model_name_or_path is {_short(name)}; accepted is a name")
    return name


# --- modules by name ----------------------------------------------------------------------------------------------


def _patterns(
    config: Mapping[str, Any], field: str, is_value: Callable[[Any], bool], accepted: str
) -> Iterator[ModulePattern]:
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or not all(is_value(value) for value in patterns.values()):
        raise invalid_config(f"{field} is {_short(patterns)}; accepted are module names and their {accepted}")
    for key, value in patterns.items():
        if not is_quick(key):
            # The engine matches these itself, between two steps: one that takes hours takes the engine with it.
            hint = "accepted are module names, and expressions with at most two of * and +, two ? and two groups"
            raise invalid_config(f"{field} has the key {_short(key)}; {hint}")
        try:
            re.compile(key)  # by itself first: in the brackets below, half an expression could become a whole one
            yield ModulePattern(key, re.compile(rf"(.*\.)?({key})$"), value)
        except re.error as exc:
            raise invalid_config(f"{field} has the key {_short(key)}, no regular expression: {exc}") from exc


def is_quick(expression: str) -> bool:
    """Whether matching a regular expression against a module's name surely ends soon.

    Refuses what can backtrack exponentially (a repeated group, many alternatives in a row) and all that it does not
    know, so it refuses harmless ones too.
    """
    if len(expression) > 1000:
        return False
    # A number between dots, as in `layers\.\d+\.mlp`, has one way to match.
    plain = re.sub(r"\\\.(?:\\d|\[0-9\])[+*](?=\\\.)", "x", expression)
    plain = re.sub(r"\\[dDwWsS.^$*+?(){}|\[\]\-/]", "x", plain)
    plain = re.sub(r"\[[^\[\]\\]*\]", "x", plain).replace("(?:", "(")
    if not re.fullmatch(r"[\w.\-^$|()*+?]*", plain) or "(?" in plain or re.search(r"\)[*+]", plain):
        return False
    return plain.count("*") + plain.count("+") <= 2 and plain.count("?") <= 2 and plain.count("(") <= 2


def _targets(config: Mapping[str, Any]) -> Callable[[str], bool | None]:
    targets = config["target_modules"]
    if not targets or not (isinstance(targets, str) or (isinstance(targets, list) and _are_names(targets))):
        accepted = "accepted are a list of module names, a regular expression, or 'all-linear'"
        raise invalid_config(f"target_modules is {_short(targets)}; {accepted}")
    if config.get("target_parameters") or targets == "all-linear":
        return lambda _module: None
    if isinstance(targets, str):
        return _expression_targets(targets)
    names = frozenset(targets)

    def is_named(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[start:]) in names for start in range(len(parts)))

    return is_named


def _expression_targets(expression: str) -> Callable[[str], bool | None]:
    if not is_quick(expression):
        return lambda _module: None  # not run: a hostile one takes hours. The base model's modules decide alone.
    try:
        compiled = re.compile(expression)
    except re.error as exc:
        raise invalid_config(f"target_modules is {_short(expression)}, no regular expression: {exc}") from exc
    return lambda module: compiled.fullmatch(module) is not None


def _are_names(values: list[Any]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
