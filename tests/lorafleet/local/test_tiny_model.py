import hashlib
import json
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lorafleet.local import tiny_model

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensors(path: Path) -> dict[str, dict]:
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    header.pop("__metadata__")
    return header


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    tiny_model.make_model(root / "model")
    tiny_model.make_adapters(root / "adapters")
    return root


def test_the_same_seeds_give_the_same_bytes(made, tmp_path):
    tiny_model.demo_tokenizer.cache_clear()
    tiny_model.word_tokens.cache_clear()
    tiny_model.lm_head_weight.cache_clear()
    tiny_model.make_model(tmp_path / "model")
    tiny_model.make_adapters(tmp_path / "adapters")
    assert digests(tmp_path) == digests(made)


def test_a_second_call_creates_nothing(made):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    output: list[str] = []
    tiny_model.make_model(made / "model", progress=output.append)
    tiny_model.make_adapters(made / "adapters", progress=output.append)
    assert output == []
    assert before == {path: path.stat().st_mtime_ns for path in made.rglob("*")}


def test_a_failed_creation_leaves_nothing(tmp_path):
    def fill_the_disk():
        with tiny_model.folder_made_whole(tmp_path / "model") as folder:
            (folder / "config.json").write_text("{}")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fill_the_disk()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_concurrent_creation_leaves_one_whole_model(tmp_path):
    threads = [threading.Thread(target=tiny_model.make_adapter, args=(tmp_path, "a/v1")) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["v1"]
    assert sorted(digests(tmp_path)) == ["a/v1/adapter_config.json", "a/v1/adapter_model.safetensors"]


def test_the_model_is_a_few_megabytes_and_its_shapes_are_those_of_its_config(made):
    config = json.loads((made / "model" / "config.json").read_text())
    found = tensors(made / "model" / "model.safetensors")
    kv_rows = config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    assert (made / "model" / "model.safetensors").stat().st_size < 12_000_000
    assert found["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert found["model.layers.3.self_attn.k_proj.weight"]["shape"] == [kv_rows, config["hidden_size"]]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 8192
    assert {tensor["dtype"] for tensor in found.values()} == {"BF16"}


def test_the_ids_in_the_configs_are_those_of_the_tokenizer(made):
    tokenizer = Tokenizer.from_file(str(made / "model" / "tokenizer.json"))
    config = json.loads((made / "model" / "config.json").read_text())
    generation = json.loads((made / "model" / "generation_config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"] == generation["eos_token_id"][0]
    assert tokenizer.token_to_id("<|endoftext|>") == config["bos_token_id"] == generation["eos_token_id"][1]


def test_the_tokenizer_knows_words_and_loses_no_text(made):
    tokenizer = Tokenizer.from_file(str(made / "model" / "tokenizer.json"))
    assert len(tokenizer.encode(" customers SELECT contract return").ids) <= 6
    text = "Zürich 😀 \t日本語\r\n\x00 {}[]"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(("lora_id", "rank"), [("sql-expert/v1", 8), ("python-expert/v1", 16), ("legal/v2", 8)])
def test_an_adapter_targets_every_projection_in_its_real_shape(made, lora_id, rank):
    config = json.loads((made / "adapters" / lora_id / "adapter_config.json").read_text())
    found = tensors(made / "adapters" / lora_id / "adapter_model.safetensors")
    base = tensors(made / "model" / "model.safetensors")
    assert (config["r"], config["peft_type"]) == (rank, "LORA")
    assert config["target_modules"] == PROJECTIONS
    assert len(found) == 4 * 7 * 2
    for name, tensor in found.items():
        module, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        rows, columns = base[module + ".weight"]["shape"]
        assert tensor["shape"] == ([rank, columns] if side == "lora_A" else [rows, rank])


def test_every_name_and_every_seed_is_another_adapter(tmp_path):
    tiny_model.make_adapter(tmp_path, "a")
    tiny_model.make_adapter(tmp_path, "b")
    tiny_model.make_adapter(tmp_path, "c", seed=1)
    tiny_model.make_adapter(tmp_path, "d", seed=1)
    weights = {name: digests(tmp_path / name)["adapter_model.safetensors"] for name in "abcd"}
    assert weights["c"] == weights["d"]
    assert len(set(weights.values())) == 3


def test_an_unknown_section_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"poetry.*legal"):
        tiny_model.make_adapter(tmp_path, "a", section="poetry")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_what_it_created(tmp_path, capsys):
    assert tiny_model.main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert str(tmp_path / "tiny-qwen") in output
    assert all(lora_id in output for lora_id in tiny_model.ADAPTERS)
    assert tiny_model.main([]) == 2


def test_the_command_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lorafleet.local.tiny_model"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: python -m lorafleet.local.tiny_model DIR" in done.stderr
