"""A probe is an adapter that engines take: PEFT's names and shapes, finite numbers, none of them zero."""

import json
import struct

from lorafleet.engine.lora_weights import has_zero_weights
from lorafleet.engine.probe_adapters import write_probe
from workers.verification.manifest import AdapterRules
from workers.verification.verify import read_manifest, read_tensors

MODULES = {"model.layers.0.self_attn.q_proj": (48, 64), "model.embed_tokens": (100, 64), "lm_head": (100, 64)}


def test_probe_is_an_adapter_that_changes_answers(tmp_path):
    write_probe(tmp_path / "probe", MODULES)
    found = read_manifest(tmp_path / "probe", AdapterRules(max_rank=1, base_names=frozenset()))
    assert (found.rank, found.target_modules) == (1, ("embed_tokens", "lm_head", "q_proj"))
    assert not has_zero_weights(tmp_path / "probe")
    shapes = {name: tensor.shape for name, tensor in read_tensors(tmp_path / "probe/adapter_model.safetensors").items()}
    assert shapes["base_model.model.model.embed_tokens.lora_embedding_A"] == (1, 100)
    assert shapes["base_model.model.model.embed_tokens.lora_embedding_B"] == (64, 1)
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] == (48, 1)


def test_numbers_of_a_probe_are_of_one_size_and_both_signs(tmp_path):
    write_probe(tmp_path, {"q_proj": (64, 256)})
    raw = (tmp_path / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    begin, end = header["base_model.model.q_proj.lora_A.weight"]["data_offsets"]
    numbers = set(struct.unpack(f"<{(end - begin) // 2}e", raw[8 + length + begin : 8 + length + end]))
    assert numbers == {1 / 16, -1 / 16}, "an output is as large as its input, however wide that is"
