"""What lies beside an adapter: the table of names, and tokenizers that are compared with the base model's."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from lorafleet.local.tiny_model import make_adapter
from workers.core.errors import SourceError
from workers.verification.beside import FileUse, known_name, notes_on_files, notes_on_texts, read_names
from workers.verification.manifest import AdapterRules
from workers.verification.verify import read_manifest

HARMLESS = [
    "README.md", "LICENSE", "NOTICE", ".gitattributes", "training_args.bin", "trainer_state.json", "optimizer.pt",
    "optimizer.bin", "scheduler.pt", "rng_state.pth", "rng_state_3.pth", "random_states_0.pkl", "scaler.pt",
    "checkpoint-500/", "global_step120/", "runs/", "latest", "zero_to_fp32.py", "events.out.tfevents.17.host.1",
    "all_results.json", "train_results.json", "training_loss.png", "trainer_log.jsonl", "args.json",
    "additional_config.json", "config.json", "vocab.json", "merges.txt", "tokenizer.model",
    "adapter_model.safetensors.index.json", "preprocessor_config.json", "modules.json", "1_Pooling/", "2_Normalize/",
]  # fmt: skip
REFUSED = [
    "new_embeddings.safetensors", "new_embeddings.bin", "non_lora_trainables.bin", "non_lora_state_dict.bin",
    "mm_projector.bin", "trainable_params.bin", "vit.safetensors", "lm_head.safetensors",
]  # fmt: skip
NOTED = {
    "adapter_model.bin": "wins",
    "adapter_model.pt": "wins",
    "adapter_model-00001-of-00002.safetensors": "parts",
    "value_head.safetensors": "value head",
    "model-00001-of-00004.safetensors": "whole model",
    "pytorch_model.bin": "whole model",
    "lora-f16.gguf": "neither engines nor PEFT",
    "extra.safetensors": "neither engines nor PEFT",
    "notes.json": "not known here",
    "2_Dense/": "pooling",
    "other/": "nothing is read",
}


def notes(names):
    return notes_on_files(
        [name for name in names if not name.endswith("/")], [name[:-1] for name in names if name.endswith("/")]
    )


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_answer_has_no_note(name):
    assert notes([name]) == ()


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_of_what_was_trained_is_refused_by_name(name):
    with pytest.raises(SourceError, match="accepted is LoRA alone") as refused:
        notes(["README.md", name])
    assert refused.value.code == "adapter_file_unsupported"
    assert name in str(refused.value)


@pytest.mark.parametrize(("name", "words"), NOTED.items())
def test_what_no_engine_reads_is_named_in_a_note(name, words):
    (note,) = notes([name, "README.md"])
    assert note.startswith(f"not served: {name} (")
    assert words in note


@given(st.sets(st.text(min_size=1, max_size=30)))
def test_every_name_is_harmless_compared_noted_or_refused_and_a_note_is_one_line(names):
    shown = "\n".join(known_name(name).use.value for name in names)
    assert not shown or {*shown.split("\n")} <= {use.value for use in FileUse}
    try:
        found = notes_on_files(names)
    except SourceError as exc:
        found = (str(exc),)
    noted = [name for name in names if known_name(name).use is FileUse.NOTED]
    assert bool(noted) <= bool(found)
    assert all(note.isprintable() for note in found)


def test_a_note_names_five_files_of_a_kind_and_counts_the_others():
    (note,) = notes([f"part{number}.npz" for number in range(8)])
    assert "part0.npz, part1.npz, part2.npz, part3.npz, part4.npz and 3 more" in note


# --- texts that are compared -----------------------------------------------------------------------------------------


def tokenizer_text(*added: str) -> str:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.add_tokens(list(added))
    return tokenizer.to_str()


@pytest.fixture
def base(tmp_path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_text("<|im_end|>"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{ x }}"}))
    return folder


def texts(**files) -> dict[str, bytes]:
    named = {name.replace("_dot_", "."): content for name, content in files.items()}
    return {name: (text if isinstance(text, str) else json.dumps(text)).encode() for name, text in named.items()}


WITH_TOKEN = {
    "slow": texts(added_tokens_dot_json={"<think>": 4}),
    "fast": texts(tokenizer_dot_json=tokenizer_text("<|im_end|>", "<think>")),
    "config": texts(tokenizer_config_dot_json={"added_tokens_decoder": {"4": {"content": "<think>"}}}),
}


@pytest.mark.parametrize("own", WITH_TOKEN.values(), ids=WITH_TOKEN.keys())
def test_tokens_that_the_engines_tokenizer_lacks_are_refused(base, own):
    with pytest.raises(SourceError, match=r"<think>.*--tokenizer") as refused:
        notes_on_texts(own, base)
    assert refused.value.code == "adapter_file_unsupported"
    (base / "tokenizer.json").write_text(tokenizer_text("<|im_end|>", "<think>"))
    assert notes_on_texts(own, base) == ()  # an engine that was started with the adapter's tokenizer


def test_padding_and_words_of_the_vocabulary_are_no_tokens_of_its_own(base):
    own = texts(
        added_tokens_dot_json={"<|PAD|>": 4, "a": 0}, tokenizer_config_dot_json={"pad_token": {"content": "<|PAD|>"}}
    )
    assert notes_on_texts(own, base) == ()


def test_tokens_at_the_head_of_a_text_that_was_cut_are_seen(base):
    whole = tokenizer_text("<|im_end|>", "<think>")
    cut = whole[: whole.index('"model"') + 20]
    with pytest.raises(SourceError, match="<think>"):
        notes_on_texts({"tokenizer.json": cut.encode()}, base)


@pytest.mark.parametrize("damaged", [b"", b"[]", b"{", b"\xff\xfe", b'{"added_tokens": [1, {}]}', b"[" * 100_000])
def test_a_damaged_text_names_no_token_and_one_that_is_no_object_is_noted(base, damaged):
    names = read_names(["tokenizer.json", "added_tokens.json"])
    found = notes_on_texts(dict.fromkeys(names, damaged), base)
    assert len(found) == (not damaged.startswith(b"{"))
    assert all("added_tokens.json, tokenizer.json (no JSON object)" in note for note in found)


@pytest.mark.parametrize("has_folder", [True, False])
def test_tokens_that_cannot_be_compared_are_said_so(base, has_folder):
    (base / "tokenizer.json").unlink()
    (note,) = notes_on_texts(WITH_TOKEN["slow"], base if has_folder else None)
    assert "was not compared" in note


def test_another_chat_template_and_other_sampling_are_noted_and_equal_ones_are_not(base):
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "transformers_version": "4"}))
    own = texts(chat_template_dot_jinja="{{ x }}\n", generation_config_dot_json={"temperature": 0.6})
    assert notes_on_texts(own, base) == ()
    own = texts(chat_template_dot_jinja="{{ y }}", generation_config_dot_json={"temperature": 1.0, "top_k": 5})
    template, sampling = notes_on_texts(own, base)
    assert "chat template" in template
    assert "temperature, top_k of generation_config.json" in sampling


def test_a_folder_is_judged_with_all_that_lies_beside(base, tmp_path):
    rules = AdapterRules(64, frozenset(), "off", tokenizer=base)
    folder = make_adapter(tmp_path / "from", "a")
    assert read_manifest(folder, rules).files_note == ""
    digest = read_manifest(folder, rules).digest
    (folder / "adapter_model.bin").write_bytes(b"1")
    (folder / "checkpoint-5").mkdir()
    found = read_manifest(folder, rules)
    assert found.digest == digest
    assert (found.files_note,) == notes(["adapter_model.bin"])
    (folder / "added_tokens.json").write_bytes(WITH_TOKEN["slow"]["added_tokens.json"])
    with pytest.raises(SourceError, match="added_tokens"):
        read_manifest(folder, rules)


# --- the page and the engine -----------------------------------------------------------------------------------------

ROW = re.compile(r"^\| (harmless|noted|compared|refused) \| ([^|]*) \|", re.MULTILINE)


def test_the_page_of_engines_names_each_example_as_the_table_does():
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    found = {name: use for use, names in ROW.findall(page) for name in re.findall("`([^`]+)`", names)}
    assert len(found) > 20
    assert found == {name: known_name(name).use.value for name in found}


def test_peft_and_vllm_read_the_safetensors_and_nothing_that_lies_beside(tmp_path):
    torch, vllm = pytest.importorskip("torch"), pytest.importorskip("vllm.lora.lora_model")
    save_and_load, helper = (
        pytest.importorskip("peft.utils.save_and_load"),
        pytest.importorskip("vllm.lora.peft_helper"),
    )
    folder = make_adapter(tmp_path, "a")

    def tensors_read() -> tuple[dict, dict]:
        by_peft = save_and_load.load_peft_weights(str(folder), device="cpu")
        modules = {name.split(".lora_")[0].rpartition(".")[2] for name in by_peft}
        config = helper.PEFTHelper.from_local_dir(str(folder), 4096)
        model = vllm.LoRAModel.from_local_checkpoint(str(folder), modules, config, lora_model_id=1, device="cpu")
        return by_peft, {name: half for name, lora in model.loras.items() for half in (lora.lora_a, lora.lora_b)}

    alone = tensors_read()
    other = {name: tensor + 1 for name, tensor in alone[0].items()}
    torch.save(other, folder / "adapter_model.bin")
    torch.save(other, folder / "adapter_model.pt")
    for name in (*REFUSED, "adapter_model-00001-of-00002.safetensors", "model.safetensors", "extra.safetensors"):
        torch.save(other, folder / name)
    (folder / "added_tokens.json").write_bytes(WITH_TOKEN["slow"]["added_tokens.json"])
    beside = tensors_read()
    for before, after in zip(alone, beside, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
