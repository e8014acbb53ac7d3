"""The model classes of each version of vLLM that workers know, as data files, and what an engine's command adds.

`tests/tools/vllm_classes.py` writes a data file from an installed vLLM. May import `core`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files

from lorafleet.engine.arguments import has_flag, value_of
from workers.verification.base_model import MEDIA, EngineFacts
from workers.verification.model_classes import ModelTable, model_table

DEFAULT_VERSION = "0.32"
"""What an engine is taken for until it has said its version."""


def vllm_table(version: str) -> ModelTable | None:
    """The table of a version such as `0.32.1`; None if there is none for it. Reads a file once."""
    return _version_table(".".join(version.split(".")[:2]))


@lru_cache(maxsize=8)
def _version_table(version: str) -> ModelTable | None:
    """The table of a version such as `0.32`; None without a file."""
    if not version.replace(".", "").isdigit():
        return None
    file = files(__package__).joinpath(f"vllm-{version}.json")
    return model_table(json.loads(file.read_bytes())) if file.is_file() else None


def vllm_facts(words: Sequence[str]) -> EngineFacts:
    """What is known of a vLLM by its command, before it has said its version."""
    runner, convert = value_of(words, "--runner"), value_of(words, "--convert")
    return EngineFacts(
        table=vllm_table(DEFAULT_VERSION),
        with_towers=has_flag(words, "--enable-tower-connector-lora"),
        is_pooling=True if runner == "pooling" or convert in {"embed", "classify"} else None,
        tokenizer=value_of(words, "--tokenizer") or "",
        absent=_absent_media(words),
        dtype=(value_of(words, "--dtype") or "").replace("auto", ""),
    )


def _absent_media(words: Sequence[str]) -> frozenset[str]:
    """The kinds of media that an engine is told to take none of, so that it builds no towers for them."""
    if has_flag(words, "--language-model-only"):
        return MEDIA
    try:
        limits = json.loads(value_of(words, "--limit-mm-per-prompt") or "{}")
    except ValueError:
        return frozenset()  # vLLM says what is wrong
    return frozenset(name for name in MEDIA if isinstance(limits, dict) and limits.get(name) == 0)


def with_version(facts: EngineFacts, version: str) -> EngineFacts:
    """The facts of an engine that has said its version; "": it says none, so nothing changes."""
    return replace(facts, table=vllm_table(version)) if version else facts
