"""An adapter that changes nothing is known by its bytes, in every dtype, and told apart from a small one."""

import json
import math
import struct
from pathlib import Path

import pytest

from lorafleet.engine.lora_weights import has_zero_weights, weights_effect
from tests.workers.broken import safetensors

NAMES = ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
         "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")  # fmt: skip
FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e"}


def raw(dtype: str, numbers: list[float]) -> bytes:
    if dtype == "BF16":
        return b"".join(struct.pack("<f", number)[2:] for number in numbers)
    if dtype.startswith("F8"):
        return b"".join(
            b"\x80" if number == 0 and math.copysign(1, number) < 0 else bytes([int(number) % 128])
            for number in numbers
        )
    return b"".join(struct.pack(FORMATS[dtype], number) for number in numbers)


def write(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, **config}))
    content, header = b"", {}
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + content)
    return folder


def pair(a: bytes, b: bytes, dtype: str = "F32", side: int = 64) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {NAMES[0]: (dtype, (4, side), a), NAMES[1]: (dtype, (side, 4), b)}


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_zeros_and_negative_zeros_in_one_matrix_are_zero_weights_in_every_dtype(tmp_path, dtype):
    ones, zeros = raw(dtype, [1.0] * 256), raw(dtype, [0.0, -0.0] * 128)
    assert has_zero_weights(write(tmp_path, pair(ones, zeros, dtype)))
    assert has_zero_weights(write(tmp_path, pair(zeros, ones, dtype)))
    last = raw(dtype, [0.0] * 255 + [1.0])
    assert not has_zero_weights(write(tmp_path, pair(ones, last, dtype)))
    assert weights_effect(write(tmp_path, pair(ones, zeros, dtype))) == "none"


def test_a_scaling_of_zero_changes_nothing(tmp_path):
    ones = raw("F32", [1.0] * 256)
    assert has_zero_weights(write(tmp_path, pair(ones, ones), lora_alpha=0))
    assert not has_zero_weights(write(tmp_path, pair(ones, ones), lora_alpha=0, alpha_pattern={"q_proj": 1}))


def test_zeros_over_several_chunks_are_read_to_the_end(tmp_path):
    side = (3 << 20) // 16
    ones, zeros = raw("F32", [1.0] * 4) * side, bytes(16 * side)
    assert has_zero_weights(write(tmp_path, pair(ones, zeros, side=side)))
    assert not has_zero_weights(write(tmp_path, pair(ones, zeros[:-4] + raw("F32", [1.0]), side=side)))


def test_a_whole_module_beside_zero_pairs_is_a_change(tmp_path):
    ones, zeros = raw("F32", [1.0] * 256), bytes(1024)
    tensors = pair(ones, zeros) | {"base_model.model.score.weight": ("F32", (1, 256), ones)}
    assert not has_zero_weights(write(tmp_path, tensors))
    copy = pair(ones, zeros) | {"base_model.model.lm_head.base_layer.weight": ("F32", (1, 256), ones)}
    assert has_zero_weights(write(tmp_path, copy))


def test_a_trained_adapter_must_show_and_one_tiny_step_of_a_tiny_model_need_not(tmp_path):
    a = raw("F32", [0.07, -0.07] * 128)
    assert weights_effect(write(tmp_path, pair(a, raw("F32", [1e-6] * 256)))) == "small"
    modules = {
        name.replace("layers.0", f"layers.{layer}"): tensor
        for layer in range(32)
        for name, tensor in pair(a, raw("F32", [0.02, -0.02] * 128)).items()
    }
    assert weights_effect(write(tmp_path, modules)) == "enough"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"adapter_config.json": b"{"},
        {"adapter_config.json": b"{}", "adapter_model.safetensors": b""},
        {"adapter_config.json": b'{"r": 0, "lora_alpha": 1}', "adapter_model.safetensors": safetensors({})},
        {"adapter_config.json": b'{"r": 8, "lora_alpha": 1}', "adapter_model.safetensors": b"\xff" * 64},
        {"adapter_config.json": b'{"r": 8, "lora_alpha": 1}', "adapter_model.safetensors": safetensors({})[:-1]},
    ],
)
def test_files_that_are_no_adapter_say_nothing(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert not has_zero_weights(tmp_path)
    assert weights_effect(tmp_path) in {None, "small"}
