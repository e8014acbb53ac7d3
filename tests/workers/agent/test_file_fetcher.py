"""Adapters from other workers, agent to agent: real agents with sims, a source that counts, and faults on the way."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from lorafleet.identity import FileEntry, files_digest, fleet_source
from lorafleet.keys.key_edits import add_key
from lorafleet.local.tiny_model import make_adapter
from tests.patience import until, within
from tests.serving import serving
from tests.workers.changed_adapters import adapter_of_nan
from tests.workers.kills import https_sources
from tests.workers.running import SIM, RunningWorker, code, metadata_of
from tests.workers.source_servers import FaultyConnection

NOBODY = "http://127.0.0.1:9"
EPOCH = {"x-lorafleet-epoch": "1"}


@dataclass
class Neighbours:
    """Agents with keys, in one test. `at_source`: carries all bytes of the https:// source."""

    folder: Path
    model: Path
    adapters: Path
    stack: contextlib.AsyncExitStack
    sources: dict[str, str]
    at_source: FaultyConnection
    keys: dict[str, str] = field(default_factory=dict)
    workers: dict[str, RunningWorker] = field(default_factory=dict)

    async def agent(self, name: str, *flags: str, orchestrator: str = NOBODY) -> httpx.AsyncClient:
        (self.folder / name).mkdir()
        more = ("--instance-id", name, "--orchestrator-url", orchestrator, "--warm-deadline-s", "0", "--token")
        more += (self.keys["worker"], "--key-files", str(self.folder / "keys.yaml"))
        more += ("--source-networks", "127.0.0.0/8", "--cache-grace-s", "1", "--max-lora-rank", "128", *flags)
        worker = self.workers[name] = RunningWorker(self.model, self.adapters, self.folder / name, *SIM, *more)
        client = await self.stack.enter_async_context(worker.together(engine=("--max-lora-rank", "128")))
        client.headers["authorization"] = f"Bearer {self.keys['admin']}"
        return client

    async def load(self, client: httpx.AsyncClient, digest: str, *neighbours: str, headers=EPOCH, lora_id="far/v1"):
        body = {"lora_id": lora_id, "source": self.sources["far/v1"], "digest": digest, "from_fleet": True}
        return await client.post("/v1/admin/load_lora", json=body | {"neighbours": neighbours}, headers=headers)

    async def first(self) -> tuple[httpx.AsyncClient, str]:
        """An agent that has the adapter from its source, and the digest; the source's bytes are counted from now on."""
        client = await self.agent("w0")
        body = {"lora_id": "far/v1", "source": self.sources["far/v1"]}
        digest = (await client.post("/v1/admin/inspect_lora", json=body, headers=EPOCH)).json()["digest"]
        assert self.at_source.carried > 10_000
        self.at_source.carried = 0
        return client, digest


@pytest.fixture
async def neighbours(agent_model, agent_adapters, tmp_path) -> AsyncIterator[Neighbours]:
    keys = {scope: add_key(tmp_path / "keys.yaml", None, [scope]) for scope in ("admin", "worker", "agent-load")}
    at_source = FaultyConnection()
    far = {"far/v1": make_adapter(tmp_path / "far", "far/v1", rank=128)}
    async with (
        https_sources(far, tmp_path, at_source) as sources,
        contextlib.AsyncExitStack() as stack,
    ):
        yield Neighbours(tmp_path, agent_model, agent_adapters, stack, sources, at_source, keys)


def url_of(client: httpx.AsyncClient) -> str:
    return str(client.base_url).rstrip("/")


async def value_of(client: httpx.AsyncClient, series: str) -> float:
    page = (await client.get("/metrics")).text
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(series)), 0.0)


class WrongNeighbour:
    """An agent's file routes that send other bytes of the right length, and record the calls."""

    def __init__(self, files: dict[str, bytes], *, wrong_by: int = 1) -> None:
        self.files, self.calls, self.wrong_by = files, [], wrong_by
        self.app = FastAPI()
        self.app.add_api_route("/v1/files/{digest}", self.list)
        self.app.add_api_route("/v1/files/{digest}/{name}", self.file)

    async def list(self, digest: str, request: Request):
        self.calls.append((request.url.query, request.headers.get("authorization")))
        listed = [{"name": name, "size_bytes": len(content)} for name, content in self.files.items()]
        return JSONResponse({"digest": digest, "files": listed})

    async def file(self, digest: str, name: str):
        content = self.files[name]
        # A single weight is another one: only the digest shows it.
        body = content if name.endswith(".json") else content[:-1] + bytes([content[-1] ^ self.wrong_by])
        return Response(body, headers={"etag": f'"{digest}"'})


@contextlib.contextmanager
def log_events() -> Iterator[list]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


async def test_a_load_comes_from_the_worker_that_has_it_and_asks_the_source_for_nothing(neighbours):
    first, digest = await neighbours.first()
    second = await neighbours.agent("w1")
    answer = await neighbours.load(second, digest, url_of(first))
    assert answer.json()["state"] == "ready", answer.text
    assert neighbours.at_source.carried == 0
    size = sum(map(len, files_in(neighbours.folder / "w0/cache" / digest).values()))
    assert await value_of(second, 'lorafleet_workers_source_bytes_total{source="neighbours"}') == size
    assert await value_of(first, "lorafleet_workers_uploaded_bytes_total") == size
    # The bytes are here now: another adapter with them is fetched from nowhere.
    answer = await neighbours.load(second, digest, NOBODY, lora_id="far/again")
    assert answer.json()["digest"] == digest, answer.text
    assert neighbours.at_source.carried == 0


async def test_a_neighbour_that_breaks_off_is_followed_by_the_next_which_sends_the_rest(neighbours):
    first, digest = await neighbours.first()
    size = sum(map(len, files_in(neighbours.folder / "w0/cache" / digest).values()))
    cut, rest = FaultyConnection(), FaultyConnection()
    cut.cuts = [size // 2] * 99
    second = await neighbours.agent("w1")
    async with cut.to(url_of(first)) as broken, rest.to(url_of(first)) as whole:
        answer = await neighbours.load(second, digest, broken, whole)
    assert answer.json()["state"] == "ready", answer.text
    assert cut.carried > size // 4
    assert rest.carried < size - cut.carried // 2, "the second begins where the first ended"
    assert neighbours.at_source.carried == 0


async def test_wrong_bytes_are_dropped_and_said_and_the_next_neighbour_is_asked(neighbours):
    first, digest = await neighbours.first()
    wrong = WrongNeighbour(files_in(neighbours.folder / "w0/cache" / digest))
    second = await neighbours.agent("w1")
    async with serving(wrong.app) as evil:
        with log_events() as lines:
            answer = await neighbours.load(second, digest, evil, url_of(first))
        assert answer.json()["state"] == "ready", answer.text
        assert any(line["event"] == "wrong bytes from other workers" and line["urls"] == [evil] for line in lines)
        assert ("recheck=true", f"Bearer {neighbours.keys['worker']}") in wrong.calls
        assert await value_of(second, 'lorafleet_workers_neighbour_failures_total{reason="digest"}') == 1
        assert neighbours.at_source.carried == 0
        third = await neighbours.agent("w2")
        answer = await neighbours.load(third, digest, evil)
        assert answer.json()["digest"] == digest, "the source has the right ones"
    for name in ("w1", "w2"):
        folder = neighbours.folder / name / "cache"
        assert files_in(folder / digest) == files_in(neighbours.folder / "w0/cache" / digest)
        assert not [path for path in folder.iterdir() if path.name.startswith(".partial")]
    assert neighbours.at_source.carried > 0


async def test_nan_of_the_right_digest_is_refused_and_its_holder_is_not_blamed(neighbours, tmp_path):
    good = make_adapter(tmp_path / "made", "good")
    files = files_in(adapter_of_nan(good, tmp_path / "diverged"))
    digest = files_digest(
        FileEntry(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()
    )
    holder = WrongNeighbour(files, wrong_by=0)
    second = await neighbours.agent("w1", "--source-attempts", "1")
    async with serving(holder.app) as url:
        body = {"lora_id": "far/v2", "source": fleet_source(digest), "digest": digest, "neighbours": [url]}
        answer = await second.post("/v1/admin/load_lora", json=body, headers=EPOCH)
    assert code(answer) == "weights_not_finite", answer.text
    assert await value_of(second, 'lorafleet_workers_neighbour_failures_total{reason="digest"}') == 0


async def test_the_source_is_asked_when_all_neighbours_are_gone(neighbours):
    _, digest = await neighbours.first()
    second = await neighbours.agent("w1", "--source-attempts", "1")
    answer = await neighbours.load(second, digest, NOBODY, f"{NOBODY}9")
    assert answer.json()["state"] == "ready", answer.text
    assert neighbours.at_source.carried > 0


async def test_only_the_leader_may_name_neighbours_as_they_get_the_agents_key(neighbours):
    _, digest = await neighbours.first()
    wrong = WrongNeighbour({})
    second = await neighbours.agent("w1")
    async with serving(wrong.app) as evil:
        for key in ("agent-load", "admin"):
            headers = {"authorization": f"Bearer {neighbours.keys[key]}"}
            answer = await neighbours.load(second, digest, evil, headers=headers, lora_id=f"far/{key}")
            assert answer.json()["state"] == "ready", answer.text
    assert wrong.calls == []


async def test_kept_files_outlast_what_needs_room_and_released_ones_do_not(neighbours):
    first, digest = await neighbours.first()
    second = await neighbours.agent("w1", "--max-disk-bytes", "1")
    folder = neighbours.folder / "w1/cache" / digest
    keep = {"mark": "kept", "digests": [digest], "neighbours": [url_of(first)]}
    tight = await second.post("/v1/admin/mark_files", json=keep, headers=EPOCH)
    assert code(tight) == "disk_full"
    third = await neighbours.agent("w2")
    folder = neighbours.folder / "w2/cache" / digest
    assert (await third.post("/v1/admin/mark_files", json=keep, headers=EPOCH)).status_code == 204
    kept = (await third.get(f"/v1/files/{digest}", headers=EPOCH)).json()
    assert {file["name"] for file in kept["files"]} == {"adapter_config.json", "adapter_model.safetensors"}
    assert neighbours.at_source.carried == 0
    assert await value_of(third, "lorafleet_workers_kept_adapters") == 1
    assert (folder / ".kept").exists()
    # It serves as the fleet's own source here, and anywhere.
    body = {"lora_id": "own/v1", "source": fleet_source(digest), "digest": digest}
    assert (await third.post("/v1/admin/load_lora", json=body, headers=EPOCH)).json()["state"] == "ready"
    unloaded = await third.post("/v1/admin/unload_lora", json={"lora_id": "own/v1"}, headers=EPOCH)
    assert unloaded.is_success, unloaded.text
    released = await third.post("/v1/admin/mark_files", json={"mark": "gone", "digests": [digest]}, headers=EPOCH)
    assert released.status_code == 204
    await until(lambda: not folder.exists(), what="a dropped adapter is deleted by a sweep")


async def test_load_of_the_leader_keeps_the_files_where_it_says_so(neighbours):
    first, digest = await neighbours.first()
    second = await neighbours.agent("w1")
    body = {"source": neighbours.sources["far/v1"], "digest": digest, "from_fleet": True, "keeps_files": True}
    body["neighbours"] = [url_of(first)]
    for lora_id, headers, kept in (("far/v1", {}, 0), ("far/v2", EPOCH, 1)):
        loaded = await second.post("/v1/admin/load_lora", json=body | {"lora_id": lora_id}, headers=headers)
        assert loaded.json()["state"] == "ready", loaded.text
        assert await value_of(second, "lorafleet_workers_kept_adapters") == kept, "only the leader keeps files"


async def test_what_an_agent_sends_at_a_time_is_bounded(neighbours):
    first, digest = await neighbours.first()
    second = await neighbours.agent("w1", "--max-uploads", "1", "--upload-bytes-per-s", "20000")
    answer = await neighbours.load(second, digest, url_of(first))
    assert answer.is_success, answer.text
    path = f"/v1/files/{digest}/adapter_model.safetensors"
    async with second.stream("GET", path) as slow:
        assert slow.status_code == 200
        busy = await second.get(path)
        assert (busy.status_code, code(busy), busy.headers["retry-after"]) == (503, "files_busy", "1")
    tenant = {"authorization": f"Bearer {neighbours.keys['agent-load']}"}
    assert (await second.get(path, headers=tenant)).status_code == 403


async def test_files_that_rot_are_found_when_another_worker_got_wrong_bytes(neighbours):
    first, digest = await neighbours.first()
    weights = neighbours.folder / "w0/cache" / digest / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    second = await neighbours.agent("w1")
    answer = await neighbours.load(second, digest, url_of(first))
    assert answer.json()["digest"] == digest, "from the source"
    assert neighbours.at_source.carried > 0
    assert code(await first.get(f"/v1/files/{digest}")) == "files_not_found", "the damaged ones are sent to nobody"


async def test_the_digest_of_another_rank_than_this_worker_takes_is_no_wrong_bytes(neighbours):
    first, digest = await neighbours.first()
    second = await neighbours.agent("w1", "--max-lora-rank", "64")
    with log_events() as lines:
        answer = await neighbours.load(second, digest, url_of(first))
    assert code(answer) == "rank_too_big"
    assert not any("wrong bytes" in line["event"] for line in lines)
    assert (await metadata_of(second)).lora.loaded_loras[0].state == "failed"
    assert json.loads(answer.text)["error"]["message"]


async def test_many_loads_at_once_of_one_digest_fetch_it_and_end(neighbours):
    first, digest = await neighbours.first()
    second = await neighbours.agent("w1")
    loads = [neighbours.load(second, digest, url_of(first), lora_id=f"far/{number}") for number in range(3)]
    answers = await asyncio.gather(*loads)
    assert {answer.json()["state"] for answer in answers} == {"ready"}
    assert neighbours.at_source.carried == 0


async def test_while_the_orchestrator_is_away_agents_find_the_fleets_own_files_at_one_another(neighbours):
    first, digest = await neighbours.first()
    told = asyncio.Event()
    leader = FastAPI()

    @leader.post("/v1/workers/register")
    async def register(request: Request):
        beat = await request.json()
        if beat["agents_digest"] == "list-1":
            told.set()
        agents = {"agents": [NOBODY, url_of(first)], "agents_digest": "list-1"}
        return {"epoch": 1, "revision": 1, "interval_s": 0.1, "files_seen": 0} | agents

    async with serving(leader) as url:
        second = await neighbours.agent("w1", "--source-attempts", "1", orchestrator=url)
        async with within(20):
            await told.wait()
    key = {"authorization": f"Bearer {neighbours.keys['agent-load']}"}
    body = {"lora_id": "own/v1", "source": fleet_source(digest), "digest": digest}
    answer = await second.post("/v1/admin/load_lora", json=body, headers=key)
    assert answer.json()["state"] == "ready", answer.text
    missing = body | {"lora_id": "own/v2", "source": fleet_source("0" * 64), "digest": "0" * 64}
    assert code(await second.post("/v1/admin/load_lora", json=missing, headers=key)) in {
        "source_failed", "source_not_found",
    }  # fmt: skip
