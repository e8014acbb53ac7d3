"""Approximate prompts: their hashes, and conversations that stay on one engine."""

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lorafleet.identity import BlockHash, block_hashes, root_hash
from router.protocols.routes import ROUTES
from router.tokenizing.approximate import ApproximatePrompt, approximate_prompt, approximate_root
from tests.patience import until
from tests.properties import examples
from tests.router.doubles import BASE, CHAT, AgentDouble, EngineDouble, fleet, sample_value, with_sql

BLOCK = 16
Body = dict[str, Any]
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def approximated(body: Body | bytes) -> ApproximatePrompt | None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return approximate_prompt(_fields(raw), {}, len(raw))


def keys(body: Body | bytes, *, adapter: str = "", salt: str = "") -> list[BlockHash]:
    made = approximated(body)
    assert made is not None
    return list(made.block_hashes(BLOCK, approximate_root(root_hash(BASE, adapter, salt))))


# --- keys

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
PART = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXT),
    st.builds(lambda text: {"type": "of_tomorrow", "payload": [text, None, 1.5]}, TEXT),
    st.builds(
        lambda data: {"type": "image_url", "image_url": {"url": "data:," + base64.b64encode(data * 300).decode()}},
        st.binary(min_size=1, max_size=30),
    ),
)
ITEM = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), TEXT),
    st.builds(lambda parts: {"role": "user", "content": parts}, st.lists(PART, max_size=3)),
    st.builds(lambda text: {"type": "local_shell_call", "action": {"command": [text]}}, TEXT),
)
TOOLS = st.lists(st.builds(lambda name: {"type": "of_tomorrow", "name": name}, TEXT), max_size=3)
TURNS = st.sampled_from(["messages", "input"])


@settings(max_examples=examples(150))
@given(TURNS, st.lists(ITEM, min_size=1, max_size=8), st.lists(ITEM, max_size=4), TOOLS, TEXT)
def test_hashes_of_a_longer_conversation_begin_with_the_shorters(name, items, more, tools, instructions):
    known = {"tools": tools, "instructions": instructions, "chat_template_kwargs": {"unheard_of": 1}}
    shorter, longer = known | {name: items}, known | {name: items + more}
    assert keys(longer)[: len(keys(shorter))] == keys(shorter)
    # Other fields and their order have no effect.
    other = {"temperature": 0.5, "stream": True, **dict(reversed(shorter.items())), "metadata": {"turn": "7"}}
    assert keys(other) == keys(shorter)


@settings(max_examples=examples(100))
@given(st.sampled_from(["prompt", "input"]), TEXT, TEXT)
def test_hashes_of_a_continued_text_begin_with_the_texts(name, text, more):
    shorter = keys({name: "begin:" + text})
    assert keys({name: "begin:" + text + more})[: len(shorter)] == shorter


@settings(max_examples=examples(100))
@given(st.lists(ITEM, min_size=1, max_size=5), st.lists(ITEM, min_size=1, max_size=5))
def test_conversations_share_only_their_common_prefix(items, others):
    common = 0
    for ours, theirs in zip(items, others, strict=False):
        if ours != theirs:
            break
        common += 1
    beginning = keys({"messages": items[:common]}) if common else []
    ours, theirs = keys({"messages": items}), keys({"messages": others})
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    # Items that begin alike share their own beginning, too: no more than the longest of them.
    if items[common : common + 1] != others[common : common + 1]:
        longest = max(len(keys({"messages": side[: common + 1]})) for side in (items, others))
        assert len(beginning) <= same <= longest


@settings(max_examples=examples(100))
@given(st.lists(ITEM, min_size=1, max_size=5), TEXT, TEXT)
def test_another_adapter_or_salt_shares_no_hash(items, adapter, salt):
    body = {"messages": items}
    plain = keys(body)
    for other in (keys(body, adapter=f"a{adapter}"), keys(body, salt=f"s{salt}")):
        assert set(plain).isdisjoint(other)


@settings(max_examples=examples(100))
@given(st.lists(ITEM, min_size=1, max_size=5))
def test_no_approximate_hash_is_an_exact_block_hash(items):
    made = approximated({"messages": items})
    assert made is not None
    exact = block_hashes(made.units, block_size=BLOCK, root=root_hash(BASE))
    assert set(exact).isdisjoint(keys({"messages": items}))


def turn(role: str, *parts: Body | str, **more: Any) -> Body:
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]} | more


def test_cache_marks_are_not_part_of_the_prompt():
    marked = {"type": "text", "text": "one " * 40, "cache_control": {"type": "ephemeral"}}
    plain = {"type": "text", "text": "one " * 40}
    billing = [{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"} for n in (1, 2)]
    shorter = {"system": [billing[0], plain], "messages": [turn("user", marked)]}
    longer = {
        "system": [billing[1], plain],
        "messages": [turn("user", plain), turn("assistant", "yes"), turn("user", marked)],
    }
    assert keys(longer)[: len(keys(shorter))] == keys(shorter)
    assert len(keys(shorter)) > 4


def test_tools_follow_the_first_system_messages():
    tools = [[{"name": f"{letter * 200}"}] for letter in "ab"]
    system = turn("system", "You are kind. " * 40)
    first, second = (keys({"messages": [system, turn("user", "hi")], "tools": some}) for some in tools)
    shared = sum(a == b for a, b in zip(first, second, strict=True))
    assert len(keys({"messages": [system]})) <= shared < len(first)


@pytest.mark.parametrize("key", ["url", "unheard_of"])
def test_a_file_counts_by_its_digest_at_a_bounded_size(key):
    def with_file(data: bytes) -> Body:
        return {"messages": [turn("user", {"type": "image", key: base64.b64encode(data).decode()}, "what is it?")]}

    made = approximated(with_file(b"a" * 6_000_000))
    assert made is not None
    assert 1000 < made.tokens < 1200
    assert made.tokens == len(made.units)
    assert keys(with_file(b"a" * 6_000_000)) == keys(with_file(b"a" * 6_000_000))
    assert keys(with_file(b"a" * 6_000_000)) != keys(with_file(b"a" * 5_999_999 + b"b"))


def test_a_very_long_prompt_is_cut_and_counts_in_full():
    made = approximated({"messages": [turn("user", "many words " * 200_000)]})
    assert made is not None
    assert len(made.units) == 65_536
    assert made.tokens > 500_000
    assert approximated({"prompt": "many words " * 200_000}).tokens > 500_000
    assert [len(made.block_hashes(size, root_hash(BASE))) for size in (1, 16, 64)] == [4096, 4096, 1024]


def test_all_turns_of_a_conversation_share_one_hash():
    opening = [
        {"role": "developer", "content": "Be brief."},
        turn("user", "in /home/x"),
        turn("user", "list it"),
    ]
    call = {"type": "local_shell_call", "call_id": "c"}
    root = root_hash(BASE)
    first, later, other = (
        approximated({"instructions": "x", "tools": [{"type": "shell"}], "input": items})
        for items in (
            opening,
            [*opening, call, turn("user", "and now?")],
            [*opening[:2], turn("user", "leave it"), call],
        )
    )
    assert first.conversation_hash(root) == later.conversation_hash(root) != other.conversation_hash(root)
    assert first.conversation_hash(root) != first.conversation_hash(root_hash(BASE, "sql"))


ODD = [
    b'{"messages": %s}' % (b"[" * 850 + b"]" * 850),
    b'{"input": %d}' % 10**400,
    b'{"input": [%d, 3]}' % 10**400,
    b'{"messages": {"a": 1}, "tools": 3}',
    b'{"messages": [3, null, "x", [1, 2]]}',
    b'{"tools": [%s]}' % (b'{"a":' * 500 + b"1" + b"}" * 500),
]


@pytest.mark.parametrize("raw", ODD)
def test_a_malformed_body_has_its_own_hashes(raw):
    made = approximated(raw)
    assert made is not None
    assert made.tokens == len(made.units)
    assert approximated(raw) == made


def test_a_body_without_a_prompt_has_no_hashes():
    for body in ({}, {"model": "x", "temperature": 1}, {"messages": None, "tools": None}):
        assert approximated(body) is None


# --- conversations


class EveryRoute(EngineDouble):
    """An engine that tokenizes nothing and answers every route."""

    @property
    def app(self):
        async def answer(request: Request):
            if request.url.path == "/tokenize":
                return JSONResponse({"error": {"message": "no"}}, 400)
            body = await request.json()
            self.headers.append(dict(request.headers))
            return JSONResponse({"id": "1", "model": body["model"], "choices": [], "output": []})

        return Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 900}}
ANSWER = "It is so, and this is why. " * 3


def chat(c: int, turn: int, *, opening: Any = None, **more: Any) -> Body:
    content = f"Conversation {c} begins here, with words enough for a block or two of its own."
    messages = [
        {"role": "user", "content": content if opening is None else [{"type": "text", "text": content}, opening]}
    ]
    for n in range(turn):
        messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": f"And {n}?"}]
    return {"messages": messages, **more}


def response(c: int, turn: int, *, item: Body | None = None, **more: Any) -> Body:
    found = chat(c, turn)["messages"]
    return {
        "input": found if item is None else [found[0], item, *found[1:]],
        "instructions": f"You are number {c}.",
        **more,
    }


def message(c: int, turn: int, **more: Any) -> Body:
    body = chat(c, turn, **more) | {"max_tokens": 5, "system": f"You are number {c}."}
    body["messages"][-1]["cache_control"] = {"type": "ephemeral"}
    return body


def text(c: int, turn: int) -> str:
    return f"Text {c} begins here, with words enough for a block or two of its own. " + ANSWER * turn


CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
Making = Callable[[int, int], Body]
CONVERSATIONS: list[tuple[str, str, Making]] = [
    ("a tokenizer that is not there", CHATS, chat),
    ("a picture", CHATS, lambda c, t: chat(c, t, opening=PICTURE)),
    ("a part of an unknown type", CHATS, lambda c, t: chat(c, t, opening={"type": "of_tomorrow", "x": [1]})),
    ("a tool of an unknown type", CHATS, lambda c, t: chat(c, t, tools=[{"type": "of_tomorrow"}])),
    ("template arguments", CHATS, lambda c, t: chat(c, t, chat_template_kwargs={"unheard_of": c})),
    ("a template", CHATS, lambda c, t: chat(c, t, chat_template="{{ messages }}")),
    ("documents", CHATS, lambda c, t: chat(c, t, documents=[{"text": f"as of turn {t}"}])),
    ("an effort that changes", CHATS, lambda c, t: chat(c, t, reasoning_effort=["low", "high"][t % 2])),
    ("a text", "/v1/completions", lambda c, t: {"prompt": text(c, t)}),
    ("texts", "/v1/completions", lambda c, t: {"prompt": [text(c, t), text(c + 1, t)]}),
    (
        "ids that are cut",
        "/v1/completions",
        lambda c, t: {"prompt": [c] * 40 + [7] * 9 * t, "truncate_prompt_tokens": 9},
    ),
    ("a tool of tomorrow", RESPONSES, lambda c, t: response(c, t, tools=[{"type": "of_tomorrow"}])),
    (
        "a grammar",
        RESPONSES,
        lambda c, t: response(c, t, tools=[{"type": "custom", "name": "patch", "format": {"type": "grammar"}}]),
    ),
    ("a shell's call", RESPONSES, lambda c, t: response(c, t, item={"type": "local_shell_call", "call_id": "1"})),
    ("a truncation", RESPONSES, lambda c, t: response(c, t, truncation="auto")),
    ("a file", RESPONSES, lambda c, t: response(c, t, item={"role": "user", "content": [{"type": "input_file"}]})),
    ("a picture", MESSAGES, lambda c, t: message(c, t, opening={"type": "image", "source": {"data": "aa" * 9000}})),
    ("a tool of its server", MESSAGES, lambda c, t: message(c, t, tools=[{"type": "web_search_20250305"}])),
    ("several chats", "/v1/chat/completions/batch", lambda c, t: {"messages": [chat(c, t)["messages"]]}),
    ("a text", "/v1/embeddings", lambda c, t: {"input": text(c, t)}),
    ("texts", "/v1/embeddings", lambda c, t: {"input": [text(c, 0), *[ANSWER] * t]}),
    ("messages", "/v1/embeddings", chat),
    ("texts", "/v2/embed", lambda c, t: {"texts": [text(c, 0), *[ANSWER] * t]}),
    ("a text", "/pooling", lambda c, t: {"input": text(c, t)}),
    ("a text", "/classify", lambda c, t: {"input": text(c, t)}),
    *(
        (("texts", path, lambda c, t: {"text_1": text(c, 0), "text_2": [ANSWER] * (t + 1)}))
        for path in ("/score", "/v1/score")
    ),
    *(
        ("a query", path, lambda c, t: {"query": text(c, 0), "documents": [ANSWER] * (t + 1)})
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    ("a query", "/generative_scoring", lambda c, t: {"query": text(c, 0), "items": [ANSWER] * (t + 1)}),
    ("a state", "/v1/systemone", lambda c, t: {"state": text(c, t), "questions": {}}),
    ("a text", "/v1/decisions", lambda c, t: {"input": text(c, t), "questions": []}),
]
TURNS_OF_EACH = 10


async def ask(client, path: str, body: Body, **more: Any) -> str:
    answer = await client.post(path, json={"model": BASE, **body, **more})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-lorafleet-cached-tokens"] == "0", "nothing is predicted"
    return answer.headers["x-lorafleet-worker"]


def test_a_conversation_of_every_route_that_computes_is_tried():
    computing = {route.path for route in ROUTES.values() if route.computes and route.has_body}
    has_token_ids = "/inference/v1/generate"  # so it needs no approximate key
    assert {path for _, path, _ in CONVERSATIONS} == computing - {has_token_ids}


@pytest.mark.parametrize(("kind", "path", "body"), CONVERSATIONS)
async def test_turns_stay_on_one_engine_and_conversations_spread(kind, path, body):
    async with fleet(EveryRoute("w0"), EveryRoute("w1")) as (client, _, parts):
        homes = []
        for c in range(12):
            workers = [await ask(client, path, body(c, turn)) for turn in range(TURNS_OF_EACH if c < 3 else 1)]
            assert len(set(workers)) == 1, f"{kind}: {workers}"
            homes.append(workers[0])
        assert 2 <= homes.count("w0") <= 10
        assert {d.tokens_from for d in parts.decisions} == {"approximate"}


async def test_a_conversation_is_identified_with_its_adapter_and_salt():
    body = chat(1, 9)
    async with fleet(EveryRoute("w0"), EveryRoute("w1"), control=with_sql("w0", "w1")) as (client, _, parts):
        await ask(client, CHATS, body)
        for more, depth in (({}, True), ({"lora_id": "sql/v1"}, False), ({"cache_salt": "pepper"}, False)):
            answer_body = (await client.post("/v1/route", json={"model": BASE, **body, **more})).json()
            assert any(score["depth_blocks"] for score in answer_body["scores"]) is depth, more
        assert len(parts.feeds.index(BASE, BLOCK)) == 0, "no approximate key is among the engines' blocks"


async def test_two_independent_routers_send_a_conversation_to_one_engine():
    engines = [EveryRoute(f"w{i}") for i in range(4)]
    async with fleet(*engines) as (one, _, parts), fleet(*engines) as (other, _, _):
        # Other requests of one router are unknown to the other, which sees slightly other costs.
        busy = parts.scheduler.load.add("w0", "", 0.0, parts.clock(), 0, 0, BASE, 0.0, 1)
        homes = []
        for c in range(8):
            workers = [await ask([one, other][turn % 2], CHATS, chat(c, turn)) for turn in range(TURNS_OF_EACH)]
            assert len(set(workers)) == 1, workers
            homes.append(workers[0])
        assert len(set(homes)) > 2
        parts.scheduler.load.remove(busy, parts.clock(), is_answered=True)


async def test_a_conversation_leaves_an_overloaded_engine():
    async with fleet(EveryRoute("w0"), EveryRoute("w1")) as (client, _, parts):
        home = await ask(client, CHATS, chat(1, 5))
        now = parts.clock()
        load = parts.scheduler.load.add(home, "", 60.0, now, 600_000, 0, BASE, 0.0, 1)
        assert await ask(client, CHATS, chat(1, 6)) != home
        parts.scheduler.load.remove(load, now, is_answered=True)


async def test_a_conversation_stays_at_its_data_parallel_rank():
    class TwoRanks(AgentDouble):
        def metadata(self, worker):
            answer_body = super().metadata(worker)
            transport = answer_body.transport.model_copy(
                update={"kv_events": ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")}
            )
            return answer_body.model_copy(update={"transport": transport})

    engine = EveryRoute("w0")
    async with fleet(engine, control=TwoRanks()) as (client, _, parts):
        ranks = []
        for c in range(8):
            for turn in range(4):
                await ask(client, CHATS, chat(c, turn))
            ranks.append({headers["x-data-parallel-rank"] for headers in engine.headers[-4:]})
        assert [len(of_one) for of_one in ranks] == [1] * 8
        assert set.union(*ranks) == {"0", "1"}
        assert set(parts.feeds.index(BASE, BLOCK, is_approximate=True).block_counts()) == {"w0#0", "w0#1"}
        parts.feeds.forget("w0")
        assert not parts.feeds.index(BASE, BLOCK, is_approximate=True).block_counts()


async def test_sent_prompts_are_forgotten_with_their_engine():
    async with fleet(EveryRoute("w0")) as (client, control, parts):
        body = {"model": BASE, **chat(1, 9)}

        async def depth() -> int:
            (score,) = (await client.post("/v1/route", json=body)).json()["scores"]
            return score["depth_blocks"]

        await ask(client, CHATS, chat(1, 9))
        assert await depth() > 20
        control.boot_id = "second"
        await until(lambda: not parts.feeds.index(BASE, BLOCK, is_approximate=True).block_counts())
        assert await depth() == 0
        await ask(client, CHATS, chat(1, 9))
        assert await depth() > 20


async def test_remembered_prompts_are_bounded_in_number_and_time():
    async with fleet(EveryRoute("w0")) as (client, _, parts):
        replica = parts.discovery.fleet.replicas["w0"]
        sent, now = parts.feeds, parts.clock()
        for start in range(0, 30_000, 1000):
            hashes = [BlockHash(start + i) for i in range(1000)]
            sent.record_served_approximate(replica, replica.id, hashes, began_at=now, now=now + start)
        index = sent.index(BASE, BLOCK, is_approximate=True)
        # As many as the engine has, of the last 600 s.
        assert 0 < index.blocks("w0", "device") <= 10_000
        sent.record_served_approximate(replica, replica.id, [BlockHash(1)], began_at=now, now=now + 10**6)
        assert index.blocks("w0", "device") == 1
        assert await ask(client, CHATS, chat(1, 1)) == "w0"


async def test_an_approximate_decision_is_marked_and_predicts_nothing():
    async def with_usage(engine, body):
        usage = {"prompt_tokens": 640, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 512}}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    async with fleet(EngineDouble("w0", with_usage), EngineDouble("w1", with_usage)) as (client, _, parts):
        for turn in (8, 9):
            await ask(client, CHATS, chat(1, turn))
        await until(lambda: not list(parts.scheduler.load.counts_by_name()))
        last, first = (await client.get("/v1/decisions")).json()["data"]
        assert (last["tokens_from"], last["trust"]) == ("approximate", "estimate")
        assert (first["cached_tokens"], first["engine_cached_tokens"], last["engine_cached_tokens"]) == (0, 512, 512)
        assert last["cached_tokens"] > 200
        assert last["prompt_tokens"] > last["cached_tokens"]
        assert {score["trust"] for score in last["scores"]} == {"estimate"}
        again = (await client.post("/v1/decisions/replay", json=last)).json()
        assert (again["worker_id"], again["tokens_from"]) == (last["worker_id"], "approximate")
        answer_body = (await client.get("/metrics")).text
        for name in ("predicted_cached_tokens_total", "engine_cached_tokens_total", "prompt_tokens_total"):
            assert sample_value(answer_body, f"lorafleet_router_{name}") == 0, name
        assert sample_value(answer_body, "lorafleet_router_tokenize_seconds_count", by="approximate") == 2
        assert parts.accuracy.error_share("w0") == parts.accuracy.error_share("w1") == 0.0


async def test_nothing_is_predicted_at_an_engine_that_keeps_no_blocks():
    control = AgentDouble(uncached=frozenset({"w0", "w1"}))
    async with fleet(EveryRoute("w0"), EveryRoute("w1"), control=control) as (client, _, parts):
        await ask(client, CHATS, chat(1, 9))
        scored = (await client.post("/v1/route", json={"model": BASE, **chat(1, 9)})).json()["scores"]
        assert [score["depth_blocks"] for score in scored] == [0, 0]
        assert not parts.feeds.approximate


async def test_an_engine_that_restarts_without_a_prefix_cache_loses_its_blocks():
    control = AgentDouble()
    async with fleet(EveryRoute("w0"), control=control) as (client, _, parts):
        await ask(client, CHATS, chat(1, 9))
        index = parts.feeds.index(BASE, BLOCK, is_approximate=True)
        assert index.block_counts()
        control.uncached = frozenset({"w0"})
        await until(lambda: not index.block_counts())


async def test_without_kv_matching_no_prompt_is_approximated():
    async with fleet(EveryRoute("w0"), tokenizer="off") as (client, _, parts):
        await client.post("/v1/chat/completions", json=CHAT)
        assert parts.decisions[0].tokens_from == "none"
        assert not parts.feeds.approximate
