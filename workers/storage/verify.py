"""The stage `verify`: an adapter's folder read and held against the rules. Opens headers, hashes bytes, runs nothing.

Headers first, in milliseconds whatever the size; the digest reads every byte, and is made only of what passed.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import structlog

from lorafleet.service.files import mode_of
from workers.core import manifest as manifests
from workers.core.base_model import BaseModel, base_model
from workers.core.errors import SourceError
from workers.core.manifest import (
    WEIGHTS_NAME,
    AdapterDescription,
    AdapterRules,
    FileEntry,
    Manifest,
    adapter_names,
    inspect,
    is_adapter_file,
)
from workers.core.peft import CONFIG_NAME, MAX_CONFIG_BYTES
from workers.core.tensors import TensorHeader, header_bytes, parse_header

log = structlog.get_logger()

_BASE_CONFIG = "config.json"


def read_manifest(folder: Path, rules: AdapterRules) -> Manifest:
    """The manifest of the adapter in a folder; raises SourceError naming the rule it breaks."""
    described = describe(folder, rules)
    files = tuple(read_entry(path) for path in sorted(folder.iterdir()) if is_adapter_file(path.name))
    size_bytes = sum(entry.size_bytes for entry in files)
    return Manifest(
        digest=manifests.digest(files),
        rank=described.rank,
        base_model=described.base_model,
        size_bytes=size_bytes,
        modules=described.modules,
    )


def describe(folder: Path, rules: AdapterRules) -> AdapterDescription:
    """What its config and the header of its weights say: reads those alone. Raises SourceError."""
    files = sorted(folder.iterdir())
    _check_files(files, rules)
    config = folder / CONFIG_NAME
    if (size := config.stat().st_size) > MAX_CONFIG_BYTES:
        message = f"{CONFIG_NAME} has {size} bytes; accepted are at most {MAX_CONFIG_BYTES}"
        raise SourceError("source_too_big", message)
    return inspect(config.read_bytes(), read_tensors(folder / WEIGHTS_NAME), rules)


def read_tensors(path: Path) -> Mapping[str, TensorHeader]:
    """Every tensor of a safetensors file, by name; reads its header. Raises SourceError when it is none."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = header_bytes(file.read(8), size, path.name)
        return parse_header(file.read(length), size - 8 - length, path.name)


def read_entry(path: Path) -> FileEntry:
    """Size and sha256 of a file: reads every byte."""
    _check_regular(path)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256")
        return FileEntry(path.name, file.tell(), found.hexdigest())


def read_base_model(folder: Path) -> BaseModel | None:
    """The base model in a folder, from its config and the headers of its weights; None where they do not tell.

    Raises SourceError for weights that are no safetensors, OSError, ValueError for a config that is no JSON.
    """
    config = folder / _BASE_CONFIG
    said = json.loads(config.read_bytes()) if config.is_file() else {}
    weights = {
        name.removesuffix(".weight"): tensor.shape
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in read_tensors(path).items()
        if name.endswith(".weight")
    }
    return base_model(said if isinstance(said, dict) else {}, weights)


def model_folder(model: str) -> Path | None:
    """Where a base model is on this disk: the folder that was given, or what an engine has fetched of a repository into
    Hugging Face's cache. None where there is neither.
    """
    if not model:
        return None
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  (heavy; a folder needs none of it)

    try:
        config = try_to_load_from_cache(model, _BASE_CONFIG)
    except (OSError, ValueError):
        return None  # a cache that is not ours to read; no name that a repository may have
    return Path(config).parent if isinstance(config, str) else None


def known_base_model(folder: Path) -> BaseModel | None:
    """As `read_base_model`; None, and a line in the log, where the folder cannot be read."""
    try:
        return read_base_model(folder)
    except (SourceError, OSError, ValueError) as exc:
        log.warning("adapters are not held against the base model's shapes", model=str(folder), error=str(exc))
        return None


def _check_files(files: list[Path], rules: AdapterRules) -> None:
    names = [path.name for path in files]
    adapter_names(names, allow_pickle=False)
    if missing := [name for name in (CONFIG_NAME, WEIGHTS_NAME) if name not in names]:
        found = ", ".join(names[:10]) or "nothing"
        message = f"{' and '.join(missing)} missing, found {found}; accepted are both, not pickled and not in parts"
        raise SourceError("adapter_incomplete", message)
    for path in files:
        if is_adapter_file(path.name):
            _check_regular(path)
    size_bytes = sum(path.stat().st_size for path in files if is_adapter_file(path.name))
    if rules.max_bytes is not None and size_bytes > rules.max_bytes:
        message = f"the adapter has {size_bytes} bytes; accepted are at most {rules.max_bytes}, see max_adapter_bytes"
        raise SourceError("source_too_big", message)


def _check_regular(path: Path) -> None:
    if not stat.S_ISREG(mode_of(path)):  # opening a FIFO would wait for a writer for ever
        raise SourceError("adapter_invalid", f"{path.name} is not a regular file; accepted are files")
