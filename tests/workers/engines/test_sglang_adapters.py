"""Adapters that SGLang and sgl-jax would serve wrongly, or not survive, are refused by their config and header."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from workers.engines.sglang_adapters import sgl_jax_refusal, sglang_refusal

CONFIG = {"r": 4, "lora_alpha": 8}


def written(folder, *modules, ranks=None, **config):
    tensors = {}
    for module in modules:
        rank = (ranks or {}).get(module, 4)
        tensors[f"base_model.model.layers.0.{module}.lora_A.weight"] = np.zeros((rank, 8), np.float32)
        tensors[f"base_model.model.layers.0.{module}.lora_B.weight"] = np.zeros((8, rank), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")])
def test_an_adapter_on_whole_fused_modules_is_served(tmp_path, modules):
    folder = written(tmp_path, *modules)
    assert (sglang_refusal(folder, None), sgl_jax_refusal(folder)) == ("", "")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"modules_to_save": ["score"]}, "modules_to_save"),
        ({"use_rslora": True}, "use_rslora"),
        ({"alpha_pattern": {"q_proj": 16}}, "alpha_pattern"),
    ],
)
def test_a_config_that_both_engines_ignore_is_refused_by_both(tmp_path, config, what):
    folder = written(tmp_path, "q_proj", "v_proj", **config)
    assert what in sglang_refusal(folder, None)
    assert what in sgl_jax_refusal(folder)


def test_a_scale_that_is_the_same_either_way_is_served(tmp_path):
    ranks = {"q_proj": 1, "v_proj": 1}
    folder = written(tmp_path, "q_proj", "v_proj", ranks=ranks, r=1, use_rslora=True, alpha_pattern={"q_proj": 8})
    assert sglang_refusal(folder, None) == ""


def test_a_module_of_another_rank_is_named(tmp_path):
    folder = written(tmp_path, "q_proj", "v_proj", ranks={"v_proj": 2})
    assert "layers.0.v_proj has rank 2, r is 4" in sglang_refusal(folder, None)


@pytest.mark.parametrize(("modules", "what"), [(("q_proj",), "q_proj alone"), (("up_proj",), "up_proj alone")])
def test_a_part_of_a_fused_module_is_refused_where_modules_are_fused(tmp_path, modules, what):
    folder = written(tmp_path, *modules)
    assert what in sglang_refusal(folder, None)
    assert sgl_jax_refusal(folder) == ""


def test_files_that_cannot_be_read_are_left_to_other_checks(tmp_path):
    assert (sglang_refusal(tmp_path, None), sgl_jax_refusal(tmp_path)) == ("", "")
    (written(tmp_path, "q_proj") / "adapter_config.json").write_text("[]")
    assert sglang_refusal(tmp_path, None) == ""
