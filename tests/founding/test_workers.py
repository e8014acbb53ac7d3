"""What the documents ask of a worker: its metadata, its list of adapters, loads and unloads, events and log."""

import json
import threading
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.founding.conftest import LEGAL, PYTHON, SQL, FoundingFleet
from tests.patience import patience, wait_until

pytestmark = pytest.mark.fleet

AVAILABLE = {"lora_id", "path", "base_model", "rank", "state"}
LOADED = {"lora_id", "state", "loaded_at", "last_used", "memory_mb", "request_count", "path", "load_seconds"}


def loaded(metadata: dict[str, Any]) -> dict[str, Any]:
    return {item["lora_id"]: item for item in metadata["lora"]["loaded_loras"]}


def test_metadata_has_the_designed_fields(fleet: FoundingFleet) -> None:
    assert "w0" in fleet.ensure(LEGAL, replicas=2)
    metadata = fleet.get(f"{fleet.worker}/metadata")
    assert {"name", "type", "base_model", "runtime_config"} <= metadata["model"].keys()
    assert metadata["model"]["type"] == "Completions"
    runtime = metadata["model"]["runtime_config"]
    assert {"total_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "block_size"} <= runtime.keys()
    lora = metadata["lora"]
    assert lora["enabled"] is True
    assert {"max_loras", "max_lora_rank", "available_loras", "loaded_loras", "capacity"} <= lora.keys()
    assert {"loaded_count", "available_slots"} <= lora["capacity"].keys()
    assert all(item.keys() >= AVAILABLE for item in lora["available_loras"])
    item = loaded(metadata)[LEGAL]
    assert item.keys() >= LOADED
    assert item["state"] == "ready"
    assert metadata["transport"]["engine_url"]


def test_worker_says_that_it_is_ready(fleet: FoundingFleet) -> None:
    assert fleet.send("GET", f"{fleet.worker}/ready", key="").status_code == 200
    assert fleet.get(f"{fleet.worker}/metadata")["state"] == "ready"


def test_request_counts_and_is_the_adapters_last_use(fleet: FoundingFleet) -> None:
    assert "w0" in fleet.ensure(LEGAL, replicas=2)
    before = loaded(fleet.get(f"{fleet.worker}/metadata"))[LEGAL]
    answers = [fleet.chat(lora_id=LEGAL, prompt=f"{number} " * 60) for number in range(8)]
    assert "w0" in {answer.headers["x-lorafleet-worker"] for answer in answers}

    def is_counted() -> bool:
        now = loaded(fleet.get(f"{fleet.worker}/metadata"))[LEGAL]
        return now["request_count"] > before["request_count"] and now["last_used"] > (before["last_used"] or "")

    wait_until(is_counted, within_s=20, what="the router has reported the requests")


def test_worker_and_adapters_have_their_cards(fleet: FoundingFleet) -> None:
    assert "w0" in fleet.ensure(LEGAL, replicas=2)
    card = fleet.get(f"{fleet.orchestrator}/v1/adapters/{LEGAL}")["status"]["card"]
    assert (card["base_model"], card["rank"], card["dtype"]) == ("tiny-qwen", 8, "BF16")
    metadata = fleet.get(f"{fleet.worker}/metadata")
    mdc = metadata["mdc"]
    assert (mdc["display_name"], mdc["max_rank"]) == ("tiny-qwen", metadata["lora"]["max_lora_rank"])
    assert set(card["target_modules"]) <= set(mdc["module_names"])


def test_adapters_on_disk_are_listed_with_rank_and_base_model(fleet: FoundingFleet) -> None:
    for lora_id in (SQL, PYTHON, LEGAL):
        assert "w0" in fleet.ensure(lora_id, replicas=2)
    items = {item["lora_id"]: item for item in fleet.get(f"{fleet.worker}/v1/metadata/loras")["data"]}
    assert {SQL, PYTHON, LEGAL} <= items.keys()
    assert (items[PYTHON]["rank"], items[SQL]["rank"]) == (16, 8)
    assert {items[lora_id]["base_model"] for lora_id in (SQL, PYTHON, LEGAL)} == {"tiny-qwen"}


def test_one_adapters_metadata_is_found_by_its_name_with_slashes(fleet: FoundingFleet) -> None:
    item = fleet.get(f"{fleet.worker}/v1/metadata/loras/{SQL}")
    assert item.keys() >= AVAILABLE
    missing = fleet.send("GET", f"{fleet.worker}/v1/metadata/loras/nobody/v1")
    assert (missing.status_code, fleet.code(missing)) == (404, "adapter_unknown")


def test_unload_is_the_orchestrators_alone(fleet: FoundingFleet) -> None:
    answer = fleet.post(f"{fleet.worker}/v1/admin/unload_lora", {"lora_id": LEGAL})
    assert (answer.status_code, fleet.code(answer)) == (409, "epoch_required")


def test_path_outside_the_allowed_folders_is_refused(fleet: FoundingFleet) -> None:
    answer = fleet.post(f"{fleet.worker}/v1/admin/load_lora", {"lora_id": "stolen/v1", "lora_path": "/etc"})
    assert (answer.status_code, fleet.code(answer)) == (403, "source_forbidden")


def test_events_have_the_type_the_instance_and_a_timestamp(fleet: FoundingFleet) -> None:
    address = f"{fleet.worker}/v1/events"
    headers = {"authorization": f"Bearer {fleet.keys['admin']}"}
    began = datetime.now(UTC)
    with httpx.stream("GET", address, headers=headers, timeout=patience(20), trust_env=False) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith(":")
        body = {
            "lora_id": "events/v1",
            "lora_path": fleet.get(f"{fleet.orchestrator}/v1/adapters/{SQL}")["spec"]["source"],
        }
        asking = threading.Thread(target=fleet.post, args=(f"{fleet.worker}/v1/admin/load_lora", body))
        asking.start()
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] not in {"LOADED_TO_DEVICE", "LOAD_FAILED"}:
            events += [json.loads(line[5:]) for line in [next(lines)] if line.startswith("data:")]
        asking.join()
    ours = [event for event in events if event["lora_id"] == "events/v1"]
    assert "DOWNLOADED_TO_DISK" in {event["type"] for event in ours}
    assert {event["instance_id"] for event in ours} == {"w0"}
    assert all(datetime.fromisoformat(event["timestamp"]) >= began.replace(microsecond=0) for event in ours)


def test_load_is_logged_with_the_designed_fields(fleet: FoundingFleet) -> None:
    fleet.ensure(LEGAL, replicas=2)
    wanted = ("lora_loaded", LEGAL)
    found: list[dict[str, Any]] = []

    def is_written() -> bool:
        found[:] = [line for line in fleet.log_lines("w0") if (line["event"], line.get("lora_id")) == wanted]
        return bool(found)

    wait_until(is_written, within_s=10, what="the load is in the log")
    line = found[-1]
    assert (line["worker_id"], line["component"], line["level"]) == ("w0", "worker", "info")
    assert line["duration_sec"] > 0
    assert line["memory_mb"] > 0
    assert datetime.fromisoformat(line["timestamp"]).tzinfo is not None
