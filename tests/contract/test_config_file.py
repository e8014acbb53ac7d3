"""The file of an engine's `--config`, as vLLM's own parser reads it."""

import argparse
from pathlib import Path

import pytest

from lorafleet.engine.arguments import with_config_file

TEXT = """
max-loras: 8
max_lora_rank: 64
served-model-name: [mine]
enable-lora: false
enforce-eager: true
compilation-config: {pass_config: {fuse_norm_quant: true}}
gpu-memory-utilization: 0.5
lora-target-modules: []
"""


@pytest.mark.thorough  # it imports vLLM into this process, which takes longer than the test
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_arguments_in_the_file_are_those_that_vllm_reads(tmp_path: Path) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    file = tmp_path / "vllm.yaml"
    file.write_text(TEXT)
    parser = FlexibleArgumentParser()
    parser.add_argument("--enable-lora", action=argparse.BooleanOptionalAction)
    assert with_config_file(("--config", str(file))) == (*parser.load_config_file(str(file)), "--config", str(file))
