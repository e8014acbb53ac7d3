"""Reports of an engine's processes on their LoRA kernels, and the counts of pool misses."""

import pytest

from lorafleet.engine.vllm_plugin.engine_reports import (
    EngineProcessReport,
    PoolMissCounter,
    PoolMisses,
    forget_engine_reports,
    has_no_gpu_kernels,
    punica_names,
    read_engine_reports,
    read_pool_misses,
    write_engine_report,
)
from lorafleet.engine.vllm_plugin.lora_reports import ask_for_reports, forget_all_reports

REPORT = EngineProcessReport("PunicaWrapperGPU", "cuda", 1 << 20)


def test_report_of_a_process_is_read_until_it_is_forgotten(tmp_path):
    write_engine_report(tmp_path, REPORT)
    (tmp_path / "engine" / "9.json").write_text("{}")
    ask_for_reports(tmp_path, "a@1")
    forget_all_reports(tmp_path)
    assert read_engine_reports(tmp_path) == (REPORT,)
    forget_engine_reports(tmp_path)
    assert read_engine_reports(tmp_path) == ()


@pytest.mark.parametrize(
    ("device", "punica", "is_missing"),
    [
        ("cuda", "PunicaWrapperGPU", False),
        ("xpu", "PunicaWrapperXPU", False),
        ("cpu", "PunicaWrapperCPU", False),
        ("cuda", "PunicaWrapperCPU", True),
        ("cuda", "", True),
        ("", "", False),
    ],
)
def test_gpu_without_the_kernels_of_a_gpu_is_seen(device, punica, is_missing):
    reports = (REPORT, EngineProcessReport(punica, device, 0))
    assert has_no_gpu_kernels(reports) is is_missing
    assert punica_names(()) == ""


def test_misses_are_counted_by_where_the_adapter_was(tmp_path):
    assert read_pool_misses(tmp_path) == {}
    counter = PoolMissCounter(tmp_path)
    counter.count({1, 2, 3, 4}, on_device={1, 2}, in_host={1, 2, 3})
    counter.count({1}, on_device={1}, in_host={1})
    assert list(read_pool_misses(tmp_path).values()) == [PoolMisses(host=1, disk=1)]
    counter.count({5}, on_device={1}, in_host={1})
    assert list(read_pool_misses(tmp_path).values()) == [PoolMisses(host=1, disk=2)]
