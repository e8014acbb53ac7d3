"""The recorded corpus: base models and adapters by names, shapes and configs, with the engine's verdict on each.

Names that differ in numbers alone are one entry: `layers.#.q_proj` with the numbers that `#` stands for.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from workers.verification.tensors import TensorHeader

FOLDER = Path(__file__).parent / "recorded"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Entries = list[list[Any]]


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """What the engine did with one adapter.

    loads    it accepted the adapter
    effect   what the adapter changed: "full", "partial" (some modules were dropped), "none", or "other" than PEFT's
    ignored  the modules that it dropped
    """

    loads: bool
    effect: str = ""
    ignored: tuple[str, ...] = ()
    error: str = ""

    @property
    def serves(self) -> bool:
        """Whether the engine serves the adapter as it was trained."""
        return self.loads and self.effect == "full"


@dataclass(frozen=True, slots=True)
class CorpusRow:
    """One row of the corpus."""

    family: str
    trainer: str
    shape: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    config: bytes
    tensors: Mapping[str, TensorHeader]
    verdict: EngineVerdict | None

    @property
    def name(self) -> str:
        """The row in one line."""
        return f"{self.family}, {self.trainer}, {self.shape}"


@dataclass(frozen=True, slots=True)
class CorpusFamily:
    """A family's base model and its rows. `judged_by`: engine, modules (its LoRA manager alone), or nobody."""

    name: str
    judged_by: str
    why_not_run: str
    versions: Mapping[str, str]
    base_name: str
    config: Mapping[str, Any]
    adapter_config: Mapping[str, Any]
    weights: Mapping[str, TensorHeader]
    rows: tuple[CorpusRow, ...]


def read_all() -> list[CorpusFamily]:
    """All recorded families, by name."""
    return [read_family(path) for path in sorted(FOLDER.glob("*.json"))]


def read_family(path: Path) -> CorpusFamily:
    """One recorded family."""
    raw = json.loads(path.read_text())
    rows = []
    for row in raw["rows"]:
        verdict = row["engine"] and EngineVerdict(
            row["engine"]["loads"],
            row["engine"].get("effect", ""),
            tuple(row["engine"].get("ignored", ())),
            row["engine"].get("error", ""),
        )
        rows.append(
            CorpusRow(
                raw["family"],
                row["trainer"],
                row["shape"],
                tuple(row["files"]),
                tuple(row["folders"]),
                _changed(raw["adapter_config"], row["config"]),
                _headers(row["tensors"]),
                verdict,
            )
        )
    return CorpusFamily(
        raw["family"],
        raw["judged_by"],
        raw["why_not_run"] or "",
        raw["versions"],
        raw["base_name"],
        raw["config"],
        raw["adapter_config"],
        _headers(raw["weights"]),
        tuple(rows),
    )


def changes(common: Mapping[str, Any], config: Mapping[str, Any]) -> list[Any]:
    """What must be set in a config, and what removed from it, to make another of it."""
    different = {key: value for key, value in config.items() if key not in common or common[key] != value}
    return [different, sorted(common.keys() - config.keys())]


def _changed(common: Mapping[str, Any], change: list[Any] | None) -> bytes:
    """The bytes of a config; none of an adapter without one."""
    if change is None:
        return b""
    different, removed = change
    return json.dumps({key: value for key, value in {**common, **different}.items() if key not in removed}).encode()


def _headers(entries: Entries) -> dict[str, TensorHeader]:
    """The tensors of these entries."""
    return {name: TensorHeader(dtype, tuple(shape)) for name, dtype, shape in _expanded(entries)}


def grouped(tensors: Mapping[str, TensorHeader]) -> Entries:
    """Entries `[name, numbers, dtype, shape]` of these tensors, in order of their names."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for name, tensor in sorted(tensors.items()):
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        groups.setdefault((_NUMBER.sub("#", name), tensor.dtype, tensor.shape), []).append(numbers)
    entries: Entries = []
    for (name, dtype, shape), numbers in groups.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if sorted(numbers) == sorted(product(*columns)):
            entries.append([name, columns, dtype, list(shape)])
        else:
            entries += [[name, [[number] for number in each], dtype, list(shape)] for each in sorted(numbers)]
    return entries


def _expanded(entries: Entries) -> Iterator[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of each tensor of the entries."""
    for name, columns, dtype, shape in entries:
        for numbers in product(*columns):
            left = iter(numbers)
            yield re.sub("#", lambda _, left=left: str(next(left)), name), dtype, shape
