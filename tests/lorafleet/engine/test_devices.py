"""Devices of engines: CPU or GPU, GPUs of one engine, GPUs of this machine."""

import pytest

from lorafleet.engine.devices import gpus_per_engine, is_on_cpu, visible_gpus

FILES = ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"]


@pytest.mark.parametrize(
    ("environment", "files", "expected"),
    [
        ({}, FILES, ("0", "1", "2")),
        ({}, ["nvidia3"], ("0",)),  # a container with one GPU of a larger machine
        ({}, ["nvidiactl", "null"], ()),
        ({"CUDA_VISIBLE_DEVICES": "1, GPU-aa"}, FILES, ("1", "GPU-aa")),
        ({"CUDA_VISIBLE_DEVICES": ""}, FILES, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, FILES, ()),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, FILES, ("1",)),
        ({"CUDA_VISIBLE_DEVICES": "0,0,1"}, FILES, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["null"], ()),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(
    environment: dict[str, str], files: list[str], expected: tuple[str, ...]
) -> None:
    assert visible_gpus(environment, files) == expected


@pytest.mark.parametrize(
    ("engine", "words", "expected"),
    [
        ("vllm", "", 1),
        ("vllm", "--tensor-parallel-size 2 --pipeline_parallel_size=3", 6),
        ("vllm", "-tp 4 -dp 2 --seed 8", 8),
        ("vllm", "-tp 2 --data-parallel-size 16 --data-parallel-size-local 2", 4),
        ("vllm", "--tensor-parallel-size two", 1),
        ("vllm", "-tp 0", 1),
        ("sglang", "--tp 2 --dp-size 2", 4),
        ("sgl-jax", "--tp-size 2", 2),
        ("sglang", "--tensor-parallel-size 8 --dp-size 8 --enable-dp-attention", 8),
    ],
)
def test_an_engine_takes_as_many_gpus_as_its_ranks(engine: str, words: str, expected: int) -> None:
    assert gpus_per_engine(words.split(), engine) == expected


def test_the_profile_decides_about_the_cpu_before_anything_else() -> None:
    assert is_on_cpu("vllm", "cpu", {})
    assert not is_on_cpu("sglang", "gpu", {"SGLANG_USE_CPU_ENGINE": "1"})
    assert is_on_cpu("sglang", "auto", {"SGLANG_USE_CPU_ENGINE": "1"})
    assert not is_on_cpu("sglang", "auto", {})
    assert is_on_cpu("sgl-jax", "auto", {"JAX_PLATFORMS": "cpu"})
    assert not is_on_cpu("sgl-jax", "auto", {"JAX_PLATFORMS": "tpu"})
