"""Who may infer: keys, scopes and tenants, on every route."""

from lorafleet.keys.key_files import hash_key
from router.protocols.routes import ROUTES
from tests.router.doubles import (
    BASE,
    CHAT,
    AgentDouble,
    EngineDouble,
    error_of,
    fleet,
    with_sql,
)


async def test_keys_scopes_and_tenants(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n"
        f"- {{sha256: {hash_key('user')}, tenant: acme, scopes: [infer]}}\n"
        f"- {{sha256: {hash_key('other')}, tenant: rival, scopes: [infer]}}\n"
        f"- {{sha256: {hash_key('root')}, scopes: [admin]}}\n"
    )
    control = with_sql("w0")
    control.add_adapter("secret/v1", on=["w0"], tenants=("acme",))

    def bearer(key):
        return {"headers": {"authorization": f"Bearer {key}"}}

    async with fleet(EngineDouble("w0"), control=control, key_files=(keys,)) as (client, _, _):
        for headers in ({}, bearer("wrong"), {"headers": {"authorization": "Basic user"}}):
            for ask in (client.post("/v1/chat/completions", json=CHAT, **headers), client.get("/v1/models", **headers)):
                assert error_of(await ask) == (401, "invalid_api_key")
        assert (await client.post("/v1/chat/completions", json=CHAT, **bearer("user"))).status_code == 200
        secret = {**CHAT, "lora_id": "secret/v1"}
        assert (await client.post("/v1/chat/completions", json=secret, **bearer("user"))).status_code == 200
        refused = await client.post("/v1/chat/completions", json=secret, **bearer("other"))
        absent = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "absent/v1"}, **bearer("other"))
        assert error_of(refused) == error_of(absent) == (404, "model_not_found")
        assert refused.json()["error"]["message"].replace("secret", "absent") == absent.json()["error"]["message"]
        seen = {
            key: {c["id"] for c in (await client.get("/v1/models", **bearer(key))).json()["data"]}
            for key in ("user", "other", "root")
        }
        assert seen == {
            "user": {BASE, "sql/v1", "secret/v1"},
            "other": {BASE, "sql/v1"},
            "root": {BASE, "sql/v1", "secret/v1"},
        }
        assert error_of(await client.post("/v1/route", json=CHAT, **bearer("user"))) == (403, "scope_missing")
        assert error_of(await client.get("/v1/decisions", **bearer("user"))) == (403, "scope_missing")
        assert (await client.post("/v1/route", json=CHAT, **bearer("root"))).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_who_may_not_infer_is_refused_on_every_route(tmp_path):
    keys, engine = tmp_path / "keys.yaml", EngineDouble("w0")
    keys.write_text(f"keys:\n- {{sha256: {hash_key('agent')}, scopes: [register]}}\n")
    headers = {"authorization": "Bearer agent", "content-type": "application/json"}
    async with fleet(engine, key_files=(keys,)) as (client, _, _):
        for method, path in (*ROUTES, ("POST", "/generate"), ("GET", "/v1/models"), ("GET", f"/v1/models/{BASE}")):
            answer = await client.request(method, path.replace("{id}", "resp_1"), json=CHAT, headers=headers)
            assert error_of(answer) == (403, "scope_missing"), path
    assert engine.bodies == []


async def test_metrics_need_their_scope_and_health_needs_no_key(tmp_path):
    keys, control = tmp_path / "keys.yaml", AgentDouble()
    rows = "".join(f"- {{sha256: {hash_key(name)}, scopes: [{name}]}}\n" for name in ("infer", "metrics", "admin"))
    keys.write_text(f"keys:\n{rows}")
    async with fleet(control=control, key_files=(keys,)) as (client, _, _):

        async def status(path, key=None):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await client.get(path, headers=headers)).status_code

        found = {key: await status("/metrics", key) for key in (None, "guess", "infer", "metrics", "admin")}
        assert found == {None: 401, "guess": 401, "infer": 403, "metrics": 200, "admin": 200}
        for path in ("/v1/models", "/v1/decisions"):
            assert await status(path, "metrics") == 403, path
        assert await status("/health") == await status("/ready") == 200
    opened = {"key_files": (keys,), "metrics_need_key": False}
    for settings in ({}, opened):
        async with fleet(control=control, **settings) as (client, _, _):
            assert (await client.get("/metrics")).status_code == 200, settings


async def test_an_open_router_answers_no_page_whose_name_was_pointed_at_it():
    engine, strange = EngineDouble("w0"), {"host": "evil.example:8000"}
    async with fleet(engine) as (client, _, _):
        for path in ("/v1/models", "/metrics", "/ready"):
            assert error_of(await client.get(path, headers=strange)) == (421, "unknown_host")
        assert error_of(await client.post("/v1/chat/completions", json=CHAT, headers=strange)) == (421, "unknown_host")
        assert engine.bodies == []
        assert (await client.post("/v1/chat/completions", json=CHAT, headers={"host": "localhost"})).status_code == 200
    async with fleet(engine, allow_open=True) as (client, _, _):
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=strange)).status_code == 200
