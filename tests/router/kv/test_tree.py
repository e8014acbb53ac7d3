"""`GET /v1/kv/tree`: what an operator sees of the index, and that nobody else does."""

from lorafleet.keys.key_files import hash_key
from router.core.kv.tree import SentPrompt
from router.kv.tree import kv_tree_of
from tests.router.doubles import CHAT, EngineDouble, error_of, fleet, with_sql
from tests.router.sql_adapter import SQL


async def test_prompts_are_shown_below_their_adapters_with_the_workers_that_hold_them():
    engine = EngineDouble("w0")
    engine.ids = list(range(64))
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        for body in (CHAT, CHAT, {**CHAT, "lora_id": "sql/v1"}):
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        answer = (await client.get("/v1/kv/tree")).json()
        assert {root["adapter"]: root["prompts"] for root in answer["roots"]} == {"base": 2, SQL: 1}
        assert answer["prompts"] == 3
        assert answer["nodes"] == 2
        for root in answer["roots"]:
            (node,) = root["children"]
            assert (node["depth"], node["blocks"]) == (0, 64 // root["block_size"])
            assert node["prompts"] == root["prompts"]
            assert node["children"] == []
        alone = (await client.get("/v1/kv/tree", params={"adapter": "sql/v1"})).json()
        assert [root["adapter"] for root in alone["roots"]] == [SQL]
        assert error_of(await client.get("/v1/kv/tree", params={"model": "other"})) == (404, "model_not_found")
        for wrong in ({"limit": 0}, {"limit": 1001}, {"depth": 65}):
            assert (await client.get("/v1/kv/tree", params=wrong)).status_code == 400


async def test_only_an_operators_key_reads_the_tree(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        f"keys:\n- {{sha256: {hash_key('acme')}, tenant: acme, scopes: [infer, view]}}\n"
        f"- {{sha256: {hash_key('viewer')}, scopes: [view]}}\n"
    )
    async with fleet(EngineDouble("w0"), control=with_sql("w0"), key_files=(keys,)) as (client, _, _):

        async def status(key: str) -> int:
            return (await client.get("/v1/kv/tree", headers={"authorization": f"Bearer {key}"})).status_code

        assert [await status(key) for key in ("acme", "viewer", "nobody")] == [403, 200, 401]


async def test_the_limit_holds_over_all_roots_and_the_busiest_come_first():
    async with fleet(EngineDouble("w0"), control=with_sql("w0")) as (_, _, parts):
        for adapter, count in (("few/v1@000000000000", 1), ("many/v1@000000000000", 3)):
            for number in range(count):
                hashes = (hash(adapter) & (1 << 60), *range(number << 20 | count, (number << 20 | count) + 4))
                parts.sent_prompts.add(SentPrompt("base", adapter, 16, hashes))
        tree = await kv_tree_of(parts.feeds, parts.sent_prompts, "base", adapter="", limit=2, depth=16)
        first, second = tree.roots
        assert (first.adapter, first.prompts) == ("many/v1@000000000000", 3)
        assert tree.nodes == 2
        assert (second.children, second.more) == ((), 1)
