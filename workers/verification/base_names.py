"""Whether an adapter's declared base model is the one that a worker serves, by its name alone.

The name says little: trainers write hub names, folders, quantized copies and mirrors. Shapes decide; the name keeps
adapters of another model with the same shapes out.
"""

import re
from collections.abc import Iterable
from typing import Literal

BaseModelCheck = Literal["name", "exact", "off"]

# Endings of names of quantized copies: the weights are those of the model, stored otherwise.
_QUANTIZED = re.compile(
    r"[-_.](?:unsloth[-_]bnb[-_]4bit|bnb[-_](?:4|8)bit|(?:4|8)bit|awq(?:[-_]int4)?|gptq(?:[-_]int[48])?|fp8(?:[-_]dynamic)?"
    r"|int[48]|w\da\d+|quantized\.w\da\d+|nvfp4|mxfp4|nf4|hqq|dynamic|bf16|fp16|gguf|mlx|unsloth)$"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"models--(?:.+--)?(?P<name>.+)")
_VERSION = re.compile(r"\d{1,4}")
_FRAMEWORKS = frozenset(("transformers", "pytorch", "keras", "safetensors"))


def is_same_base(declared: str, names: Iterable[str], check: BaseModelCheck) -> bool:
    """Whether an adapter's declared base model is one of these names; always with `check` "off" or none declared.

    `name` compares the model's own name case-insensitively, without owner, folders and quantization.
    """
    if check == "off" or not declared.strip():
        return True
    if check == "exact":
        return declared in set(names)
    known = {_plain(_last_part(_parts(name))) for name in names}
    return not known.isdisjoint(_model_names(declared))


def _model_names(name: str) -> set[str]:
    """The model's own name: of a hub name, a folder of any system, or a cache of Hugging Face, ModelScope or Kaggle.

    Kaggle's `model/transformers/variation/1` is two names: the variation's, and that of both.
    """
    parts = _parts(name)
    if len(parts) > 1 and _VERSION.fullmatch(parts[-1]):
        parts = parts[:-1]
        if len(parts) > 2 and parts[-2].lower() in _FRAMEWORKS:
            return {_plain(parts[-1]), _plain(f"{parts[-3]}-{parts[-1]}")}
    return {_plain(_last_part(parts))}


def _parts(name: str) -> list[str]:
    """The parts of a path of any system, without Hugging Face's `snapshots/<commit>`."""
    parts = [part.strip() for part in re.split(r"[/\\]+", name) if part.strip()]
    if len(parts) > 2 and parts[-2] == "snapshots" and (_COMMIT.fullmatch(parts[-1]) or _CACHED.fullmatch(parts[-3])):
        return parts[:-2]
    return parts


def _last_part(parts: list[str]) -> str:
    """The last part of a path; of a folder in Hugging Face's cache, `models--org--name`, the name."""
    last = parts[-1] if parts else ""
    cached = _CACHED.fullmatch(last)
    return cached["name"] if cached else last


def _plain(name: str) -> str:
    """A model's name in lower case, without the endings of quantized copies."""
    plain = name.lower().replace("___", ".")  # ModelScope's folders: Qwen2___5
    while (shorter := _QUANTIZED.sub("", plain)) != plain and shorter:
        plain = shorter
    return plain
