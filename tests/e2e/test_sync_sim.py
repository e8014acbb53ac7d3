"""Two fleets on loopback: what one has is taken over by the other, bytes by digest; and loads that no fleet made."""

import asyncio
import shutil
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import POLL_S, small_fleet
from tests.patience import patience, until

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sync-model") / "model")


async def test_another_fleets_record_is_shown_taken_over_by_digest_and_the_second_sync_does_nothing(
    tmp_path: Path, model: Path
):
    shelf = tmp_path / "there-only"
    for lora_id in ("sql/v1", "legal/v2"):
        make_adapter(shelf, lora_id, rank=8)
    (tmp_path / "empty").mkdir()
    async with small_fleet(tmp_path / "there", model, shelf=shelf) as there:
        key = tmp_path / "there.key"
        key.write_text(there.keys["export"])
        for lora_id in ("sql/v1", "legal/v2"):
            spec = {"lora_id": lora_id, "source": f"file://{shelf}/{lora_id}", "tenants": ["acme"]}
            (await there.http.post("/v1/adapters", json=spec)).raise_for_status()
        await until(lambda: _is_inspected(there, "sql/v1", "legal/v2"), what="the first fleet has its adapters")
        (await there.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})).raise_for_status()
        digest = (await there.adapter("sql/v1"))["spec"]["digest"]
        peers = {"peer_fleets": (there.url,), "peer_token_file": key}
        async with small_fleet(tmp_path / "here", model, shelf=tmp_path / "empty", workers=2, **peers) as here:
            source = ("sync", "--from", there.url)
            status, output = await here.cli(*source, "--from-token", "lf-wrong", "--dry-run")
            assert (status, "not known" in output) == (1, True), output
            status, output = await here.cli(*source, "--from-token-file", str(key), "--dry-run")
            assert status == 0, output
            assert all(word in output for word in ("sql/v1", "legal/v2", "alias", digest[:12])), output
            assert (await here.http.get("/v1/adapters")).json()["data"] == [], "a dry run changes nothing"
            status, output = await here.cli(*source, "--from-token-file", str(key))
            assert (status, "--yes" in output) == (2, True), output

            status, output = await here.cli(*source, "--from-token-file", str(key), "--yes")
            assert status == 0, output
            taken = await here.adapter("sql/v1")
            assert (taken["spec"]["digest"], taken["spec"]["tenants"]) == (digest, ["acme"])
            assert taken["status"]["card"]["rank"] == 8, "a worker here has verified the bytes"
            status, output = await here.cli(*source, "--from-token-file", str(key), "--yes")
            assert (status, "nothing to do" in output) == (0, True), output

            shutil.rmtree(shelf)  # the bytes come from the workers' disks
            ensured = await here.ensure("sql/v1", replicas=2)
            assert sorted(ensured.json()["ready"]) == ["w0", "w1"], ensured.text

        refused = await there.http.get(f"/v1/files/{digest}", headers={"authorization": f"Bearer {there.keys['load']}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "scope_missing")


async def _is_inspected(fleet, *lora_ids: str) -> bool:
    """Whether workers have verified these adapters."""
    return all([(await fleet.adapter(lora_id)).get("status", {}).get("card") for lora_id in lora_ids])


async def test_a_load_by_a_script_is_adopted_by_the_whole_fleet_and_every_router_lists_it_in_time(
    tmp_path: Path, model: Path
):
    folder = make_adapter(tmp_path / "scripts", "mine", rank=8)
    (tmp_path / "empty").mkdir()
    async with small_fleet(tmp_path / "fleet", model, shelf=tmp_path / "empty", workers=2, routers=2) as fleet:
        await fleet.script_loads("w0", "mine", folder)

        async def orphans():
            return [item for item in (await fleet.http.get("/v1/orphans")).json()["data"] if item["card"]["digest"]]

        (orphan,) = await until(orphans, what="the load is shown as an orphan")
        assert (orphan["lora_id"], orphan["workers"], orphan["problem"]) == ("mine", ["w0"], None)
        assert await fleet.models() == [["tiny-qwen"]] * 2

        shutil.rmtree(folder)  # other workers never had it, and now w0 has it in its cache alone
        status, output = await fleet.cli("orphans", "adopt", "mine", "--everyone")
        assert (status, "1 adopted" in output) == (0, True), output
        await _equal_within_bound(fleet, ["tiny-qwen", "mine"])
        ensured = await fleet.ensure("mine", replicas=2)
        assert sorted(ensured.json()["ready"]) == ["w0", "w1"], ensured.text

        async def names_at_w0():
            loaded = (await fleet.agents["w0"].get("/v1/admin/loras")).json()["loaded_loras"]
            return [lora["engine_name"] for lora in loaded] == [f"mine@{orphan['card']['digest'][:12]}"]

        await until(names_at_w0, within_s=40, what="the script's copy has left the engine")
        answer = await fleet.routers[0].post(
            "/v1/completions", json={"model": "mine", "prompt": "hello", "max_tokens": 2}
        )
        assert answer.status_code == 200, answer.text
        assert (await fleet.http.delete("/v1/adapters/mine")).is_success
        await _equal_within_bound(fleet, ["tiny-qwen"])


async def _equal_within_bound(fleet, wanted: list[str]) -> None:
    """Wait until every router lists these models, which must be within the bound that the docs state."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def are_equal():
        return await fleet.models() == [wanted] * len(fleet.routers)

    await until(are_equal, what=f"every router lists {wanted}")
    assert loop.time() - began < patience(POLL_S * 2)
