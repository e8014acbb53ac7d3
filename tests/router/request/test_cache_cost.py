"""What private caches cost, sampled at requests and explained to operators."""

import pytest

from lorafleet.keys.key_files import hash_key
from router.core.kv.private_caches import PrivateCaches
from tests.router.doubles import BASE, AgentDouble, EngineDouble, counted, fleet, sample_value

IDS = list(range(64))


@pytest.fixture
def opened(tmp_path):
    """Settings with a key of tenant acme, one of rival, and an operator's."""
    path = tmp_path / "keys.yaml"
    rows = [f"- {{sha256: {hash_key(name)}, tenant: {name}, scopes: [infer, view]}}\n" for name in ("acme", "rival")]
    path.write_text("keys:\n" + "".join(rows) + f"- {{sha256: {hash_key('root')}, scopes: [admin]}}\n")
    return {"key_files": (path,)}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def complete(client, key, **more):
    answer = await client.post("/v1/completions", json={"model": BASE, "prompt": IDS, **more}, headers=bearer(key))
    assert answer.status_code == 200
    return int(answer.headers["x-lorafleet-cached-tokens"])


async def test_tokens_that_only_another_tenants_cache_holds_are_counted_of_sampled_requests(opened):
    control = AgentDouble()
    async with fleet(EngineDouble("w0"), control=control, **opened) as (client, _, parts):
        assert await complete(client, "acme") == 0
        for key, lost in (("rival", 64), ("rival", 64), ("acme", 64)):
            parts.private_caches._sample_at = 0.0
            await complete(client, key)
            page = (await client.get("/metrics", headers=bearer("root"))).text
            # Of its own prompt, asked again, a tenant loses nothing.
            assert sample_value(page, "lorafleet_router_private_cache_lost_tokens_total") == lost
        assert sample_value(page, "lorafleet_router_private_cache_sampled_tokens_total") == 4 * 64
        counts = counted(control, parts)[BASE]
        assert (counts.sampled_tokens, counts.lost_tokens) == (4 * 64, 64)


async def test_shared_cache_is_never_sampled(opened):
    async with fleet(EngineDouble("w0"), control=AgentDouble(cache="shared"), **opened) as (client, _, parts):
        await complete(client, "acme", cache_salt="pepper")
        assert await complete(client, "root") == 0
        assert parts.metrics.sampled_tokens.value == 0
        assert parts.private_caches.others(BASE, "", "", most=9) == PrivateCaches().others(BASE, "", "", most=9)


async def test_explain_tells_operators_alone_what_other_callers_caches_hold(opened):
    async with fleet(EngineDouble("w0"), **opened) as (client, _, _):
        await complete(client, "acme")

        async def explained(key):
            body = {"model": BASE, "prompt": IDS}
            return (await client.post("/v1/route", json=body, headers=bearer(key))).json()

        operators = await explained("root")
        assert (operators["cached_tokens"], operators["other_caches_tokens"]) == (0, 64)
        for tenant in ("acme", "rival"):
            assert (await explained(tenant))["other_caches_tokens"] is None


async def test_predicted_first_token_is_told_but_to_tenants_of_a_shared_cache(opened):
    async with fleet(EngineDouble("w0"), control=AgentDouble(cache="shared"), **opened) as (client, _, _):
        for key, is_told in (("root", True), ("acme", False)):
            body = {"model": BASE, "prompt": IDS, "stream": True}
            answer = await client.post("/v1/completions", json=body, headers=bearer(key))
            assert ("x-lorafleet-first-token-s" in answer.headers) == is_told, key
            newest, *_ = (await client.get("/v1/decisions", headers=bearer(key))).json()["data"]
            assert (newest["first_token_s"] is not None) == is_told, key
        page = (await client.get("/metrics", headers=bearer("root"))).text
        assert sample_value(page, "lorafleet_router_first_token_ratio_count") == 2
    async with fleet(EngineDouble("w0"), **opened) as (client, _, _):
        body = {"model": BASE, "prompt": IDS}
        told = (await client.post("/v1/completions", json=body, headers=bearer("acme"))).headers
        assert float(told["x-lorafleet-first-token-s"]) > 0
