"""Decisions that the router explains, and whom it shows them."""

from lorafleet.keys.key_files import hash_key
from tests.patience import until
from tests.router.doubles import (
    CHAT,
    EngineDouble,
    error_of,
    fleet,
    with_sql,
)
from tests.router.sql_adapter import SQL


async def test_posted_decisions_go_to_an_engine_and_got_ones_to_the_router():
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        asked = {"model": "sql/v1", "input": "x", "questions": [{"type": "predicate", "instructions": "?"}]}
        answer = await client.post("/v1/decisions", json=asked)
        assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (404, "w0"), "this engine has none"
        (decision,) = (await client.get("/v1/decisions")).json()["data"]
        assert decision["worker_id"] == "w0"
        refused = await client.delete("/v1/decisions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET or POST")
        assert (await client.get("/openapi.json")).json()["paths"]["/v1/decisions"].keys() == {"get", "post"}


async def test_a_tenants_viewer_sees_its_own_decisions_and_no_cached_prompts_of_others(tmp_path):
    keys = tmp_path / "keys.yaml"
    rows = [f"- {{sha256: {hash_key(name)}, tenant: {name}, scopes: [infer, view]}}\n" for name in ("acme", "rival")]
    keys.write_text("keys:\n" + "".join(rows) + f"- {{sha256: {hash_key('viewer')}, scopes: [view]}}\n")
    control = with_sql("w0")
    control.add_adapter("secret/v1", on=["w0"], tenants=("acme",))

    def bearer(key):
        return {"headers": {"authorization": f"Bearer {key}"}}

    async with fleet(EngineDouble("w0"), control=control, key_files=(keys,)) as (client, _, _):
        for lora_id, key in (("secret/v1", "acme"), ("sql/v1", "acme"), ("sql/v1", "rival")):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": lora_id}, **bearer(key))
            assert answer.status_code == 200
        seen = {
            key: (await client.get("/v1/decisions", **bearer(key))).json()["data"]
            for key in ("acme", "rival", "viewer")
        }
        assert {key: [item["adapter"].partition("@")[0] for item in items] for key, items in seen.items()} == {
            "acme": ["sql/v1", "secret/v1"],
            "rival": ["sql/v1"],
            "viewer": ["sql/v1", "sql/v1", "secret/v1"],
        }
        shared, own = seen["acme"]
        assert own["scores"]
        assert not shared["scores"]
        assert own["record"] is None is shared["record"]
        assert all(item["scores"] and item["record"] for item in seen["viewer"])
        secret = {**CHAT, "lora_id": "secret/v1"}
        assert (await client.post("/v1/route", json=secret, **bearer("viewer"))).json()["scores"]
        assert (await client.post("/v1/route", json=secret, **bearer("acme"))).json()["scores"]
        assert not (await client.post("/v1/route", json=CHAT, **bearer("rival"))).json()["scores"]
        assert error_of(await client.post("/v1/route", json=secret, **bearer("rival"))) == (404, "model_not_found")


async def test_route_explains_and_sends_nothing():
    engines = [EngineDouble("w0"), EngineDouble("w1")]
    async with fleet(*engines, control=with_sql("w1")) as (client, control, _):
        base = (await client.post("/v1/route", json={**CHAT, "prompt": None})).json()
        assert {s["worker_id"] for s in base["scores"]} == {"w0", "w1"}
        adapter = (await client.post("/v1/route", json={**CHAT, "lora_id": "sql/v1"})).json()
        assert adapter["worker_id"] == "w1"
        assert adapter["adapter"] == SQL
        assert adapter["rejected"] == [{"worker_id": "w0", "reason": "adapter not resident"}]
        control.residents.clear()
        control.tell()

        async def nowhere():
            told = (await client.post("/v1/route", json={**CHAT, "lora_id": "sql/v1"})).json()
            return None if told["worker_id"] else told

        cold = await until(nowhere)
        assert "wait for a load" in cold["note"]
        assert (await client.get("/v1/decisions")).json()["data"] == []
        await client.post("/v1/chat/completions", json=CHAT)
        kept = (await client.get("/v1/decisions", params={"adapter": "base"})).json()["data"]
        assert [d["worker_id"] for d in kept] == [("w0", "w1")[bool(engines[1].bodies)]]
    assert sum(len(e.bodies) for e in engines) == 1
    assert control.ensured == []
