"""Parsing of an adapter's `adapter_config.json`; refuses features that engines do not support.

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

# Initialisations that leave the base model unchanged; with all others PEFT changes its weights on loading.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")

# Config fields that change the meaning of the weights and that engines ignore; any true value is refused.
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
    """A parsed config. `is_targeted(module)` is None if the config does not decide it."""

    rank: int
    ranks: tuple[ModulePattern, ...]
    base_model: str
    is_targeted: Callable[[str], bool | None]

    @property
    def max_rank(self) -> int:
        """The largest rank in the config, used or not: the engine compares it with its limit."""
        return max([self.rank, *(int(pattern.value) for pattern in self.ranks)])

    def rank_of(self, module: str) -> int:
        """The rank of a module: of the first pattern that matches its name, or its end after a dot; else `rank`."""
        for pattern in self.ranks:
            if pattern.expression.match(module):
                return int(pattern.value)
        return self.rank


def parse_config(raw: bytes) -> LoraConfig:
    """The parsed config of a LoRA adapter; raises SourceError with the first rule that it breaks."""
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
    list(_parse_patterns(config, "alpha_pattern", _is_scale, "numbers other than 0"))
    return LoraConfig(
        rank=rank,
        ranks=tuple(_parse_patterns(config, "rank_pattern", _is_rank, "ranks of 1 or more")),
        base_model=_base_model_name(config),
        is_targeted=_target_test(config),
    )


def invalid_config(message: str) -> SourceError:
    """A SourceError `adapter_config_invalid` with this message."""
    return SourceError("adapter_config_invalid", f"{CONFIG_NAME}: {message}")


def _is_rank(value: Any) -> bool:
    """Whether a JSON value is a rank: an int from 1 to 65536."""
    return type(value) is int and 1 <= value <= 1 << 16


def _is_scale(value: Any) -> bool:
    """Whether a JSON value is a number other than 0, below a billion."""
    return type(value) in (int, float) and 0 < abs(value) < 1e9 and math.isfinite(value)


def _check_features(config: Mapping[str, Any]) -> None:
    """Raises SourceError for the first unsupported feature in the config."""
    for name, (code, accepted) in _FEATURES.items():
        if value := config.get(name):
            raise SourceError(code, f"{CONFIG_NAME}: {name} is {_shortened(value)}; {accepted}")
    if (bias := config.get("bias", "none")) != "none":
        raise SourceError("bias_unsupported", f"{CONFIG_NAME}: bias is {_shortened(bias)}; accepted is 'none'")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        message = f"{CONFIG_NAME}: init_lora_weights is {_shortened(init)}, which changes the base model's weights;"
        accepted = ", ".join(repr(name) for name in _PLAIN_INITS)
        hint = f" accepted are true, false, {accepted}; convert it with path_initial_model_for_weight_conversion"
        raise SourceError("peft_feature_unsupported", message + hint)
    rslora = config.get("use_rslora")
    if rslora is not None and type(rslora) is not bool:
        raise invalid_config(f"use_rslora is {_shortened(rslora)}; accepted are true and false")


def _base_model_name(config: Mapping[str, Any]) -> str:
    """The base model's name in the config; "" without one. Raises SourceError."""
    name = config.get("base_model_name_or_path") or ""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 1000:
        raise invalid_config(f"base_model_name_or_path is {_shortened(name)}; accepted is a name")
    return name


# --- modules by name ----------------------------------------------------------------------------------------------


def _parse_patterns(
    config: Mapping[str, Any], field: str, is_value: Callable[[Any], bool], accepted: str
) -> Iterator[ModulePattern]:
    """Parse the entries of the config field `rank_pattern` or `alpha_pattern`, one at a time. Raises SourceError."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or not all(is_value(value) for value in patterns.values()):
        raise invalid_config(f"{field} is {_shortened(patterns)}; accepted are module names and their {accepted}")
    for key, value in patterns.items():
        if not is_safe_regex(key):
            # The engine matches these between two steps: a regex that backtracks for hours would block it.
            hint = "accepted are module names, and expressions with at most two of * and +, two ? and two groups"
            raise invalid_config(f"{field} has the key {_shortened(key)}; {hint}")
        try:
            re.compile(key)  # alone first: inside the brackets below an unbalanced expression may become valid
            yield ModulePattern(key, re.compile(rf"(.*\.)?({key})$"), value)
        except re.error as exc:
            raise invalid_config(f"{field} has the key {_shortened(key)}, no regular expression: {exc}") from exc


def is_safe_regex(expression: str) -> bool:
    """Whether a regular expression cannot backtrack exponentially on a module's name.

    Conservative: any repeated group, many alternatives or unknown syntax counts as unsafe.
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


def _target_test(config: Mapping[str, Any]) -> Callable[[str], bool | None]:
    """The test of `target_modules`: whether a module is targeted; None if the config does not decide it.

    raises  SourceError if `target_modules` is invalid
    """
    targets = config["target_modules"]
    if not targets or not (isinstance(targets, str) or (isinstance(targets, list) and _are_names(targets))):
        accepted = "accepted are a list of module names, a regular expression, or 'all-linear'"
        raise invalid_config(f"target_modules is {_shortened(targets)}; {accepted}")
    if config.get("target_parameters") or targets == "all-linear":
        return lambda _module: None
    if isinstance(targets, str):
        return _regex_test(targets)
    names = frozenset(targets)

    def is_targeted(module: str) -> bool:
        """Whether the module's name, or its end after a dot, is in `target_modules`."""
        parts = module.split(".")
        return any(".".join(parts[start:]) in names for start in range(len(parts)))

    return is_targeted


def _regex_test(expression: str) -> Callable[[str], bool | None]:
    """The test of a regular expression in `target_modules`; of an unsafe one the result is always None.

    Raises SourceError for text that is no regular expression.
    """
    if not is_safe_regex(expression):
        return lambda _module: None  # not matched, as it may take hours; the base model's modules decide alone
    try:
        compiled = re.compile(expression)
    except re.error as exc:
        raise invalid_config(f"target_modules is {_shortened(expression)}, no regular expression: {exc}") from exc
    return lambda module: compiled.fullmatch(module) is not None


def _are_names(values: list[Any]) -> bool:
    """Whether all JSON values are non-empty strings."""
    return all(isinstance(value, str) and value for value in values)


def _shortened(value: Any) -> str:
    """A config value for error messages, cut after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
