"""The run for a machine with a GPU: it ends in its time, says what it lacks, and its table has a place in the page."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.report import ReportRow, put_into
from tests.gpu.__main__ import GpuRun
from tests.patience import patience

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def run_of(folder: Path, *, left_s: float) -> GpuRun:
    return GpuRun(is_dry=True, gpus=0, folder=folder, ends_at=time.monotonic() + left_s)


async def test_a_step_without_time_is_named_and_starts_no_engine(tmp_path):
    run = run_of(tmp_path, left_s=5)
    await run.on_engine("rank 16", tmp_path, (), ())
    assert not run.is_whole
    assert "rank 16: skipped" in run.page()
    assert list(tmp_path.iterdir()) == []


async def test_a_step_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.gpu.__main__.measured_engine", None)
    run = run_of(tmp_path, left_s=500)
    await run.on_engine("rank 16", tmp_path, (), ())
    assert "rank 16: Traceback" in run.page()


def test_the_table_has_its_place_in_the_page(tmp_path):
    run = run_of(tmp_path, left_s=1)
    run.rows.append(ReportRow("a device slot, max_lora_rank 16", 12.5, "MB"))
    page = put_into(PAGE.read_text(), "gpu", run.page())
    assert "| a device slot, max_lora_rank 16 | 12.5 MB |" in page
    assert "Every step has its figures." in page


def test_without_a_gpu_the_run_says_so_and_measures_nothing():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    command = (sys.executable, "-P", "-m", "tests.gpu")
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--dry runs the same steps on the CPU" in done.stderr


@pytest.mark.vllm
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_dry_run_has_every_figure():
    command = (sys.executable, "-P", "-m", "tests.gpu", "--dry", "--within-s", "800")
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(800), check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for words in ("PunicaWrapperCPU on cpu", "from PEFT in float32", "a device slot", "cold: loaded from disk first"):
        assert words in done.stdout
