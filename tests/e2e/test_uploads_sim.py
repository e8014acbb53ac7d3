"""Adapters whose bytes come from real clients: our own libraries, and the command line; and to a real object store."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from lorafleet.client import AsyncFleet, Fleet, FleetError, PushProgress
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.archives import tar_of
from tests.e2e.small_fleets import SmallFleet, small_fleet
from tests.patience import until

pytestmark = pytest.mark.fleet
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("upload-model") / "model")


@pytest.fixture
def made(tmp_path):
    """Makes an adapter's folder where no worker may read it."""

    def make(name: str, **more) -> Path:
        make_adapter(tmp_path / "mine", name, rank=8, **more)
        return tmp_path / "mine" / name

    return make


@contextlib.asynccontextmanager
async def fleet_of(tmp_path: Path, model: Path, *, workers: int = 2, **more):
    (tmp_path / "shelf").mkdir(exist_ok=True)
    async with small_fleet(tmp_path / "fleet", model, shelf=tmp_path / "shelf", workers=workers, **more) as fleet:
        await until(lambda: _has_workers(fleet, workers), what="all workers are ready")
        yield fleet


async def put(fleet: SmallFleet, name: str, body, **more):
    return await fleet.http.put(f"/v1/adapters/{name}", content=body, **more)


def code(answer) -> str:
    return answer.json()["error"]["code"]


async def test_a_full_disk_of_one_worker_sends_an_upload_to_another(tmp_path, model, made, monkeypatch):
    from workers.storage.cache_folder import CacheFolder

    real = CacheFolder.free_bytes
    full = set()
    monkeypatch.setattr(CacheFolder, "free_bytes", lambda self: 10 if self.folder.parent.name in full else real(self))
    async with fleet_of(tmp_path, model) as fleet:
        whole = tar_of(made("sql/v1"))
        for worker in ("w0", "w1"):
            full.clear()
            full.add(worker)
            answer = await put(fleet, f"sql-{worker}/v1", whole)
            assert answer.status_code == 201, answer.text
            assert answer.json()["kept_on"][0] != worker
        full.add("w0")
        refused = await put(fleet, "sql/v3", whole)
        assert (refused.status_code, code(refused), "retry-after" in refused.headers) == (503, "disk_full", True)


@pytest.fixture
def s3(monkeypatch):
    """An S3 server on loopback, as every S3 client of this process finds it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"), ("AWS_ACCESS_KEY_ID", "me"), ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    yield
    server.stop()


@pytest.mark.slow
async def test_an_object_store_keeps_the_bytes_for_every_worker(tmp_path, model, made, s3):
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    await asyncio.to_thread(files.makedirs, "bucket", exist_ok=True)
    async with fleet_of(tmp_path, model, upload_store="s3://bucket/team/uploads") as fleet:
        item = (await put(fleet, "sql/v1", tar_of(made("sql/v1")))).json()
        assert (item["spec"]["source"], item["kept_on"]) == (
            f"s3://bucket/team/uploads/{item['spec']['digest']}",
            [],
        ), item
        ensured = await fleet.ensure("sql/v1", replicas=2)
        assert sorted(ensured.json()["ready"]) == ["w0", "w1"], ensured.text
        await asyncio.to_thread(files.rm, "bucket", recursive=True)
        refused = await put(fleet, "legal/v1", tar_of(made("legal/v1", seed=5)))
        assert (refused.status_code, code(refused)) == (503, "upload_store_failed"), refused.text
        # What was sent stays: once the store is back, no byte is sent again.
        await asyncio.to_thread(files.makedirs, "bucket", exist_ok=True)
        size = (await fleet.http.get("/v1/uploads/legal/v1")).json()["files"][0]["total_bytes"]
        done = await put(fleet, "legal/v1", b"", headers={"content-range": f"bytes */{size}"})
        assert done.status_code == 201, done.text


async def test_the_python_client_pushes_publishes_and_waits(tmp_path, model, made):
    async with fleet_of(tmp_path, model, routers=1) as fleet:
        seen: list[PushProgress] = []
        router_url = str(fleet.routers[0].base_url)
        folder = made("sql/v1")
        async with AsyncFleet(router_url, fleet.keys["admin"]) as client:
            pushed = await client.push("sql/v1", folder, on_progress=seen.append)
            assert (pushed.lora_id, pushed.is_new, len(pushed.kept_on)) == ("sql/v1", True, 2)
            assert seen[-1].sent_bytes == seen[-1].total_bytes > 0
            assert not (await client.push("sql/v1", folder)).is_new
            with pytest.raises(FleetError) as wrong:
                await client.push("sql/v1", made("other", seed=9))
            assert (wrong.value.status, wrong.value.code) == (409, "immutable")
            assert len(await client.wait_ready("sql/v1", replicas=2)) == 2
        with Fleet(fleet.url, fleet.keys["register"]) as blocking:
            first = await asyncio.to_thread(blocking.publish, "policy", made("step-1", seed=1))
            second = await asyncio.to_thread(blocking.publish, "policy", made("step-2", seed=2))
            again = await asyncio.to_thread(blocking.publish, "policy", made("step-2", seed=2), expected_version=1)
            with pytest.raises(FleetError, match="is at version 2, and the publish expected version 1") as late:
                await asyncio.to_thread(blocking.publish, "policy", made("step-3", seed=3), expected_version=1)
            assert (late.value.status, late.value.code) == (409, "version_conflict")
            assert (first.version, second.version, again.version) == (1, 2, 2)
            assert (first.is_new, second.is_new, again.is_new) == (True, True, False)
            assert sorted(second.workers) == ["w0", "w1"]
        asked = await fleet.routers[0].post("/v1/chat/completions", json={**CHAT, "model": "policy"})
        assert asked.headers["x-lorafleet-adapter"] == f"policy/v2@{second.digest[:12]}", asked.text
        async with AsyncFleet(router_url, fleet.keys["admin"]) as client:
            await client.unload("policy")
            await client.unload("sql/v1")
        gone = await fleet.routers[0].post("/v1/chat/completions", json={**CHAT, "model": "policy"})
        assert gone.status_code == 404


async def test_the_command_line_pushes_with_the_next_step(tmp_path, model, made):
    async with fleet_of(tmp_path, model, workers=1) as fleet:
        folder = str(made("sql/v1"))
        status, output = await fleet.cli("adapters", "push", folder, "sql/v1")
        assert (status, "kept on w0" in output, "lorafleet adapters show sql/v1" in output) == (0, True, True), output
        status, output = await fleet.cli("adapters", "push", folder, "sql/v1")
        assert (status, "registered already" in output) == (0, True), output
        status, output = await fleet.cli("adapters", "push", folder, "policy", "--publish")
        assert (status, "policy points at policy/v1" in output) == (0, True), output
        words = ("adapters", "push", str(made("c", seed=4)), "policy", "--publish", "--expected-version", "0")
        status, output = await fleet.cli(*words)
        assert (status, "is at version 1" in output, "published show policy" in output) == (1, True, True), output
        status, output = await fleet.cli("adapters", "push", str(made("b", seed=3)), "sql/v1")
        assert (status, "--publish" in output, output.count("\n")) == (1, True, 1), output
        status, output = await fleet.cli("adapters", "push", str(tmp_path), "x")
        assert (status, "expected an adapter's folder" in output) == (1, True), output


async def _has_workers(fleet: SmallFleet, count: int) -> bool:
    items = (await fleet.http.get("/v1/workers")).json().get("data", [])
    return sum(item["state"] == "ready" for item in items) == count
