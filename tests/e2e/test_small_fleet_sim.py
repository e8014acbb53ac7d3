"""A fleet of one worker: its dead children, its folder, and adapters that are none or of another base model."""

import shutil
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
    """A sound adapter, one without tensors, one that calls the base model as a hub does, and one of another."""
    folder = tmp_path_factory.mktemp("small") / "adapters"
    tiny_model.make_adapter(folder, "good/v1")
    (tiny_model.make_adapter(folder, "bad/v1") / "adapter_model.safetensors").write_bytes(b"no tensors at all")
    tiny_model.make_adapter(folder, "hub/v1", base_model="Org/Tiny-Qwen")
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


@pytest.mark.parametrize("model", ["tiny-qwen", "good/v1"])
def test_a_request_waits_for_the_only_engine_to_start_again(small: RunningFleet, model: str) -> None:
    small.kill("-m", "lorafleet.sim")
    ready = 'lorafleet_router_replicas{state="ready"} 0.0'
    until(lambda: ready in small.http("GET", f"{small.router}/metrics").text, within_s=20, what="the router knows")
    answer = small.ask(prompt=fresh_prompt(), model=model)
    assert answer.status_code == 200, answer.text


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


def test_an_adapter_may_call_the_base_model_as_a_hub_does(small: RunningFleet) -> None:
    assert text(small.ask(prompt=fresh_prompt(), lora_id="hub/v1"))


def test_an_adapter_of_another_base_model_is_refused_until_somebody_vouches(small: RunningFleet, shelf: Path) -> None:
    assert "adapter other/v1: failed: base_model_mismatch" in small.progress()
    spec = {"lora_id": "other/v1", "source": str(shelf / "other/v1"), "base_model": "tiny-qwen"}
    assert small.http("POST", f"{small.orchestrator}/v1/adapters", json=spec).status_code == 200
    until(
        lambda: small.ask(prompt=fresh_prompt(), lora_id="other/v1").is_success,
        within_s=20,
        what="the adapter that somebody vouches for is served",
    )


def test_an_adapter_that_is_nowhere_any_more_is_answered_with_the_cause_until_it_is_restored(
    small: RunningFleet, shelf: Path
) -> None:
    source = tiny_model.make_adapter(shelf, "gone/v1")
    spec = {"lora_id": "gone/v1", "source": str(source), "base_model": "tiny-qwen"}
    assert small.http("POST", f"{small.orchestrator}/v1/adapters", json=spec).status_code == 201
    until(lambda: small.ask(prompt="Hi", lora_id="gone/v1").is_success, within_s=20, what="it is served")
    away = source.rename(shelf / "away")
    digest = small.get(f"{small.orchestrator}/v1/adapters/gone/v1")["spec"]["digest"]
    shutil.rmtree(small.state_dir / "cache" / digest)
    small.kill("-m", "workers")
    until(small.is_whole, within_s=60, what="the worker is back")
    answer = small.ask(prompt="Hi", lora_id="gone/v1")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "adapter_failed")
    assert "source_not_found" in error["message"]
    assert str(shelf) not in error["message"]
    away.rename(source)
    assert "lorafleet adapters retry gone/v1" in error["message"]
    assert small.http("POST", f"{small.orchestrator}/v1/adapters/gone/v1/retry").is_success
    assert small.ask(prompt="Hi", lora_id="gone/v1").status_code == 200
