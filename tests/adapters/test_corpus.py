"""The verification's verdict on each adapter of the corpus, against what real vLLM was seen to do with it."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.adapters.recorded import FOLDER, CorpusFamily, CorpusRow, read_all, read_family
from workers.core.errors import SourceError
from workers.engines.vllm_tables import vllm_facts
from workers.verification.manifest import AdapterDescription, AdapterRules
from workers.verification.tensors import TensorHeader
from workers.verification.verify import read_base_model, read_description

_TOWER = re.compile(r"vision|visual|projector|connector|modality_projection|image")
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.json"))

# Refused although vLLM serves them: row -> why.
REFUSED_ON_PURPOSE: Mapping[str, str] = {
    "llama, PEFT, pickled": "a pickle can run code; workers take it with `allow_pickle` alone",
}
# Ready, and refused by the engine's own word at the load: row -> why it is not seen before.
REFUSED_AT_THE_LOAD: Mapping[str, str] = {
    "phimoe, PEFT 0.14, expert by expert": "vLLM serves its architecture by transformers' own code, for which there is"
    " no table that says how its experts are stored",
}
# Ready although vLLM answers from the base model: row -> why, and what finds it.
READY_WITHOUT_EFFECT: Mapping[str, str] = {
    "llama, custom loop, all zeros": "its weights are zeros; headers do not show it, the agent's proof of effect does",
}
_LISTED = {*REFUSED_ON_PURPOSE, *REFUSED_AT_THE_LOAD, *READY_WITHOUT_EFFECT}


def written(row: CorpusRow, folder: Path) -> Path:
    """The row's files in a folder; weights are as long as they were, and empty."""
    folder.mkdir()
    for name in row.folders:
        (folder / name).mkdir()
    for name in row.files:
        (folder / name).touch()
    if row.config:
        (folder / "adapter_config.json").write_bytes(row.config)
    if row.tensors:
        write_header(folder / "adapter_model.safetensors", row.tensors)
    return folder


def write_header(path: Path, tensors: Mapping[str, TensorHeader]) -> None:
    """Write a safetensors file with these tensors, whose data is a hole."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        size = (2 if tensor.dtype in ("F16", "BF16") else 8 if tensor.dtype == "I64" else 4) * _count(tensor.shape)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def rules_of(family: CorpusFamily, folder: Path) -> AdapterRules:
    """The rules of a worker that serves this family's model, with vLLM's defaults."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.config))
    write_header(folder / "model.safetensors", family.weights)
    is_pooling = bool({"SEQ_CLS", "FEATURE_EXTRACTION"} & {family.adapter_config.get("task_type")})
    base = read_base_model(folder, vllm_facts(("--runner", "pooling") if is_pooling else ()))
    return AdapterRules(max_rank=16, base_names=frozenset({family.base_name}), base=base)


def our_verdict(row: CorpusRow, rules: AdapterRules, folder: Path) -> AdapterDescription | SourceError:
    """The description of an accepted adapter, or the error of a refused one."""
    try:
        return read_description(written(row, folder), rules)
    except SourceError as exc:
        return exc


@cache
def family(name: str) -> CorpusFamily:
    """A recorded family, read once."""
    return read_family(FOLDER / f"{name}.json")


def test_corpus_has_thirty_families_and_a_hundred_rows_judged_by_the_engine() -> None:
    families = read_all()
    judged = [row for each in families for row in each.rows if row.verdict]
    assert len(families) >= 30
    assert len(judged) >= 100
    assert sum(len(each.rows) for each in families if each.judged_by == "engine") >= 100
    assert len({row.trainer for row in judged}) >= 8
    assert all(each.why_not_run for each in families if each.judged_by != "engine"), (
        "a family that did not run says why"
    )
    names = Counter(row.name for each in families for row in each.rows)
    assert names.keys() >= _LISTED


@pytest.mark.parametrize("name", FAMILIES)
def test_verdict_is_the_engines(name: str, tmp_path: Path) -> None:
    rules = rules_of(family(name), tmp_path / "base")
    wrong = []
    for number, row in enumerate(family(name).rows):
        if row.verdict is None:
            continue
        ours = our_verdict(row, rules, tmp_path / str(number))
        is_refused, is_listed = isinstance(ours, SourceError), row.name in REFUSED_ON_PURPOSE
        if is_refused != is_listed and row.name in _LISTED:
            wrong.append(f"{row.name}: is in a list of exceptions, and is none any more")
        if isinstance(ours, SourceError):
            if row.verdict.serves and row.name not in REFUSED_ON_PURPOSE:
                wrong.append(f"{row.name}: refused, and vLLM serves it: {ours.code}: {ours}")
            elif row.verdict.effect == "partial" and all(map(_TOWER.search, row.verdict.ignored)):
                wrong.append(f"{row.name}: refused, and vLLM serves its language part: {ours.code}: {ours}")
        elif not row.verdict.loads and row.name not in REFUSED_AT_THE_LOAD:
            wrong.append(f"{row.name}: ready, and vLLM refuses it: {row.verdict.error}")
        elif row.verdict.effect == "partial" and len(ours.verdict.ignored) != len(row.verdict.ignored):
            wrong.append(
                f"{row.name}: ready, vLLM drops {row.verdict.ignored[:3]}, said are {ours.verdict.ignored[:3]}"
            )
        elif row.verdict.effect == "full" and ours.verdict.ignored:
            wrong.append(
                f"{row.name}: said to be served in part, and vLLM serves all of it: {ours.verdict.ignored[:3]}"
            )
        elif row.verdict.effect in ("none", "other") and row.name not in READY_WITHOUT_EFFECT:
            wrong.append(f"{row.name}: ready, and vLLM's answers are not the adapter's ({row.verdict.effect})")
    assert not wrong, "\n".join(wrong)
