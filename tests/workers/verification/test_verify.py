"""Every adapter of the corpus gets its expected verdict; verification does not read the weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import MODEL_NAME
from tests.workers.broken import BROKEN, CONFIG, GOOD, MAX_RANK, pairs, safetensors_header
from workers.core.errors import SourceError
from workers.verification.base_model import base_model
from workers.verification.manifest import AdapterRules
from workers.verification.verify import read_base_model, read_description, read_manifest


@pytest.fixture(scope="module")
def rules(agent_model) -> AdapterRules:
    base = read_base_model(agent_model)
    assert base is not None
    return AdapterRules(MAX_RANK, frozenset({MODEL_NAME}), base=base, max_bytes=64 << 20)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken_adapter_is_refused_with_its_code_and_a_hint(case, rules, tmp_path):
    with pytest.raises(SourceError) as refused:
        read_manifest(case.write(tmp_path), rules)
    message = str(refused.value)
    assert refused.value.code == case.code, message
    assert "accepted" in message or refused.value.code in ("adapter_config_invalid", "weights_corrupt"), message
    assert str(tmp_path) not in message


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_good_adapter_variant_is_accepted(case, rules, tmp_path):
    assert read_manifest(case.write(tmp_path), rules).modules


def test_corpus_explains_where_we_are_stricter_than_vllm():
    assert [case.name for case in BROKEN if (case.vllm != "refuses") != bool(case.why)] == []
    assert len({case.name for case in (*BROKEN, *GOOD)}) == len(BROKEN) + len(GOOD)


def test_too_large_adapter_is_refused_before_it_is_read(rules, tmp_path):
    folder = GOOD[0].write(tmp_path)
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(65 << 20)
    with pytest.raises(SourceError, match="at most 67108864") as refused:
        read_description(folder, rules)
    assert refused.value.code == "source_too_big"


def test_pickle_beside_safetensors_changes_nothing_and_is_noted(rules, tmp_path):
    folder = GOOD[0].write(tmp_path)
    plain = read_manifest(folder, rules)
    (folder / "adapter_model.bin").write_bytes(b"anything")
    beside = read_manifest(folder, rules)
    assert "adapter_model.bin" in beside.files_note
    assert replace(beside, files_note="") == plain


def test_verifying_a_300_mb_adapter_reads_only_its_header(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "architectures": ["LlamaForCausalLM"],
    }
    base = base_model(config, {})
    assert base is not None
    layer = {
        module.removeprefix("model.layers.0."): shape
        for module, shape in base.shapes.items()
        if module.startswith("model.layers.0.")
    }
    header = safetensors_header(pairs(64, 32, modules=layer))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(CONFIG | {"r": 64, "target_modules": [name.partition(".")[2] for name in layer]})
    )
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.write(header)
        size = max(tensor["data_offsets"][1] for tensor in json.loads(header[8:]).values())
        file.truncate(len(header) + size)  # a sparse file
    assert size > 300e6
    rules = AdapterRules(64, frozenset({MODEL_NAME}), base=base)
    before = bytes_read()
    assert read_description(tmp_path, rules).modules == 7 * 32
    assert len(header) < bytes_read() - before < 3 * len(header) + 100_000


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
