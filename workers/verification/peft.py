"""Parsing of an adapter's `adapter_config.json`; refuses features that engines do not support.

source   PEFT 0.21 tuners/lora/config.py for the fields; vLLM 0.32 lora/peft_helper.py for what it refuses
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workers.core.errors import SourceError
from workers.verification.patterns import MOST_CHARACTERS, MatchTime, NameEnd, SlowExpressionError, compiled, name_end
from workers.verification.tensors import other_file

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
HEADS = ("classifier", "score")
"""Whole modules that engines take from `modules_to_save`: PEFT adds them to every adapter of a classifier."""

EMBEDDINGS = ("embed_tokens", "lm_head")

# Initialisations that leave the base model unchanged; with all others PEFT changes its weights on loading.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")

# Config fields that change the meaning of the weights and that engines ignore; any true value is refused.
_FEATURES: Mapping[str, tuple[str, str]] = {
    "use_dora": ("dora_unsupported", "accepted are plain LoRA weights: train without DoRA"),
    "lora_bias": ("bias_unsupported", "accepted are adapters without biases"),
    "alora_invocation_tokens": ("peft_feature_unsupported", "accepted are adapters that act on every token"),
    "layer_replication": ("peft_feature_unsupported", "accepted are adapters for the base model's own layers"),
    "use_bdlora": ("peft_feature_unsupported", "accepted are plain LoRA weights"),
    "use_qalora": ("peft_feature_unsupported", "accepted are plain LoRA weights"),
    "trainable_token_indices": ("peft_feature_unsupported", "accepted are adapters without tokens of their own"),
}


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """One entry of `rank_pattern` or `alpha_pattern`."""

    end: NameEnd
    value: float


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """A parsed config.

    scale       the largest factor by which engines multiply a module's change
    target      the test of `target_modules`; None if the config does not decide which modules it has
    saved       whole modules of `modules_to_save`
    """

    rank: int
    alpha: float
    ranks: tuple[ModulePattern, ...]
    alphas: tuple[ModulePattern, ...]
    scale: float
    base_model: str
    target: Callable[[str, MatchTime], bool] | None
    saved: frozenset[str] = frozenset()

    @property
    def max_rank(self) -> int:
        """The largest rank in the config, used or not: the engine compares it with its limit."""
        return max([self.rank, *(int(pattern.value) for pattern in self.ranks)])

    def rank_of(self, module: str, time: MatchTime) -> int:
        """The rank of a module: of the first pattern that matches its name, or its end after a dot; else `rank`.

        Raises SourceError if the patterns of the config take too long; those of `alpha_pattern` are matched, too.
        """
        if not self.ranks and not self.alphas:
            return self.rank
        name = _parameter_name(module)
        try:
            next((True for pattern in self.alphas if pattern.end.matches(name, time)), None)
            for pattern in self.ranks:
                if pattern.end.matches(name, time):
                    return int(pattern.value)
        except SlowExpressionError as exc:
            # The engine matches them between two steps: an expression that takes hours would block it.
            message = f"an expression of rank_pattern or alpha_pattern takes too long on the module {exc}"
            raise invalid_config(
                f"{message}; accepted are module names, or expressions without nested repeats"
            ) from exc
        return self.rank

    def is_targeted(self, module: str, time: MatchTime) -> bool | None:
        """Whether `target_modules` names a module; None if the config does not decide it, or not in time."""
        if self.target is None:
            return None
        try:
            return self.target(module, time)
        except SlowExpressionError:
            return None  # no engine matches it, so it may be slow; the base model's modules decide alone


def parse_config(raw: bytes, *, embeddings: Collection[str] | None = None) -> LoraConfig:
    """The parsed config of a LoRA adapter; raises SourceError with the first rule that it breaks.

    embeddings  those of EMBEDDINGS that may be trained by `target_modules`; None: not known. For messages
    """
    try:
        config = json.loads(raw.decode())
    except (ValueError, RecursionError) as exc:
        other = "" if raw.lstrip().startswith(b"{") else other_file(raw[:8])
        raise invalid_config(f"it is {other}" if other else f"not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise invalid_config(f"found {type(config).__name__}, expected an object")
    kind = config.get("peft_type")
    if kind is not None and kind != "LORA":
        raise SourceError("peft_type_unsupported", f"{CONFIG_NAME}: peft_type is {kind!r}; accepted is 'LORA'")
    for name in ("r", "lora_alpha", "target_modules"):
        if name not in config:
            raise invalid_config(f"{name} is missing")
    _check_features(config)
    rank, alpha = config["r"], config["lora_alpha"]
    if type(rank) is float and rank.is_integer():
        rank = int(rank)
    if not _is_rank(rank):
        raise invalid_config(f"r is {rank!r}; accepted is a rank of 1 or more")
    if not _is_scale(alpha):
        raise invalid_config(f"lora_alpha is {_shortened_value(alpha)}; accepted is a finite number other than 0")
    ranks = tuple(_parse_patterns(config, "rank_pattern", _is_rank, "ranks of 1 or more"))
    alphas = tuple(_parse_patterns(config, "alpha_pattern", _is_scale, "finite numbers other than 0"))
    least_rank = min([rank, *(pattern.value for pattern in ranks)])
    largest_alpha = max(map(abs, [alpha, *(pattern.value for pattern in alphas)]))
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        ranks=ranks,
        alphas=alphas,
        scale=largest_alpha / (math.sqrt(least_rank) if config.get("use_rslora") else least_rank),
        base_model=_base_model_name(config),
        target=_target_test(config),
        saved=_saved_modules(config, embeddings),
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
            raise SourceError(code, f"{CONFIG_NAME}: {name} is {_shortened_value(value)}; {accepted}")
    if (bias := config.get("bias", "none")) != "none":
        raise SourceError("bias_unsupported", f"{CONFIG_NAME}: bias is {_shortened_value(bias)}; accepted is 'none'")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        message = (
            f"{CONFIG_NAME}: init_lora_weights is {_shortened_value(init)}, which changes the base model's weights;"
        )
        accepted = ", ".join(repr(name) for name in _PLAIN_INITS)
        hint = f" accepted are true, false, {accepted}; convert it with path_initial_model_for_weight_conversion"
        raise SourceError("peft_feature_unsupported", message + hint)
    rslora = config.get("use_rslora")
    if rslora is not None and type(rslora) is not bool:
        raise invalid_config(f"use_rslora is {_shortened_value(rslora)}; accepted are true and false")


def _base_model_name(config: Mapping[str, Any]) -> str:
    """The base model's name in the config; "" without one. Raises SourceError."""
    name = config.get("base_model_name_or_path") or ""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 1000:
        raise invalid_config(f"base_model_name_or_path is {_shortened_value(name)}; accepted is a name")
    return name


def embeddings_advice(embeddings: Collection[str] | None) -> str:
    """What to do instead of saving embeddings as whole modules: a clause for an error message.

    embeddings  as of `parse_config`
    """
    both = " and ".join(EMBEDDINGS)
    if embeddings is None:
        return f"train {both} by target_modules if the engine takes adapters on them (docs/engines.md), else not at all"
    taken = [name for name in EMBEDDINGS if name in embeddings]
    others = [name for name in EMBEDDINGS if name not in embeddings]
    parts = [f"train {' and '.join(taken)} by target_modules"] if taken else []
    if others:
        reason = "the engine takes no adapter on the embeddings of this architecture"
        parts.append(f"leave {' and '.join(others)} as in the base model: {reason}")
    return "; ".join(parts)


def _saved_modules(config: Mapping[str, Any], embeddings: Collection[str] | None) -> frozenset[str]:
    """The names in `modules_to_save`. Raises SourceError if engines do not take one of them."""
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or any(name not in HEADS for name in saved):
        message = (
            f"{CONFIG_NAME}: modules_to_save is {_shortened_value(saved)}; whole modules cannot be served beside the"
        )
        accepted = f"accepted are LoRA weights, and of whole modules the heads {' and '.join(HEADS)} of classifiers"
        names = saved if isinstance(saved, list) else [saved]
        hint = "leave it out of modules_to_save, or merge the adapter into its base model and serve that"
        if any(str(name).rpartition(".")[2] in EMBEDDINGS for name in names):
            hint = embeddings_advice(embeddings)
        raise SourceError("modules_to_save_unsupported", f"{message} base model's; {accepted}; {hint}")
    return frozenset(saved)


# --- modules by name ----------------------------------------------------------------------------------------------


def _parameter_name(module: str) -> str:
    """The name by which patterns know a module: that of its parameter, for experts in one module.

    source   vLLM 0.32 lora/peft_helper.py get_rank_and_scaling
    """
    if module.endswith(".experts.base_layer"):
        return module.removesuffix(".base_layer") + ".gate_up_proj"
    return module + ".down_proj" if module.endswith(".experts") else module


def _parse_patterns(
    config: Mapping[str, Any], field: str, is_value: Callable[[Any], bool], accepted: str
) -> Iterator[ModulePattern]:
    """Parse the entries of the config field `rank_pattern` or `alpha_pattern`, one at a time. Raises SourceError."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or not all(is_value(value) for value in patterns.values()):
        raise invalid_config(f"{field} is {_shortened_value(patterns)}; accepted are module names and their {accepted}")
    for key, value in patterns.items():
        try:
            yield ModulePattern(name_end(key), value)
        except ValueError as exc:
            raise invalid_config(f"{field} has the key {_shortened_value(key)}, no regular expression: {exc}") from exc


def _target_test(config: Mapping[str, Any]) -> Callable[[str, MatchTime], bool] | None:
    """The test of `target_modules`: whether a module is targeted; None if the config does not decide it.

    raises  SourceError if `target_modules` is invalid
    """
    targets, parameters = config["target_modules"], config.get("target_parameters")
    if not targets and (targets is None or targets == []) and parameters:
        return None
    if not targets or not (isinstance(targets, str) or (isinstance(targets, list) and _are_names(targets))):
        accepted = "accepted are a list of module names, a regular expression, or 'all-linear'"
        raise invalid_config(f"target_modules is {_shortened_value(targets)}; {accepted}")
    if parameters or targets == "all-linear":
        return None
    if config.get("ensure_weight_tying"):
        plain = _target_test({**config, "ensure_weight_tying": None})
        # PEFT adapts the other half of tied embeddings, too, and leaves it out of `target_modules`.
        return plain and (lambda module, time: module.rpartition(".")[2] in EMBEDDINGS or plain(module, time))
    if isinstance(targets, str):
        if len(targets) > MOST_CHARACTERS:
            return None  # trainers of multimodal models list every module
        try:
            expression = compiled(targets)
        except ValueError as exc:
            message = f"target_modules is {_shortened_value(targets)}, no regular expression: {exc}"
            raise invalid_config(message) from exc
        return lambda module, time: time.fullmatch(expression, module)
    names = frozenset(targets)

    def is_targeted(module: str, _time: MatchTime) -> bool:
        """Whether the module's name, or its end after a dot, is in `target_modules`."""
        parts = module.split(".")
        return any(".".join(parts[start:]) in names for start in range(len(parts)))

    return is_targeted


def _are_names(values: list[Any]) -> bool:
    """Whether all JSON values are non-empty strings."""
    return all(isinstance(value, str) and value for value in values)


def _shortened_value(value: Any) -> str:
    """A config value for error messages, cut after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
