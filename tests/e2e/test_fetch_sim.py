"""Fleets whose workers fetch from one another: what the source is asked for, and copies that outlast workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lorafleet.identity import fleet_source
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import SmallFleet, small_fleet
from tests.patience import until
from tests.workers.kills import https_sources
from tests.workers.source_servers import FaultyConnection

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fetch-model") / "model")


@asynccontextmanager
async def far_fleet(
    folder: Path, model: Path, *, workers: int, slots: int = 4
) -> AsyncIterator[tuple[SmallFleet, str, Any]]:
    """A fleet, the https:// source of an adapter of 4 MB, and the connection that carries all of its bytes."""
    connection = FaultyConnection()
    far = {"far/v1": make_adapter(folder / "far", "far/v1", rank=128)}
    (folder / "empty").mkdir()
    slot_flags = ("--max-loras", str(slots), "--max-cpu-loras", str(slots))
    flags = ("--source-networks", "127.0.0.0/8", "--max-lora-rank", "128", *slot_flags)
    async with (
        https_sources(far, folder, connection) as sources,
        small_fleet(
            folder / "fleet", model, shelf=folder / "empty", workers=workers, agent=flags,
            engine=("--max-lora-rank", "128", *slot_flags),
        ) as fleet,
    ):  # fmt: skip
        yield fleet, sources["far/v1"], connection


async def test_five_workers_that_need_an_adapter_at_one_moment_ask_its_source_once(tmp_path: Path, model: Path):
    async with far_fleet(tmp_path, model, workers=5) as (fleet, source, connection):
        spec = {"lora_id": "far/v1", "source": source, "policy": {"loading": "eager", "min_replicas": 5}}
        (await fleet.http.post("/v1/adapters", json=spec)).raise_for_status()

        async def are_ready() -> bool:
            return (await fleet.adapter("far/v1"))["status"]["replicas"]["ready"] == 5

        await until(are_ready, within_s=60, what="all five workers have it")
        size = (await fleet.adapter("far/v1"))["status"]["card"]["size_bytes"]
        assert size > 4_000_000
        assert size <= connection.carried < 1.1 * size, "TLS adds some bytes"

        async def all_reported() -> bool:
            items = (await fleet.http.get("/v1/workers")).json()["data"]
            return [item["files"]["held"] for item in items] == [1] * 5

        await until(all_reported, what="every agent has reported its files")


async def test_uploaded_bytes_outlast_a_drained_worker_and_serve_on_every_other(tmp_path: Path, model: Path):
    async with far_fleet(tmp_path, model, workers=3) as (fleet, source, connection):
        (await fleet.http.post("/v1/adapters", json={"lora_id": "far/v1", "source": source})).raise_for_status()

        async def is_inspected() -> bool:
            return bool((await fleet.adapter("far/v1"))["spec"]["digest"])

        await until(is_inspected)
        digest = (await fleet.adapter("far/v1"))["spec"]["digest"]
        carried = connection.carried
        spec = {"lora_id": "own/v1", "source": fleet_source(digest), "digest": digest}
        (await fleet.http.post("/v1/adapters", json=spec)).raise_for_status()

        async def keepers() -> list[str]:
            item = await fleet.adapter("own/v1")
            return item["status"]["copies"]["kept_by"] if item["status"]["copies"]["state"] == "kept" else []

        first, second = await until(keepers, what="two workers keep it")
        (await fleet.http.post(f"/v1/workers/{first}/drain", json={"deadline_s": 0})).raise_for_status()

        async def has_moved() -> bool:
            return set(await keepers()) >= {second} and len([name for name in await keepers() if name != first]) == 2

        await until(has_moved, within_s=40, what="another worker keeps the second copy")
        ensured = await fleet.ensure("own/v1", replicas=2)
        assert len(ensured.json()["ready"]) == 2, ensured.text
        assert connection.carried == carried, "nothing came from outside the fleet"


async def test_the_files_of_an_adapter_that_waits_for_a_slot_are_there_before_the_slot_is(tmp_path: Path, model: Path):
    async with far_fleet(tmp_path, model, workers=2, slots=1) as (fleet, source, connection):

        async def on_disk(worker: str) -> set[str]:
            return {item["lora_id"] for item in (await fleet.agents[worker].get("/v1/metadata/loras")).json()["data"]}

        near = {name: make_adapter(tmp_path / "empty", name, rank=8) for name in ("near/v1", "near/v2")}
        sources = {"far/v1": source, **{name: f"file://{path}" for name, path in near.items()}}
        for name, place in sources.items():
            (await fleet.http.post("/v1/adapters", json={"lora_id": name, "source": place})).raise_for_status()
        holder_of = {name: (await fleet.ensure(name)).json()["ready"][0] for name in near}

        async def inspected() -> list[str]:
            return [worker for worker in fleet.agents if "far/v1" in await on_disk(worker)]

        (inspected_on,) = await until(inspected, what="a worker has fetched the far adapter to inspect it")
        (other,) = fleet.agents.keys() - {inspected_on}
        # Both workers are full. The copy on the other one may go first, but not soon.
        for name, worker in holder_of.items():
            factor = {"loss_factor": 1000 if worker == inspected_on else 900}
            (await fleet.http.patch(f"/v1/adapters/{name}", json={"policy": factor})).raise_for_status()
        carried = connection.carried
        assert (await fleet.http.post("/v1/adapters/far/v1/ensure", json={"replicas": 1})).json()["ready"] == []

        async def is_there() -> bool:
            return "far/v1" in await on_disk(other)

        await until(is_there, within_s=60, what="the files have come ahead of the load")
        assert (await fleet.adapter("far/v1"))["status"]["workers"] == []
        assert connection.carried == carried, "the source is asked once"
        (evicted,) = [name for name, worker in holder_of.items() if worker == other]
        (await fleet.http.delete(f"/v1/adapters/{evicted}")).raise_for_status()
        assert (await fleet.ensure("far/v1")).json()["ready"] == [other]
