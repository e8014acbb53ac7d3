"""The files of an adapter: which of a folder's files engines read, and what a folder without them is.

source   vLLM 0.32 lora/lora_model.py `from_local_checkpoint`: `adapter_model.safetensors`, whatever else lies beside
"""

import re
from collections.abc import Collection

from workers.core.errors import SourceError
from workers.verification.peft import CONFIG_NAME

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
MLX_WEIGHTS = ("adapters.safetensors", "adapters.npz")
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
DIFFUSERS_MODEL = "model_index.json"

_PART = re.compile(r"adapter_model-\d+-of-\d+\.(?:safetensors|bin)")
_CHECKPOINT = re.compile(r"(?:checkpoint|global_step|epoch|step)[-_]?(\d+)")
_CONSOLIDATED = re.compile(r"consolidated(?:[-.]\d+(?:-of-\d+)?)?\.(?:safetensors|pth?)")
_MEGATRON_FILES = ("latest_checkpointed_iteration.txt", "latest_train_state.pt", "model_optim_rng.pt")
_NEMO_FOLDERS = {"weights", "context"}
_MODEL_WEIGHTS = re.compile(r"(?:pytorch_)?model(?:[-.]\d+-of-\d+)?\.(?:safetensors|bin)")


def is_adapter_file(name: str) -> bool:
    """Whether engines read a file of this name: only such files are fetched, counted and hashed."""
    return name in (CONFIG_NAME, WEIGHTS_NAME)


def adapter_file_names(names: Collection[str], *, allow_pickle: bool, folders: Collection[str] = ()) -> frozenset[str]:
    """The names of an adapter's files among the names in its source folder; empty without a config.

    Pickled weights count only if there are no safetensors and `allow_pickle` is set.

    folders  the names of the subfolders, as far as they are known: for the message of an error
    raises   SourceError `adapter_pickled`; `adapter_incomplete` if there are no weights that engines read
    """
    if CONFIG_NAME not in names:
        return frozenset()
    if WEIGHTS_NAME in names:
        return frozenset(filter(is_adapter_file, names))
    pickles = [name for name in PICKLES if name in names]
    if not pickles:
        raise SourceError("adapter_incomplete", f"{WEIGHTS_NAME} missing, {folder_description(names, folders)}")
    if not allow_pickle:
        message = f"{pickles[0]} is a pickle, which can run any code when it is read; accepted is {WEIGHTS_NAME}"
        advice = "convert it with safetensors.torch.save_file, or let workers do that: allow_pickle"
        raise SourceError("adapter_pickled", f"{message}: {advice}")
    return frozenset((CONFIG_NAME, pickles[0]))


def folder_description(names: Collection[str], folders: Collection[str] = ()) -> str:
    """What a folder without an adapter is, and what to do: a clause for an error message.

    names    of its files
    folders  of its subfolders
    """
    if description := _weights_hint(names, folders) or _checkpoints_hint(names, folders):
        return description
    # No other names: whoever names a folder by mistake learns nothing of what others keep there.
    known = [name for name in (CONFIG_NAME, WEIGHTS_NAME) if name in names]
    counts = ((len({*names} - {*folders, *known}), "other file"), (len(folders), "folder"))
    found = ", ".join([*known, *(f"{count} {noun}{'s'[: count != 1]}" for count, noun in counts if count)])
    return f"found {found or 'nothing'}; accepted are {CONFIG_NAME} and {WEIGHTS_NAME}, not pickled and not in parts"


def unread_weights(names: Collection[str], folders: Collection[str] = ()) -> str:
    """What the weights in a folder without an adapter_config.json are, as of `folder_description`; "" without any."""
    if found := [name for name in (WEIGHTS_NAME, *PICKLES) if name in names]:
        return f"found {found[0]} and no {CONFIG_NAME}; accepted are both: put the config beside the weights"
    if description := _weights_hint(names, folders):
        return description
    others = sorted(name for name in names if name.endswith(".safetensors"))
    text = f"accepted are {CONFIG_NAME} and {WEIGHTS_NAME}, as PEFT saves them"
    return f"found {others[0]}, a name that no engine reads; {text}" if others else ""


def _weights_hint(names: Collection[str], folders: Collection[str]) -> str:
    """Of weights in a format that engines do not read as an adapter; "" without any."""
    hints = (_mlx_hint, _weight_parts_hint, _diffusers_hint, _gguf_hint, _mistral_hint, _megatron_hint, _whole_model)
    return next((description for hint in hints if (description := hint(names, folders))), "")


def _mlx_hint(names: Collection[str], _: Collection[str]) -> str:
    """Of the output of `mlx_lm.lora`."""
    weights = [name for name in MLX_WEIGHTS if name in names]
    if not weights:
        return ""
    return (
        f"found {weights[0]}: an MLX adapter; accepted is PEFT's format: convert it (lora_a and lora_b transposed"
        " into lora_A.weight and lora_B.weight), or fuse it with `mlx_lm.fuse` and serve the whole model"
    )


def _weight_parts_hint(names: Collection[str], _: Collection[str]) -> str:
    """Of weights in several files, which PEFT reads and engines do not."""
    parts = sorted(filter(_PART.fullmatch, names))
    if not parts:
        return ""
    return (
        f"found {len(parts)} parts ({parts[0]}, ...): accepted is one file: join them, by loading all with"
        f" safetensors.torch.load_file and saving their tensors together as {WEIGHTS_NAME}"
    )


def _checkpoints_hint(_: Collection[str], folders: Collection[str]) -> str:
    """Of a trainer's output folder with its checkpoints."""
    steps = sorted((int(match[1]), name) for name in folders if (match := _CHECKPOINT.fullmatch(name)))
    if not steps:
        return ""
    return (
        f"found a trainer's output folder with {len(steps)} checkpoints; accepted is one of them as the source,"
        f" such as its folder {steps[-1][1]} (the last)"
    )


def _diffusers_hint(names: Collection[str], _: Collection[str]) -> str:
    """Of an image model, or its LoRA."""
    if DIFFUSERS_WEIGHTS in names:
        return f"found {DIFFUSERS_WEIGHTS}: a LoRA of diffusers, for image models; accepted is PEFT's format"
    if DIFFUSERS_MODEL in names:
        return f"found {DIFFUSERS_MODEL}: an image model of diffusers; accepted are adapters of language models"
    return ""


def _gguf_hint(names: Collection[str], _: Collection[str]) -> str:
    """Of llama.cpp's format."""
    files = sorted(name for name in names if name.endswith(".gguf"))
    text = "found a .gguf file, which llama.cpp alone reads; accepted is the adapter before its conversion"
    return text if files else ""


def _mistral_hint(names: Collection[str], _: Collection[str]) -> str:
    """Of the output of mistral-finetune: its LoRA, or the model into which it was merged."""
    weights = [name for name in sorted(names) if name == "lora.safetensors" or _CONSOLIDATED.fullmatch(name)]
    if not weights:
        return ""
    return (
        f"found {weights[0]}: Mistral's own format, of mistral-finetune or a release; accepted is PEFT's format, whose"
        " names are others and whose q and k are in another order: train with PEFT, or convert it"
    )


def _megatron_hint(names: Collection[str], folders: Collection[str]) -> str:
    """Of a checkpoint of NeMo, Megatron or torch's distributed format, whole or an adapter's."""
    found = sorted(name for name in names if name.endswith((".nemo", ".distcp")) or name in _MEGATRON_FILES)
    if not found and not {*folders} >= _NEMO_FOLDERS:
        return ""
    return (
        f"found {found[0] if found else 'weights/ and context/'}: a checkpoint of NeMo or Megatron; accepted is PEFT's"
        " format: export it with NeMo's llm.peft.export_lora, or Megatron-Bridge's AutoBridge.export_adapter_ckpt"
    )


def _whole_model(names: Collection[str], _: Collection[str]) -> str:
    """Of a full fine-tune, or a model into which an adapter was merged."""
    weights = sorted(filter(_MODEL_WEIGHTS.fullmatch, names))
    if not weights:
        return ""
    return (
        f"found {weights[0]}: a whole model (a full fine-tune, or an adapter merged into its base); accepted is the"
        " folder that training wrote before the merge, or serve the whole as a base model of its own"
    )
