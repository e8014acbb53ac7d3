"""Writes an adapter under other module names, with the bytes of its weights as they are."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from workers.core.errors import SourceError
from workers.verification.adapter_files import WEIGHTS_NAME, adapter_file_names, folder_description
from workers.verification.base_model import NO_ENGINE, EngineFacts
from workers.verification.manifest import AdapterRules
from workers.verification.peft import CONFIG_NAME
from workers.verification.renames import RenamePlan, plan_renames
from workers.verification.verify import read_base_model, read_tensors

_ALIGNMENT = 8  # of a header's length, as safetensors writes it


def rename_modules(
    folder: Path, into: Path, *, base: Path | None, facts: EngineFacts = NO_ENGINE, language: str | None = None
) -> RenamePlan:
    """Write the adapter of a folder into a new one, under names that its base model has; returns what was done.

    base      folder of the base model that will serve it, with its config and weights; None: it is not looked at
    facts     what is known of the engine that will serve it
    language  whose names its language model gets; None: those that the engine finds
    raises    SourceError, and nothing is written; FileExistsError if `into` has files; OSError
    """
    entries = list(folder.iterdir())
    names, folders = [path.name for path in entries], [path.name for path in entries if path.is_dir()]
    if not adapter_file_names(names, allow_pickle=False, folders=folders):
        raise SourceError("adapter_incomplete", f"{CONFIG_NAME} missing, {folder_description(names, folders)}")
    if into.exists() and any(into.iterdir()):
        raise FileExistsError(f"{into} is not empty; name a new folder")
    base_model = read_base_model(base, facts) if base else None
    if base and base_model is None:
        raise SourceError("modules_unmatched", f"{base} has no weights to compare with; accepted is a model's folder")
    rules = AdapterRules(max_rank=None, base_names=frozenset(), base_check="off", base=base_model)
    config = (folder / CONFIG_NAME).read_bytes()
    plan = plan_renames(config, read_tensors(folder / WEIGHTS_NAME), rules, language=language)
    into.mkdir(parents=True, exist_ok=True)
    _write_renamed(folder / WEIGHTS_NAME, into / WEIGHTS_NAME, plan.names)
    (into / CONFIG_NAME).write_bytes(plan.config)
    return plan


def _write_renamed(source: Path, target: Path, names: Mapping[str, str]) -> None:
    """Copy a valid safetensors file with renamed tensors; the data behind the header is the same. Raises OSError."""
    with source.open("rb") as old:
        length = int.from_bytes(old.read(8), "little")
        header = json.loads(old.read(length))
        renamed = {names.get(name, name): entry for name, entry in header.items()}  # `__metadata__` keeps its name
        raw = json.dumps(renamed, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % _ALIGNMENT)
        with target.open("xb") as new:
            new.write(len(raw).to_bytes(8, "little") + raw)
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.fsync(new.fileno())
