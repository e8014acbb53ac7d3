"""A fleet of one worker: its dead children, its folder, and what it reports of adapters that it cannot serve."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.local import tiny_model
from tests.e2e.fleets import SIM_FLAGS, RunningFleet, kill, running, start, until
from tests.e2e.scenarios import fresh_prompt, text
from tests.patience import patience

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound adapter, one without tensors, and one of another base model."""
    folder = tmp_path_factory.mktemp("small") / "adapters"
    tiny_model.make_adapter(folder, "good/v1")
    (tiny_model.make_adapter(folder, "bad/v1") / "adapter_model.safetensors").write_bytes(b"no tensors at all")
    tiny_model.make_adapter(folder, "other/v1", base_model="org/other")
    return folder


@pytest.fixture(scope="module")
def small(shelf: Path) -> Iterator[RunningFleet]:
    """One worker, and the shelf."""
    with running(shelf.parent / "state", *SIM_FLAGS, "1", "--adapters", str(shelf)) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def _whole(small: RunningFleet) -> None:
    """A test begins when the test before it has left nothing that is still starting."""
    until(small.is_whole, within_s=60, what="every worker is ready")


@pytest.mark.parametrize("service", ["router", "orchestrator", "workers"])
def test_a_dead_child_is_restarted_and_reported(small: RunningFleet, service: str) -> None:
    before = small.kill("-m", service)
    name = "w0" if service == "workers" else service
    until(lambda: f"{name}: ended with SIGKILL" in small.progress(), within_s=10, what="it says so")
    until(lambda: small.pids("-m", service) not in ([], before), within_s=10, what="it is there again")
    until(lambda: small.ask(prompt=fresh_prompt(), lora_id="good/v1").is_success, within_s=30, what="an answer")


def test_two_fleets_cannot_share_a_folder_and_nobody_else_can_read_it(small: RunningFleet) -> None:
    second = start(small.state_dir, *SIM_FLAGS, "1")
    assert second.process.wait(patience(30)) == 1
    assert "--state-dir" in second.progress()
    assert len(second.progress().splitlines()) == 1
    kill(second)
    assert small.ask(prompt=fresh_prompt()).status_code == 200


def test_a_folder_that_is_no_adapter_is_reported(small: RunningFleet) -> None:
    assert "adapter bad/v1: failed" in small.progress()
    assert text(small.ask(prompt=fresh_prompt(), lora_id="good/v1"))


def test_an_adapter_of_another_base_model_is_reported(small: RunningFleet) -> None:
    assert "adapter other/v1: failed: base_model_mismatch" in small.progress()
