"""Adapters whose bytes come from clients: one request, broken ones, and what is left when a worker is gone."""

import asyncio
import contextlib
import io
import shutil
import zipfile

import pytest

from lorafleet.identity import fleet_source
from tests.archives import tar_of
from tests.simulation.fleet import adapter_of, until

CHAT = [{"role": "user", "content": "hello"}]


async def put(fleet, name, body, **more):
    return await fleet.http.put(f"/v1/adapters/{name}", content=body, **more)


def code(answer):
    return answer.json()["error"]["code"]


def made(simulation, name, **more):
    """An adapter's folder where no worker may read it."""
    return simulation.adapter(name, beside=True, **more)


async def breaking(whole, sent, arrived):
    """The first bytes of a body, whose client leaves once they have arrived."""
    yield whole[:sent]
    await until(arrived, what="the bytes have arrived")
    raise ConnectionError("the client is gone")


async def received(fleet, name):
    answer = await fleet.http.get(f"/v1/uploads/{name}")
    return answer.json()["received_bytes"] if answer.is_success else 0


async def break_off(fleet, name, whole, sent, *, start=0):
    """Send bytes of an upload from `start` on, and break off once all of them are on a worker."""
    headers = {"content-range": f"bytes {start}-{len(whole) - 1}/{len(whole)}"} if start else {}

    async def arrived():
        return await received(fleet, name) == start + sent

    with contextlib.suppress(ConnectionError):
        body = breaking(whole[start:], sent, arrived)
        await put(fleet, name, body, headers={"content-length": str(len(whole) - start), **headers})


async def test_an_upload_is_registered_kept_on_two_workers_and_answers_at_once(simulation):
    folder = made(simulation, "sql/v1")
    fleet = await simulation.fleet(workers=3)
    answer = await put(fleet, "sql/v1", tar_of(folder))
    assert answer.status_code == 201, answer.text
    item = answer.json()
    digest = item["spec"]["digest"]
    assert item["spec"]["source"] == fleet_source(digest)
    assert (len(set(item["kept_on"])), item["note_on_copies"], item["status"]["card"]["rank"]) == (2, "", 8)
    holders = [
        name for name, agent in fleet.agents.items() if (await agent.get(f"/v1/files/{digest}")).is_success
    ]  # fmt: skip
    assert sorted(holders) == sorted(item["kept_on"])
    asked = await fleet.ask("sql/v1", messages=CHAT)
    assert asked.status_code == 200, asked.text
    assert asked.headers["x-lorafleet-adapter"] == f"sql/v1@{digest[:12]}"
    # The same again needs no byte; other bytes are another version.
    again = await put(fleet, "sql/v1", tar_of(folder), params={"digest": digest})
    assert (again.status_code, again.json()["spec"]["digest"]) == (200, digest)
    assert (await put(fleet, "sql/v1", tar_of(folder, "w"))).status_code == 200
    other = await put(fleet, "sql/v1", tar_of(made(simulation, "other/v1", seed=7)))
    assert (other.status_code, code(other)) == (409, "immutable"), other.text


async def test_two_files_need_no_archive_and_the_router_takes_uploads_with_the_callers_key(simulation):
    folder, fleet = made(simulation, "sql/v1"), await simulation.fleet()
    (router,) = fleet.routers
    for name, status in (("adapter_config.json", 202), ("adapter_model.safetensors", 201)):
        body = (folder / name).read_bytes()
        answer = await router.put("/v1/adapters/sql/v1", content=body, params={"file": name})
        assert answer.status_code == status, answer.text
    assert answer.json()["kept_on"] == ["w0"]
    assert "1 worker alone" in answer.json()["note_on_copies"]
    for key, refused in (("lf-nobody", 401), (fleet.keys["load"], 403)):
        headers = {"authorization": f"Bearer {key}"}
        tried = await router.put("/v1/adapters/x/v1", content=bytes(30_000_000), headers=headers)
        assert tried.status_code == refused
    assert (await router.get("/v1/adapters/sql/v1")).json()["lora_id"] == "sql/v1"
    assert (await router.delete("/v1/adapters/sql/v1")).status_code in {202, 204}


async def test_a_broken_upload_goes_on_where_it_was_also_at_an_orchestrator_that_was_killed_twice(simulation):
    whole = tar_of(made(simulation, "sql/v1"), "w")
    third = len(whole) // 3
    fleet = await simulation.fleet(workers=2)
    await break_off(fleet, "sql/v1", whole, third)
    for part in (1, 2):
        fleet.kill("orch0", away_s=5)
        await until(fleet.is_whole, what="the orchestrator is back, and has heard of the workers")
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
async def test_the_loss_of_either_worker_after_the_answer_loses_nothing(simulation, which):
    fleet = await simulation.fleet(workers=3)
    item = (await put(fleet, "sql/v1", tar_of(made(simulation, "sql/v1")))).json()
    lost = item["kept_on"][which]
    files = fleet.files_of(lost)
    for process in (lost, lost.replace("w", "engine")):
        fleet.kill(process, away_s=None)
    shutil.rmtree(files)
    left = sorted(fleet.agents.keys() - {lost})
    assert await fleet.ensure("sql/v1", replicas=2) == left


async def test_bytes_that_were_deleted_are_kept_again_when_they_come_again(simulation):
    whole, fleet = tar_of(made(simulation, "sql/v1")), await simulation.fleet(workers=2)

    async def is_gone():
        return (await fleet.http.get("/v1/adapters/sql/v1")).status_code == 404

    for _ in range(3):
        item = (await put(fleet, "sql/v1", whole)).json()
        assert len(item["kept_on"]) == 2, item
        assert await fleet.ensure("sql/v1")
        for agent in fleet.agents.values():
            assert (await agent.get(f"/v1/files/{item['spec']['digest']}")).is_success
        await fleet.http.delete("/v1/adapters/sql/v1")
        await until(is_gone, what="it is deleted")


async def test_bytes_that_are_no_adapter_or_another_or_too_many_register_nothing(simulation):
    whole = tar_of(made(simulation, "sql/v1"), "w")
    fleet = await simulation.fleet(workers=2, max_upload_bytes=len(whole))
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


async def test_a_folder_as_upload_store_keeps_the_bytes_for_every_worker(simulation):
    store = simulation.shelf / "uploads"
    fleet = await simulation.fleet(workers=2, upload_store=str(store))
    answer = await put(fleet, "sql/v1", tar_of(made(simulation, "sql/v1")))
    assert answer.status_code == 201, answer.text
    item = answer.json()
    assert (item["spec"]["source"], item["kept_on"]) == (f"file://{store}/{item['spec']['digest']}", [])
    kept = {path.name for path in (store / item["spec"]["digest"]).iterdir()}
    assert kept == {"adapter_config.json", "adapter_model.safetensors"}
    assert await fleet.ensure("sql/v1", replicas=2) == ["w0", "w1"]


async def test_an_upload_store_that_workers_may_not_read_is_refused(simulation):
    fleet = await simulation.fleet(workers=2, upload_store=str(simulation.folder / "elsewhere"))
    refused = await put(fleet, "sql/v1", tar_of(made(simulation, "sql/v1")))
    assert (refused.status_code, code(refused)) == (503, "upload_store_failed")
    assert "lora_roots" in refused.text


async def test_a_tenants_unfinished_uploads_are_bounded_wherever_they_are_and_others_are_free(simulation):
    """Each begins at the worker that its name draws, so no worker alone sees the count."""
    whole = tar_of(made(simulation, "sql/v1"), "w")
    fleet = await simulation.fleet(workers=2, tenants=("acme", "globex"), max_unfinished_uploads=2)

    async def begun(name):
        headers = fleet.as_(name.partition("/")[0])
        return (await fleet.http.get(f"/v1/uploads/{name}", headers=headers)).is_success

    async def break_off_at_once(name):
        more = fleet.as_(name.partition("/")[0]) | {"content-length": str(len(whole))}
        with contextlib.suppress(ConnectionError):
            await put(fleet, name, breaking(whole, 0, lambda: begun(name)), headers=more)

    await asyncio.gather(*(break_off_at_once(f"acme/{number}") for number in range(2)))
    refused = await fleet.routers[0].put("/v1/adapters/acme/x", content=whole, headers=fleet.as_("acme"))
    assert (refused.status_code, code(refused)) == (429, "too_many_uploads"), refused.text
    assert float(refused.headers["retry-after"]) >= 1
    assert "acme/0, acme/1" in refused.text
    assert (await put(fleet, "globex/x", whole, headers=fleet.as_("globex"))).status_code == 201
    # Going on with one is always possible, and what ends makes room.
    resumed = {"content-range": f"bytes 0-{len(whole) - 1}/{len(whole)}"} | fleet.as_("acme")
    assert (await put(fleet, "acme/0", whole, headers=resumed)).status_code == 201
    assert (await put(fleet, "acme/x", whole, headers=fleet.as_("acme"))).status_code == 201
    assert (await fleet.http.delete("/v1/uploads/acme/1", headers=fleet.as_("acme"))).status_code == 204


async def test_a_zip_of_zeros_is_refused_by_its_ratio_and_a_zip_made_on_windows_is_taken(simulation):
    folder, fleet = made(simulation, "sql/v1"), await simulation.fleet()

    def zip_of(weights):
        into = io.BytesIO()
        with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("my adapter\\", b"")
            packed.writestr("my adapter\\adapter_config.json", (folder / "adapter_config.json").read_bytes())
            packed.writestr("my adapter\\adapter_model.safetensors", weights)
        return into.getvalue()

    bomb = await put(fleet, "bomb/v1", zip_of(bytes(80 << 20)))
    assert (bomb.status_code, code(bomb)) == (413, "upload_too_large"), bomb.text
    assert "100 times the archive's size" in bomb.text
    answer = await put(fleet, "sql/v1", zip_of((folder / "adapter_model.safetensors").read_bytes()))
    assert answer.status_code == 201, answer.text
    assert adapter_of(await fleet.ask("sql/v1")) == "sql/v1"
