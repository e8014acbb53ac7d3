"""Adapters whose bytes come from clients: one request, broken ones, and what is left when a worker is gone."""

import asyncio
import contextlib
import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from lorafleet.client import AsyncFleet, Fleet, FleetError, PushProgress
from lorafleet.identity import fleet_source
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import SmallFleet, small_fleet
from tests.patience import patience, until

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
async def fleet_of(tmp_path: Path, model: Path, *, name: str = "fleet", workers: int = 2, **more):
    (tmp_path / "shelf").mkdir(exist_ok=True)
    async with small_fleet(tmp_path / name, model, shelf=tmp_path / "shelf", workers=workers, **more) as fleet:
        await until(lambda: _has_workers(fleet, workers), what="all workers are ready")
        yield fleet


def tar_of(folder: Path, mode: str = "w:gz") -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode=mode) as packed:
        packed.add(folder, "adapter")
    return into.getvalue()


async def put(fleet: SmallFleet, name: str, body, **more):
    return await fleet.http.put(f"/v1/adapters/{name}", content=body, **more)


def code(answer) -> str:
    return answer.json()["error"]["code"]


async def breaking(whole: bytes, sent: int, arrived):
    """The first bytes of a body, whose client leaves once they have arrived."""
    yield whole[:sent]
    await until(arrived)
    raise ConnectionError("the client is gone")


async def received(fleet: SmallFleet, name: str) -> int:
    answer = await fleet.http.get(f"/v1/uploads/{name}")
    return answer.json()["received_bytes"] if answer.is_success else 0


async def break_off(fleet: SmallFleet, name: str, whole: bytes, sent: int, *, start: int = 0) -> None:
    """Send bytes of an upload from `start` on, and break off once all of them are on a worker."""
    headers = {"content-range": f"bytes {start}-{len(whole) - 1}/{len(whole)}"} if start else {}

    async def arrived() -> bool:
        return await received(fleet, name) == start + sent

    with contextlib.suppress(ConnectionError):
        body = breaking(whole[start:], sent, arrived)
        await put(fleet, name, body, headers={"content-length": str(len(whole) - start), **headers})


async def test_an_upload_is_registered_kept_on_two_workers_and_answers_at_once(tmp_path, model, made):
    folder = made("sql/v1")
    async with fleet_of(tmp_path, model, routers=1, workers=3) as fleet:
        answer = await put(fleet, "sql/v1", tar_of(folder))
        assert answer.status_code == 201, answer.text
        item = answer.json()
        assert item["spec"]["source"] == fleet_source(item["spec"]["digest"])
        assert (len(set(item["kept_on"])), item["note_on_copies"], item["status"]["card"]["rank"]) == (2, "", 8)
        holders = [
            name
            for name, agent in fleet.agents.items()
            if (await agent.get(f"/v1/files/{item['spec']['digest']}")).is_success
        ]
        assert sorted(holders) == sorted(item["kept_on"])
        asked = await fleet.routers[0].post("/v1/chat/completions", json={**CHAT, "model": "sql/v1"})
        assert asked.status_code == 200, asked.text
        assert asked.headers["x-lorafleet-adapter"] == f"sql/v1@{item['spec']['digest'][:12]}"
        # The same again needs no byte; other bytes are another version.
        again = await put(fleet, "sql/v1", tar_of(folder), params={"digest": item["spec"]["digest"]})
        assert (again.status_code, again.json()["spec"]["digest"]) == (200, item["spec"]["digest"])
        assert (await put(fleet, "sql/v1", tar_of(folder, "w"))).status_code == 200
        other = await put(fleet, "sql/v1", tar_of(made("other/v1", seed=7)))
        assert (other.status_code, code(other)) == (409, "immutable"), other.text


async def test_two_files_need_no_archive_and_the_router_takes_uploads_with_the_callers_key(tmp_path, model, made):
    folder = made("sql/v1")
    async with fleet_of(tmp_path, model, routers=1, workers=1) as fleet:
        router = fleet.routers[0]
        config, weights = (folder / name for name in ("adapter_config.json", "adapter_model.safetensors"))
        for path, status in ((config, 202), (weights, 201)):
            answer = await router.put("/v1/adapters/sql/v1", content=path.read_bytes(), params={"file": path.name})
            assert answer.status_code == status, answer.text
        assert answer.json()["kept_on"] == ["w0"]
        assert "1 worker alone" in answer.json()["note_on_copies"]
        for key, refused in (("lf-nobody", 401), (fleet.keys["load"], 403)):
            tried = await router.put(
                "/v1/adapters/x/v1", content=bytes(30_000_000), headers={"authorization": f"Bearer {key}"}
            )
            assert tried.status_code == refused
        assert (await router.get("/v1/adapters/sql/v1")).json()["lora_id"] == "sql/v1"
        assert (await router.delete("/v1/adapters/sql/v1")).status_code in {202, 204}


async def test_a_broken_upload_goes_on_where_it_was_also_at_an_orchestrator_that_was_killed_twice(
    tmp_path, model, made
):
    folder = made("sql/v1")
    whole = tar_of(folder, "w")
    third = len(whole) // 3
    async with fleet_of(tmp_path, model) as fleet:
        await break_off(fleet, "sql/v1", whole, third)
        for part in (1, 2):
            await fleet.parts["orchestrator"].aclose()
            assert fleet.start_orchestrator is not None
            await fleet.start_orchestrator()
            await until(lambda: _has_workers(fleet, 2))
            assert await received(fleet, "sql/v1") == part * third
            if part == 1:
                await break_off(fleet, "sql/v1", whole, third, start=third)
        start = 2 * third
        wrong = {"content-range": f"bytes {start + 1}-{len(whole) - 1}/{len(whole)}"}
        gap = await put(fleet, "sql/v1", whole[start + 1 :], headers=wrong)
        assert (gap.status_code, code(gap)) == (409, "upload_offset")
        other = {"content-range": f"bytes {start}-{len(whole)}/{len(whole) + 1}"}
        assert code(await put(fleet, "sql/v1", whole[start:] + b"x", headers=other)) == "upload_unknown"
        headers = {"content-range": f"bytes {start}-{len(whole) - 1}/{len(whole)}"}
        answer = await put(fleet, "sql/v1", whole[start:], headers=headers)
        assert answer.status_code == 201, answer.text
        gone = await fleet.http.get("/v1/uploads/sql/v1")
        assert (gone.status_code, code(gone)) == (404, "upload_unknown")


@pytest.mark.parametrize("which", [0, 1])
async def test_the_loss_of_either_worker_after_the_answer_loses_nothing(tmp_path, model, made, which):
    async with fleet_of(tmp_path, model, workers=3, lost_after_s=patience(0.5), probe_after_s=0.3) as fleet:
        item = (await put(fleet, "sql/v1", tar_of(made("sql/v1")))).json()
        lost = item["kept_on"][which]
        await fleet.parts[lost].aclose()
        shutil.rmtree(tmp_path / "fleet" / lost)
        left = sorted(fleet.agents.keys() - {lost})
        ensured = await fleet.ensure("sql/v1", replicas=2)
        assert sorted(ensured.json()["ready"]) == left, ensured.text


async def test_bytes_that_were_deleted_are_kept_again_when_they_come_again(tmp_path, model, made):
    whole = tar_of(made("sql/v1"))
    async with fleet_of(tmp_path, model) as fleet:
        for _ in range(3):
            item = (await put(fleet, "sql/v1", whole)).json()
            assert len(item["kept_on"]) == 2, item
            ensured = await fleet.ensure("sql/v1")
            assert ensured.json()["ready"], ensured.text
            for agent in fleet.agents.values():
                assert (await agent.get(f"/v1/files/{item['spec']['digest']}")).is_success
            await fleet.http.delete("/v1/adapters/sql/v1")
            await until(lambda: _is_gone(fleet, "sql/v1"))


async def test_bytes_that_are_no_adapter_or_another_or_too_many_register_nothing(tmp_path, model, made):
    whole = tar_of(made("sql/v1"), "w")
    async with fleet_of(tmp_path, model, max_upload_bytes=len(whole)) as fleet:
        for body, params, status, word in (
            (b"garbage", {}, 400, "source_invalid"),
            (b"", {}, 400, "source_invalid"),
            (whole, {"digest": "0" * 64}, 400, "digest_mismatch"),
            (whole, {"base_model": "another"}, 503, "no_worker"),
            (whole, {"file": "adapter_model.bin"}, 400, "invalid_request"),
            (whole + b"x", {}, 413, "upload_too_large"),
        ):
            answer = await put(fleet, "sql/v1", body, params=params)
            assert (answer.status_code, code(answer)) == (status, word), answer.text

        async def chunked():
            yield whole
            yield b"x"

        too_many = await put(fleet, "sql/v1", chunked())
        assert (too_many.status_code, code(too_many)) == (413, "upload_too_large")
        ranged = await put(fleet, "sql/v1", b"x", headers={"content-range": f"bytes 0-0/{len(whole) + 1}"})
        assert (ranged.status_code, code(ranged)) == (413, "upload_too_large")
        odd = await put(fleet, "sql/v1", b"x", headers={"content-range": "bytes 5-4/3"})
        assert (odd.status_code, code(odd)) == (400, "invalid_content_range")
        assert (await fleet.http.get("/v1/adapters/sql/v1")).status_code == 404
        assert (await put(fleet, "no good name", whole)).status_code == 400


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


async def test_a_folder_as_upload_store_keeps_the_bytes_for_every_worker(tmp_path, model, made):
    store = tmp_path / "shelf" / "uploads"
    async with fleet_of(tmp_path, model, upload_store=str(store)) as fleet:
        answer = await put(fleet, "sql/v1", tar_of(made("sql/v1")))
        assert answer.status_code == 201, answer.text
        item = answer.json()
        assert (item["spec"]["source"], item["kept_on"]) == (f"file://{store}/{item['spec']['digest']}", [])
        kept = {path.name for path in (store / item["spec"]["digest"]).iterdir()}
        assert kept == {"adapter_config.json", "adapter_model.safetensors"}
        ensured = await fleet.ensure("sql/v1", replicas=2)
        assert sorted(ensured.json()["ready"]) == ["w0", "w1"], ensured.text
    async with fleet_of(tmp_path, model, name="blind", upload_store=str(tmp_path / "elsewhere")) as fleet:
        refused = await put(fleet, "sql/v1", tar_of(made("sql/v1")))
        assert (refused.status_code, code(refused)) == (503, "upload_store_failed")
        assert "lora_roots" in refused.text


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


async def _is_gone(fleet: SmallFleet, name: str) -> bool:
    return (await fleet.http.get(f"/v1/adapters/{name}")).status_code == 404


async def _has_workers(fleet: SmallFleet, count: int) -> bool:
    items = (await fleet.http.get("/v1/workers")).json().get("data", [])
    return sum(item["state"] == "ready" for item in items) == count


async def test_a_tenants_unfinished_uploads_are_bounded_wherever_they_are_and_others_are_free(tmp_path, model, made):
    """Each begins at the worker that its name draws, so no worker alone sees the count."""
    whole = tar_of(made("sql/v1"), "w")
    tenants = ("acme", "globex")
    async with fleet_of(tmp_path, model, routers=1, tenants=tenants, max_unfinished_uploads=2) as fleet:

        def headers(tenant: str) -> dict[str, str]:
            return {"authorization": f"Bearer {fleet.keys[tenant]}"}

        async def begun(name: str) -> bool:
            tenant = name.partition("/")[0]
            return (await fleet.http.get(f"/v1/uploads/{name}", headers=headers(tenant))).is_success

        async def break_off_at_once(name: str) -> None:
            more = headers(name.partition("/")[0]) | {"content-length": str(len(whole))}
            with contextlib.suppress(ConnectionError):
                await put(fleet, name, breaking(whole, 0, lambda: begun(name)), headers=more)

        await asyncio.gather(*(break_off_at_once(f"acme/{number}") for number in range(2)))
        refused = await fleet.routers[0].put("/v1/adapters/acme/x", content=whole, headers=headers("acme"))
        assert (refused.status_code, code(refused)) == (429, "too_many_uploads"), refused.text
        assert float(refused.headers["retry-after"]) >= 1
        assert "acme/0, acme/1" in refused.text
        assert (await put(fleet, "globex/x", whole, headers=headers("globex"))).status_code == 201
        # Going on with one is always possible, and what ends makes room.
        resumed = {"content-range": f"bytes 0-{len(whole) - 1}/{len(whole)}"} | headers("acme")
        assert (await put(fleet, "acme/0", whole, headers=resumed)).status_code == 201
        assert (await put(fleet, "acme/x", whole, headers=headers("acme"))).status_code == 201
        assert (await fleet.http.delete("/v1/uploads/acme/1", headers=headers("acme"))).status_code == 204


async def test_a_zip_of_zeros_is_refused_by_its_ratio_and_a_zip_made_on_windows_is_taken(tmp_path, model, made):
    def zip_of(weights: bytes) -> bytes:
        into = io.BytesIO()
        with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("my adapter\\", b"")
            packed.writestr("my adapter\\adapter_config.json", (folder / "adapter_config.json").read_bytes())
            packed.writestr("my adapter\\adapter_model.safetensors", weights)
        return into.getvalue()

    folder = made("sql/v1")
    async with fleet_of(tmp_path, model, workers=1) as fleet:
        bomb = await put(fleet, "bomb/v1", zip_of(bytes(80 << 20)))
        assert (bomb.status_code, code(bomb)) == (413, "upload_too_large"), bomb.text
        assert "100 times the archive's size" in bomb.text
        answer = await put(fleet, "sql/v1", zip_of((folder / "adapter_model.safetensors").read_bytes()))
        assert answer.status_code == 201, answer.text
