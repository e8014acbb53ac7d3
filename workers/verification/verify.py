"""The stage `verify`: reads an adapter's folder and checks it against the rules. Executes nothing from it.

Config and tensor headers are checked first, in milliseconds. Only then every byte is read, for the digest and for
values that are not finite.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from lorafleet.service.files import mode_of
from orchestrator.model.cards import large_change
from workers.core.errors import SourceError
from workers.verification import manifest as manifests
from workers.verification.adapter_files import (
    WEIGHTS_NAME,
    adapter_file_names,
    folder_description,
    is_adapter_file,
)
from workers.verification.base_model import NO_ENGINE, BaseModel, EngineFacts, base_model
from workers.verification.beside import notes_on_files, notes_on_texts, read_names, text_head
from workers.verification.finite import FiniteCheck
from workers.verification.manifest import (
    AdapterDescription,
    AdapterRules,
    FileEntry,
    Manifest,
    check_adapter,
)
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES
from workers.verification.tensors import FLOAT_DTYPES, Shape, TensorHeader, header_bytes, parse_header

log = structlog.get_logger()

_BASE_CONFIG = "config.json"
_READ_BYTES = 1 << 18
# Weights whose shape is [out, in]. Those of quantizations are packed: bitsandbytes' `weight` (U8), AWQ's and GPTQ's
# `qweight`, compressed-tensors' `weight_packed`, mxfp4's `..._blocks`.
_PACKED_WEIGHTS = ("weight", "qweight", "weight_packed")


def read_manifest(
    folder: Path,
    rules: AdapterRules,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Check the adapter in a folder and return its manifest; raises SourceError with the rule that it breaks.

    advance  called with the number of bytes of each read
    """
    described, tensors = _read_headers(folder, rules)
    notes = _notes_beside(folder, rules)
    values = FiniteCheck((folder / WEIGHTS_NAME).stat().st_size, tensors, described.scale)

    def read_entry(path: Path) -> FileEntry:
        """The entry of one file; the values of the weights are checked on the way."""
        return read_file_entry(path, advance, values.feed if path.name == WEIGHTS_NAME else None)

    files = tuple(read_entry(path) for path in sorted(folder.iterdir()) if is_adapter_file(path.name))
    values.require_finite()
    size_bytes = sum(entry.size_bytes for entry in files)
    change = values.largest_change()
    manifest = Manifest(
        digest=manifests.digest(files),
        rank=described.rank,
        alpha=described.alpha,
        target_modules=described.target_modules,
        dtype=described.dtype,
        base_model=described.base_model,
        size_bytes=size_bytes,
        modules=described.modules,
        weight_change=change.size,
        weight_change_in=change.module,
    )
    return replace(manifest, files_note="; ".join(filter(None, (*notes, large_change(manifest)))))


def read_description(folder: Path, rules: AdapterRules) -> AdapterDescription:
    """The checked description of an adapter; of its weights only the header is read. Raises SourceError."""
    _notes_beside(folder, rules)
    return _read_headers(folder, rules)[0]


def _notes_beside(folder: Path, rules: AdapterRules) -> tuple[str, ...]:
    """What to know of the files beside the adapter's in its folder. Raises SourceError `adapter_file_unsupported`."""
    others = {path.name: path.is_dir() for path in folder.iterdir() if not is_adapter_file(path.name)}
    notes = notes_on_files(others, [name for name, is_folder in others.items() if is_folder])
    names = [name for name in read_names(others) if stat.S_ISREG(mode_of(folder / name))]
    texts = {name: text_head(folder / name) for name in names}
    return (*notes, *notes_on_texts(texts, rules.tokenizer))


def _read_headers(folder: Path, rules: AdapterRules) -> tuple[AdapterDescription, Mapping[str, TensorHeader]]:
    """The checked description of an adapter, and its tensors. Raises SourceError."""
    _check_files(sorted(folder.iterdir()), rules)
    config = folder / CONFIG_NAME
    if (size := config.stat().st_size) > MAX_CONFIG_BYTES:
        message = f"{CONFIG_NAME} has {size} bytes; accepted are at most {MAX_CONFIG_BYTES}"
        raise SourceError("source_too_big", message)
    tensors = read_tensors(folder / WEIGHTS_NAME)
    return check_adapter(config.read_bytes(), tensors, rules), tensors


def read_tensors(path: Path) -> Mapping[str, TensorHeader]:
    """The tensors of a safetensors file by name; reads only its header. Raises SourceError if it is invalid."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = header_bytes(file.read(8), size, path.name)
        return parse_header(file.read(length), size - 8 - length, path.name)


def read_file_entry(
    path: Path, advance: Callable[[int], None] = lambda _: None, feed: Callable[[bytes], None] | None = None
) -> FileEntry:
    """Size and sha256 of a regular file: reads every byte. Raises SourceError for another kind of file.

    advance  called with the number of bytes of each read
    feed     called with the bytes of each read
    """
    _check_regular_file(path)
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            if feed is not None:
                feed(chunk)
            size_bytes += len(chunk)
            advance(len(chunk))
    return FileEntry(path.name, size_bytes, digest.hexdigest())


def read_base_model(folder: Path, facts: EngineFacts = NO_ENGINE) -> BaseModel | None:
    """The base model in a folder, from its config and tensor headers, in the engine that serves it.

    None if neither they nor the engine's table say anything of its modules.

    Raises SourceError for invalid safetensors, ValueError for a config that is no JSON, OSError.
    """
    config = folder / _BASE_CONFIG
    raw_config = json.loads(config.read_bytes()) if config.is_file() else {}
    weights: dict[str, Shape] = {}
    packed: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_tensors(path).items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and tensor.dtype in FLOAT_DTYPES:
                weights[module] = tensor.shape
            elif kind in _PACKED_WEIGHTS:
                packed.add(module)
    return base_model(raw_config if isinstance(raw_config, dict) else {}, weights, packed=packed, facts=facts)


def model_folder(model: str) -> Path | None:
    """The base model's folder: `model` itself, or the repository's snapshot in Hugging Face's cache, or None."""
    if not model:
        return None
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  (heavy; a folder needs none of it)

    try:
        config = try_to_load_from_cache(model, _BASE_CONFIG)
    except (OSError, ValueError):
        return None  # the cache is unreadable, or the name is no repository's
    return Path(config).parent if isinstance(config, str) else None


def base_model_or_none(folder: Path, facts: EngineFacts = NO_ENGINE) -> BaseModel | None:
    """As `read_base_model`, but None and a log line if the folder cannot be read."""
    try:
        return read_base_model(folder, facts)
    except (SourceError, OSError, ValueError) as exc:
        log.warning("adapters are not compared with the base model's shapes", model=str(folder), error=str(exc))
        return None


def _check_files(files: list[Path], rules: AdapterRules) -> None:
    """Raises SourceError if files are missing, special, pickled or too big."""
    names = [path.name for path in files]
    folders = [path.name for path in files if path.is_dir()]
    if not adapter_file_names(names, allow_pickle=False, folders=folders):
        raise SourceError("adapter_incomplete", f"{CONFIG_NAME} missing, {folder_description(names, folders)}")
    counted = [path for path in files if is_adapter_file(path.name)]
    for path in counted:
        _check_regular_file(path)
    size_bytes = sum(path.stat().st_size for path in counted)
    if rules.max_bytes is not None and size_bytes > rules.max_bytes:
        message = f"the adapter has {size_bytes} bytes; accepted are at most {rules.max_bytes}, see max_adapter_bytes"
        raise SourceError("source_too_big", message)


def _check_regular_file(path: Path) -> None:
    """Raises SourceError for anything but a regular file."""
    if not stat.S_ISREG(mode_of(path)):  # opening a FIFO would block
        raise SourceError("adapter_invalid", f"{path.name} is not a regular file; accepted are files")
