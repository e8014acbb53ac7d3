"""Reads the model classes of the installed vLLM: `python -P tests/tools/vllm_classes.py FILE`.

Writes what `workers.verification.model_classes` reads. Each class is built once on PyTorch's meta device, from the
default configuration that transformers has for it, cut to a few layers: no weights, no memory. What vLLM's own LoRA
manager then says of its modules is written down. A class that cannot be built here keeps its static tables, without
modules.

Needs no network. Packages that vLLM's models import for pictures and sound, and that are not installed, are replaced
by empty ones. `PYTHONPATH=FOLDER` reads another version's Python code over the installed kernels.
"""

import contextlib
import importlib.abc
import importlib.machinery
import inspect
import json
import logging
import os
import re
import signal
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="CRITICAL",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="",
)

_REPLACED = frozenset(("torchvision", "torchaudio", "terratorch"))
_LAYERS = 4
_SECONDS = 60
_PARTS = ("text_config", "vision_config", "audio_config", "thinker_config", "llm_config", "language_config")
# Attributes of configurations in their repositories that transformers' defaults lack.
_MISSING: Mapping[str, Any] = {
    "score_func": "sigmoid", "head_dim": 64, "first_k_dense_replace": 1, "num_local_experts": 4, "rotary_dim": 64,
    "block_dim": 1024, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_auto_adjust_ff_dim": False,
    "position_embedding_type": "absolute", "norm_topk_prob": True, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "embed_dim": 1280, "image_size": 224, "downsample_factor": 4,
    "conv_bias": False, "norm_eps": 1e-5, "route_norm": True, "route_scale": 1.0, "mlp_ratio": 4, "use_qk_norm": False,
    "conv_dim": 1024, "block_ff_dim": 1024, "scoring_func": "sigmoid", "zero_expert_type": "identity",
    "zero_expert_num": 1, "patch_size": 16,
}  # fmt: skip
# Architectures whose configuration transformers does not have: the model_type of another that has the same fields.
_LIKE: Mapping[str, str] = {
    "InternLM3ForCausalLM": "llama", "IQuestCoderForCausalLM": "llama", "LLaMAForCausalLM": "llama",
    "TeleChat3ForCausalLM": "llama", "MiMoForCausalLM": "qwen2", "PhiMoEForCausalLM": "phimoe",
    "SolarForCausalLM": "solar", "Qwen2ForRewardModel": "qwen2", "Qwen2ForProcessRewardModel": "qwen2",
    "Rnj1ForCausalLM": "gemma3_text", "LlamaBidirectionalModel": "llama",
    "LlamaBidirectionalForSequenceClassification": "llama", "VoyageQwen3BidirectionalEmbedModel": "qwen3",
    "HF_ColBERT": "bert", "BgeM3EmbeddingModel": "xlm-roberta", "BertSpladeSparseEmbeddingModel": "bert",
    "Llama4ForCausalLM": "llama4_text", "ExaoneMoEForCausalLM": "exaone_moe", "MistralLarge3ForCausalLM": "deepseek_v3",
}  # fmt: skip
# What variants of one class differ in: the modules of all of them are its modules.
_VARIANTS: tuple[Mapping[str, Any], ...] = ({}, {"q_lora_rank": None}, {"tie_word_embeddings": True})
# Kinds of layers that the first layers of the default configuration do not have.
_VARIANTS_OF: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "jamba": ({"attn_layer_offset": 1, "attn_layer_period": 2},),
    "granitemoehybrid": ({"layer_types": ["full_attention"] * 32}, {"num_local_experts": 0}),
    "lfm2": ({"layer_types": ["conv"] * 32},),
    "lfm2_vl": ({"layer_types": ["conv"] * 32},),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"] * 16},),
    "llama4": ({"interleave_moe_layer_step": 2},),
    "llama4_text": ({"interleave_moe_layer_step": 2},),
    "qwen2_moe": ({"mlp_only_layers": [0]},),
    "qwen3_moe": ({"mlp_only_layers": [0]},),
    "qwen3_next": ({"mlp_only_layers": [0]},),
    "qwen3_vl_moe": ({"mlp_only_layers": [0]},),
    "deepseek_v3": ({"first_k_dense_replace": 1},),
    "glm4_moe": ({"first_k_dense_replace": 1},),
}


class _Replacement(types.ModuleType):
    """An empty package: its names that begin with a capital are empty classes."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Replacement(f"{self.__name__}.{name}")

    def __call__(self, *_args: Any, **_named: Any) -> "_Replacement":
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty package in place of each that is not installed."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        is_replaced = name.partition(".")[0] in _REPLACED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_replaced else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Replacement(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds."""

    def stop(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- configurations -----------------------------------------------------------------------------------------------


def _model_types() -> dict[str, str]:
    """Architecture -> model_type, by transformers' own tables."""
    from transformers.models.auto import modeling_auto

    found = dict(_LIKE)
    for name in sorted(vars(modeling_auto)):
        if name.endswith("_MAPPING_NAMES"):
            for model_type, architectures in getattr(modeling_auto, name).items():
                for architecture in architectures if isinstance(architectures, (tuple, list)) else [architectures]:
                    found.setdefault(architecture, model_type)
    return found


def _cut(config: Any) -> None:
    """Leave a configuration, and its parts, a few layers; lists with an entry for each layer are cut, too."""
    for part in _PARTS:
        if hasattr(getattr(config, part, None), "to_dict"):
            _cut(getattr(config, part))
    layers = getattr(config, "num_hidden_layers", None)
    # Gemma 4 says some things by layer numbers.
    if isinstance(layers, int) and layers > _LAYERS and "gemma4" not in str(getattr(config, "model_type", "")):
        for key, value in list(vars(config).items()):
            if isinstance(value, (list, tuple)) and len(value) == layers:
                setattr(config, key, [*value[: _LAYERS - 1], value[-1]])
        with contextlib.suppress(Exception):
            config.num_hidden_layers = _LAYERS
    if isinstance(getattr(config, "depth", None), int):
        config.depth = min(config.depth, 2)


def _config(architecture: str, model_type: str, variant: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """A small configuration of an architecture; None if the variant does not apply to it."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config()
    if any(not hasattr(text, key) or getattr(text, key) == value for key, value in variant.items()):
        return None
    for key, value in variant.items():
        setattr(text, key, value)
    for name, kind in getattr(config, "sub_configs", {}).items():
        if getattr(config, name, None) is None and name in _PARTS and hasattr(kind, "to_dict"):
            setattr(config, name, kind())
    for part in (config, *(getattr(config, part, None) for part in _PARTS)):
        for key, value in extra.items():
            if hasattr(part, "to_dict") and not hasattr(part, key):
                setattr(part, key, value)
    _cut(config)
    config.architectures = [architecture]
    return config


# --- one class ----------------------------------------------------------------------------------------------------


def _start() -> None:
    """Prepare vLLM for building models in this process, without a device."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.model_executor.models import registry

    logging.disable(logging.CRITICAL)
    # vLLM inspects a class in a process of its own, which would not have the replaced packages.
    lazy = registry._LazyRegisteredModel
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        parallel_state._EP = parallel_state._EP or parallel_state._TP


def _built(config: Any) -> Any:
    """The model of a configuration, on the meta device."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as folder, _within(_SECONDS):
        config.save_pretrained(folder)
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=64,
            max_num_batched_tokens=4096,
            skip_mm_profiling=True,
            mm_processor_cache_gb=0,
        )
        try:
            return _initialized(arguments.create_engine_config())
        except NotImplementedError as exc:
            if "supported only for CUDA" not in str(exc):
                raise
        # Kernels that vLLM has for GPUs alone: the modules are the same on each platform.
        with mock.patch.object(type(current_platform), "is_cuda_alike", return_value=True):
            return _initialized(arguments.create_engine_config())


def _initialized(engine_config: Any) -> Any:
    """The model of an engine's configuration, on the meta device."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_current_vllm_config(engine_config), torch.device("meta"):
        return initialize_model(engine_config)


def _variants(architecture: str, model_type: str) -> list[Any]:
    """The models of an architecture's variants; empty if none can be built here."""
    models = []
    for variant in (*_VARIANTS, *_VARIANTS_OF.get(model_type, ())):
        extra: dict[str, Any] = {}
        # An attribute that only the repositories' configurations have is added when it is missed.
        for _ in range(8):
            try:
                config = _config(architecture, model_type, variant, extra)
                if config is not None:
                    models.append(_built(config))
                break
            except AttributeError as exc:
                missing = re.search(r"no attribute '(\w+)'", str(exc))
                if missing is None or missing[1] in extra or missing[1] not in _MISSING:
                    _say(architecture, exc)
                    break
                extra[missing[1]] = _MISSING[missing[1]]
            except BaseException as exc:  # noqa: BLE001  (whatever a model's code raises: it is not built)
                _say(architecture, exc)
                break
    return models


def _say(architecture: str, exc: BaseException) -> None:
    """Report why a class is not built."""
    sys.stderr.write(
        f"{architecture}: not built: {type(exc).__name__}: {str(exc).splitlines()[0][:160] if str(exc) else ''}\n"
    )


def _pattern(name: str) -> str:
    """A module's name with `#` for its numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


# Renames of transformers for parameters of other names than `weight`, which no adapter has.
_OF_PARAMETERS = frozenset(("LayerNorm.gamma", "LayerNorm.beta", ".weight_g$", ".weight_v$"))


def _renames(holder: Any) -> dict[str, Any] | None:
    """The names that a class changes in adapters; None if it changes them in a way that no data can say."""
    mapper = getattr(holder, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    mapper = mapper.get_rename_mapper()
    renamings = [each for each in mapper.orig_to_new_renaming if not _OF_PARAMETERS & {*each.source_patterns}]
    if any(type(each).__name__ != "WeightRenaming" or len(each.source_patterns) != 1 for each in renamings):
        return None
    rows = {
        "expressions": [
            *([each.source_patterns[0], each.target_patterns[0]] for each in renamings),
            *([key.pattern, new] for key, new in mapper.orig_to_new_regex.items()),
        ],
        "parts": [list(row) for row in mapper.orig_to_new_substr.items()],
        "beginnings": [list(row) for row in mapper.orig_to_new_prefix.items()],
        "ends": [list(row) for row in mapper.orig_to_new_suffix.items()],
    }
    return {key: value for key, value in rows.items() if value}


def _towers(model: Any) -> dict[str, Any]:
    """Where a multimodal class has its language model and its towers."""
    from vllm.model_executor.models.interfaces import supports_multimodal

    if not (supports_multimodal(model) and hasattr(model, "get_mm_mapping")):
        return {}
    with contextlib.suppress(Exception):
        keys = model.get_mm_mapping() if not isinstance(model, type) else model.get_mm_mapping(object.__new__(model))
        return {
            "language": keys.language_model[0],
            "towers": [*keys.tower_model, *keys.connector],
            "takes_towers": bool(model.supports_tower_connector_lora),
        }
    return {}


def _packed(model: Any) -> tuple[dict[str, list[str]], list[str]]:
    """The packed modules of a class, and the parts of one expert."""
    from vllm.lora.utils import process_packed_modules_mapping

    packed = process_packed_modules_mapping(model)
    experts = packed.pop("experts", [])
    parts = list(dict.fromkeys(name.split(".")[-1] for name in experts))
    return packed, parts


def _is_wrapped(model: Any, name: str, module: Any, packed: Mapping[str, list[str]]) -> bool:
    """Whether the LoRA manager has a wrapper for a module; it leaves some kinds of layers as they are, and is silent.

    source  vLLM 0.32 lora/model_manager.py _create_lora_modules, lora/utils.py from_layer
    """
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import _all_lora_classes
    from vllm.model_executor.layers.linear import LinearBase

    if not isinstance(module, LinearBase):
        return True
    parts = packed.get(name.rpartition(".")[2], [])
    return any(
        each.can_replace_layer(
            source_layer=module, lora_config=LoRAConfig(), packed_modules_list=parts, model_config=model.config
        )
        for each in _all_lora_classes
    )


def _held_past_the_tree(model: Any) -> set[int]:
    """Ids of modules that an object beside the tree of modules holds, such as an attention's implementation.

    vLLM's LoRA manager replaces modules in the tree alone, so these run without what adapters change.
    """
    beside = (value for module in model.modules() for value in vars(module).values())
    objects = (each for each in beside if type(each).__module__.startswith("vllm.") and hasattr(each, "__dict__"))
    return {id(held) for each in objects for held in vars(each).values() if held is not None}


def _is_read_alone(owner: Any, attribute: str) -> bool:
    """Whether the owner of a module reads its weight, and neither calls the module nor hands it on."""
    functions = [
        function
        for base in type(owner).__mro__
        if base.__module__.startswith("vllm.")
        for function in vars(base).values()
        if inspect.isfunction(function)
    ]
    used = " ".join(map(inspect.getsource, functions))
    is_read = re.search(rf"self\.{attribute}\.weight\b", used)
    return bool(is_read) and re.search(rf"self\.{attribute}\b(?!\.|\s*=[^=]|\s*:)", used) is None


def _calls_past_the_tree(cls: Any) -> list[str]:
    """Of a class that is not built here: names of the modules that latent attention holds itself."""
    fused = "transformers" in cls.__module__  # vLLM fuses transformers' latent attention by itself
    uses = fused or "kv_b_proj=" in inspect.getsource(sys.modules[cls.__module__])
    return ["kv_b_proj"] if uses else []


def _entry(cls: Any, models: list[Any]) -> dict[str, Any] | None:
    """What the data file says of one class; None if its names cannot be said by data."""
    from vllm.lora.utils import get_supported_lora_modules, is_supported_lora_module
    from vllm.model_executor.models.interfaces_base import is_pooling_model

    first = models[0] if models else cls
    renames = _renames(first)
    if renames is None:
        return None
    entry: dict[str, Any] = {"renames": renames, **_towers(first)}
    entry["skipped"] = list(getattr(cls, "lora_skip_prefixes", []))
    entry["has_3d_experts"] = bool(cls.is_3d_moe_weight)
    entry["is_pooling"] = bool(is_pooling_model(cls))
    entry["packed"] = {key: list(parts) for key, parts in (getattr(cls, "packed_modules_mapping", None) or {}).items()}
    linear: set[str] = set(getattr(cls, "embedding_modules", {}))
    modules: set[str] = set()
    uncalled: set[str] = set() if models else set(_calls_past_the_tree(cls))
    for model in models:
        held = _held_past_the_tree(model)
        supported = get_supported_lora_modules(model)
        linear |= set(supported)
        packed, parts = _packed(model)
        entry["packed"] |= packed
        entry["expert_parts"] = parts or entry.get("expert_parts", [])
        seen: set[int] = set()
        for name, module in model.named_modules(remove_duplicate=False):
            if not is_supported_lora_module(name, module, supported):
                continue
            if not _is_wrapped(model, name, module, packed):
                continue
            # A module that is held under a second name is found by the first alone, but for `lm_head`.
            if id(module) not in seen or "lm_head" in name:
                modules.add(_pattern(name))
                parent, _, last = name.rpartition(".")
                if id(module) in held or _is_read_alone(model.get_submodule(parent), last):
                    uncalled.add(_pattern(name))
            seen.add(id(module))
    entry["uncalled"] = sorted(uncalled)
    if models:
        entry |= {"linear": sorted(linear), "modules": sorted(modules)}
    return {key: value for key, value in entry.items() if value or key == "modules"}


# --- all classes --------------------------------------------------------------------------------------------------


def read_table(only: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The table of the installed vLLM; of these architectures alone if any are given."""
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_lora

    sys.meta_path.append(_Finder())
    _start()
    model_types = _model_types()
    drafts = set(registry._SPECULATIVE_DECODING_MODELS)
    classes: dict[str, dict[str, Any]] = {}
    architectures: dict[str, str] = {}
    built: dict[Any, dict[str, Any]] = {}
    pending: list[tuple[str, Any]] = []
    for architecture in sorted(registry.ModelRegistry.get_supported_archs()):
        if architecture in drafts or (only and architecture not in only):
            continue
        try:
            cls = registry.ModelRegistry.models[architecture].load_model_cls()
        except Exception as exc:  # noqa: BLE001
            _say(architecture, exc)
            continue
        if not supports_lora(cls):
            continue
        models = _variants(architecture, model_types[architecture]) if architecture in model_types else []
        if not models:
            # A class by transformers' code is another one for each architecture: only a built one says what it has.
            if not cls.__module__.startswith("vllm.model_executor.models.transformers"):
                pending.append((architecture, cls))
        elif (entry := _entry(cls, models)) is not None:
            built.setdefault(cls, entry)
            _add(architecture, cls.__name__, entry, classes, architectures)
    for architecture, cls in pending:
        entry = built[cls] if cls in built else _entry(cls, [])
        if entry is not None:
            _add(architecture, cls.__name__, entry, classes, architectures)
    return {
        "version": _version(),
        "text_names": _has_text_names(),
        "all_heads": _takes_all_heads(),
        "architectures": architectures,
        "classes": classes,
    }


def _add(
    architecture: str,
    name: str,
    entry: dict[str, Any],
    classes: dict[str, dict[str, Any]],
    architectures: dict[str, str],
) -> None:
    """Add an entry under its class's name, or under its architecture's where the class differs from one to another."""
    key = name if classes.setdefault(name, entry) == entry else f"{name}/{architecture}"
    classes[key] = entry
    architectures[architecture] = key


def _version() -> str:
    """The version of vLLM's Python code, without its build."""
    from vllm.version import __version__

    return ".".join(str(__version__).split("+")[0].split(".")[:2])


def _has_text_names() -> bool:
    """Whether a multimodal class also finds its language model under the names of the text model alone."""
    from vllm.lora.model_manager import LoRAModelManager

    return hasattr(LoRAModelManager, "_get_text_lora_names")


def _takes_all_heads() -> bool:
    """Whether classification heads are taken for every model that classifies, not for cross-encoders alone."""
    from vllm.lora import layers

    return hasattr(layers, "TokenClassificationHeadWithLoRA")


def text_of(table: Mapping[str, Any]) -> str:
    """The data file of a table: a line for each class, so that changes can be read."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items() if key != "classes"]
    classes = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(table["classes"].items())
    )
    return "{\n" + ",\n".join([*lines, '  "classes": {\n' + classes + "\n  }"]) + "\n}\n"


def main() -> None:
    target, only = Path(sys.argv[1]), frozenset(sys.argv[2:])
    target.write_text(text_of(read_table(only)))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads do not end by themselves


if __name__ == "__main__":
    main()
