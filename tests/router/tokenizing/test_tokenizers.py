"""Token ids of prompts: their sources, caches, engine probes and threads."""

import asyncio
import json
import threading
from array import array

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from lorafleet.identity import block_hashes, root_hash
from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from lorafleet.tokenizer.encoding import ThreadWork
from router.telemetry.metrics import RouterMetrics
from router.tokenizing.prompt_cache import BlockHashCache, PieceTokenCache
from router.tokenizing.tokenizers import Tokenizers
from router.tokenizing.tokens import Tokens
from tests.patience import patience, until, within
from tests.properties import examples
from tests.router.doubles import AgentDouble, EngineDouble, fleet
from tests.serving import client_of, serving

BASE = "tiny-qwen"
RULES = "You answer in SQL. Tables: customers(id, name), orders(id, customer, total).\n" * 40
HI = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tokens") / "tiny-qwen")


@pytest.fixture(scope="module")
def chat(model) -> ChatTokenizer:
    return ChatTokenizer.from_dir(model)


class TokenizingWorker:
    """An agent and its engine in one app: serves a model's files and tokenizes with them."""

    def __init__(self, chat: ChatTokenizer, files: dict[str, str]) -> None:
        self.chat = chat
        self.files = files
        self.files_asked = 0
        self.tokenize_asked = 0
        self.agent_status = 200
        self.tokenize_status = 200
        self.offset = 0  # added to each id: another tokenizer than its files make
        self.answers = asyncio.Event()
        self.answers.set()

    @property
    def app(self) -> Starlette:
        async def model_files(request: Request):
            self.files_asked += 1
            return JSONResponse({"base_model": BASE, "files": self.files}, self.agent_status)

        async def tokenize(request: Request):
            self.tokenize_asked += 1
            await self.answers.wait()
            body = await request.json()
            text, special = self.chat.prompt_text(body)
            ids = self.chat.encode(text, add_special_tokens=special)
            return JSONResponse({"tokens": [i + self.offset for i in ids]}, self.tokenize_status)

        return Starlette(
            routes=[
                Route("/v1/model/files", model_files),
                Route("/tokenize", tokenize, methods=["POST"]),
                Route("/{as_another:int}/tokenize", tokenize, methods=["POST"]),
            ]
        )


@pytest.fixture
async def client():
    async with client_of() as client:
        yield client


@pytest.fixture
def worker(chat, model) -> TokenizingWorker:
    return TokenizingWorker(chat, read_files(model))


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics()


@pytest.fixture
async def tokens(client, worker, metrics):
    """Tokenizers that have learned the tiny model."""
    tokenizers = Tokenizers(client, metrics=metrics)
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url)
    assert tokenizers.knows(BASE)
    yield tokenizers
    tokenizers.close()


def counted(metrics: RouterMetrics, origin: str) -> float:
    return metrics.registry.get_sample_value("lorafleet_router_tokenized_tokens_total", {"origin": origin}) or 0.0


def conversation(turns: int, words: str = "") -> dict:
    turns = [
        {"role": "assistant" if turn % 2 else "user", "content": f"turn {turn}: {words}{RULES[: 300 + turn]}"}
        for turn in range(turns)
    ]
    return {"messages": [{"role": "system", "content": RULES}, *turns]}


# --- caches ------------------------------------------------------------------------------------------------------


async def test_earlier_turns_are_not_tokenized_again(tokens, metrics, chat):
    first = await tokens.ids(conversation(9), base_model=BASE, engine_url="")
    await tokens.ids(conversation(9), base_model=BASE, engine_url="")
    new = counted(metrics, "tokenizer")
    second = await tokens.ids(conversation(10), base_model=BASE, engine_url="")
    assert counted(metrics, "cache") > 0.95 * len(first.ids)
    assert counted(metrics, "tokenizer") - new < 300
    assert second.ids == array("I", chat.chat_ids(conversation(10)))
    assert (first.source, second.source) == ("local", "local")


async def test_another_conversation_shares_the_system_prompt_only(tokens, metrics, chat):
    for words in ("one ", "two ", "three "):
        await tokens.ids(conversation(2, words), base_model=BASE, engine_url="")
    system = len(chat.encode(RULES, add_special_tokens=False))
    assert system <= counted(metrics, "cache") <= system + 10


SAID = st.lists(st.sampled_from([RULES, "<|im_end|>", "<|im_", "e", "\u0301", "  ", "\n\n", "東京"]), max_size=5).map(
    "".join
)


@settings(max_examples=examples(60))
@given(bodies=st.lists(st.lists(SAID, min_size=1, max_size=4), min_size=2, max_size=6))
def test_cached_ids_are_those_of_tokenizing_from_scratch(chat, bodies):
    tokenizers = Tokenizers(client_of(), cache_bytes=40_000)
    tokenizers.adopt(BASE, chat)

    async def check() -> None:
        for turns in bodies:
            body = {"messages": [{"role": "user", "content": text} for text in turns]}
            got = await tokenizers.ids(body, base_model=BASE, engine_url="")
            assert got.ids == array("I", chat.chat_ids(body))

    try:
        asyncio.run(check())
    finally:
        tokenizers.close()


@settings(max_examples=examples(100))
@given(asked=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), max_size=60))
def test_the_cache_stays_within_its_bytes_and_answers_only_what_was_put(asked):
    cache, put = PieceTokenCache(4_000), {}
    for base_model, number in asked:
        piece = f"{number} " * (5 * number + 1)
        ids = array("I", [number] * (10 * number))
        held = cache.get(base_model, piece)
        assert held is None or held == put[base_model, piece]
        cache.put(base_model, piece, ids)
        put[base_model, piece] = ids
        assert 0 <= cache.size_bytes <= 4_000
    held = [(key, cache.get(*key)) for key in put]
    assert sum(ids is not None for _, ids in held) == len(cache)
    if not cache:
        assert cache.size_bytes == 0


def test_the_least_recently_used_piece_is_evicted_first():
    cache = PieceTokenCache(2_000)
    for number in (*range(4), *range(4)):
        cache.put(BASE, str(number), array("I", range(20)))
    assert cache.get(BASE, "0") is not None
    for number in (*range(4, 7), *range(4, 7)):
        cache.put(BASE, str(number), array("I", range(20)))
    assert cache.get(BASE, "0") is not None
    assert cache.get(BASE, "1") is None


@pytest.mark.parametrize(("chars", "times"), [(100, 2), (10_000, 1)])
def test_short_pieces_are_cached_the_second_time_and_long_ones_at_once(chars, times):
    cache = PieceTokenCache(1_000_000)
    for number in range(1, times + 1):
        assert cache.get(BASE, "a" * chars) is None
        cache.put(BASE, "a" * chars, array("I", range(20)))
        cache.put(BASE, f"{number} alone", array("I", range(20)))
    assert cache.get(BASE, "a" * chars) is not None
    assert len(cache) == 1


async def test_tokens_have_the_lengths_of_seen_and_kept_prefixes(tokens, chat):
    first = await tokens.ids(conversation(2), base_model=BASE, engine_url="")
    await tokens.ids(conversation(2), base_model=BASE, engine_url="")
    again = await tokens.ids(conversation(2), base_model=BASE, engine_url="")
    longer = await tokens.ids(conversation(3), base_model=BASE, engine_url="")
    assert (first.seen, again.seen, longer.seen) == (0, first.kept, first.kept)
    assert 0 < first.kept < longer.kept < len(longer.ids)


ROOT = root_hash(BASE)


@settings(max_examples=examples(100))
@given(
    asked=st.lists(
        st.tuples(st.sampled_from([1, 2]), st.integers(0, 3), *[st.integers(0, 400)] * 3), min_size=1, max_size=30
    )
)
def test_cached_block_hashes_equal_fresh_ones(asked):
    chains = BlockHashCache(500)
    for block_size, branch, length, *marks in asked:
        ids = array("I", [*range(min(length, 150)), *range(1000 * branch, 1000 * branch + max(0, length - 150))])
        seen, kept = sorted(min(mark, length) for mark in marks)
        chain = chains.chain(ids, block_size=block_size, root=ROOT, seen=seen, kept=kept)
        assert list(chain) == block_hashes(ids, block_size=block_size, root=ROOT)
        assert chains.blocks == sum(map(len, chains.entries.values())) <= 500


def test_the_beginning_of_a_long_conversation_is_hashed_once():
    chains = BlockHashCache()
    first = chains.chain(array("I", range(3000)), block_size=16, root=ROOT, kept=2000)
    longer = chains.chain(array("I", [*range(2000), *range(5)]), block_size=16, root=ROOT, seen=2000, kept=2000)
    other = chains.chain(array("I", range(3000)), block_size=16, root=root_hash(BASE, "another"), seen=2000)
    assert [a is b for a, b in zip(longer, first, strict=False)] == [True] * 125
    assert not set(other) & set(first)


def test_a_shared_prefix_is_hashed_at_most_twice():
    chains = BlockHashCache()
    first, second, third = (
        chains.chain(array("I", [*range(2000), *[n] * 500]), block_size=16, root=ROOT, seen=min(n, 1) * 2000, kept=2500)
        for n in range(3)
    )
    assert first[:125] == second[:125] == third[:125]
    assert [a is b for a, b in zip(second[:125], third[:125], strict=True)] == [True] * 125
    assert len({*first, *second, *third}) == 125 + 3 * 31


async def test_a_cache_of_0_bytes_stores_nothing(client, chat):
    tokenizers = Tokenizers(client, cache_bytes=0)
    tokenizers.adopt(BASE, chat)
    await tokenizers.ids(conversation(5), base_model=BASE, engine_url="")
    assert tokenizers.cache_bytes == chat.word_cache.size_bytes > 0
    tokenizers.close()


# --- where the tokenizer comes from --------------------------------------------------------------------------------


async def test_a_worker_without_files_is_skipped_for_the_next(client, chat, model):
    now = [100.0]
    tokenizers = Tokenizers(client, clock=lambda: now[0])
    broken, failing, whole = (
        TokenizingWorker(chat, {}),
        TokenizingWorker(chat, {}),
        TokenizingWorker(chat, read_files(model)),
    )
    failing.agent_status = 500
    async with serving(broken.app) as one, serving(failing.app) as two, serving(whole.app) as three:
        for _ in range(2):
            await tokenizers.load_or_probe(BASE, agent_url=one, engine_url=one)
        assert not tokenizers.knows(BASE)
        assert broken.files_asked == 1
        with pytest.raises(httpx.HTTPStatusError):
            await tokenizers.load_or_probe(BASE, agent_url=two, engine_url=two)
        now[0] += 61
        await tokenizers.load_or_probe(BASE, agent_url=one, engine_url=one)
        assert broken.files_asked == 2
        await tokenizers.load_or_probe(BASE, agent_url=three, engine_url=three)
    assert tokenizers.knows(BASE)
    assert (await tokenizers.ids(HI, base_model=BASE, engine_url="")).source == "local"
    tokenizers.close()


async def test_a_tokenizer_that_differs_from_the_engine_is_not_used(client, worker):
    tokenizers = Tokenizers(client)
    worker.offset = 1
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url)
        assert not tokenizers.knows(BASE)
        assert (await tokenizers.ids(HI, base_model=BASE, engine_url=url)).source == "remote"
    tokenizers.close()


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("tokenizer_config.json", {"pad_token": "[PAD]"}),
        ("tokenizer_config.json", {"pad_token": {"content": "[PAD]", "lstrip": False}}),
        ("tokenizer_config.json", {"extra_special_tokens": ["[PAD]"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "[PAD]"}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|im_end|>", "[PAD]"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"4096": {"content": "[PAD]"}}}),
        ("special_tokens_map.json", {"pad_token": "[PAD]"}),
        ("tokenizer.json", None),
    ],
    ids=str,
)
async def test_an_added_token_that_only_the_engine_has_is_detected(client, model, file, named):
    files = read_files(model)
    engine = json.loads(files["tokenizer.json"])
    added = dict(engine["added_tokens"][-1], content="[PAD]", id=4096)
    engine["added_tokens"].append(added)
    files["tokenizer.json"] = json.dumps(engine)
    worker = TokenizingWorker(ChatTokenizer.from_files(files), files)
    if named is not None:
        worker.files = read_files(model)
        worker.files[file] = json.dumps(json.loads(worker.files.get(file, "{}")) | named)
    tokenizers = Tokenizers(client)
    async with serving(worker.app) as url:
        await learned(tokenizers, url)
    assert tokenizers.knows(BASE) == (named is None)
    tokenizers.close()


async def test_a_configured_folder_is_read_instead_of_asking_an_agent(client, worker, model):
    worker.files = {}
    tokenizers = Tokenizers(client, paths={BASE: model})
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url="http://127.0.0.1:1", engine_url=url)
    assert tokenizers.knows(BASE)
    assert worker.files_asked == 0
    tokenizers.close()


async def test_a_configured_folder_of_another_model_is_refused_by_the_probes(client, worker, model):
    tokenizers = Tokenizers(client, paths={BASE: model})
    worker.offset = 1
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url)
    assert not tokenizers.knows(BASE)
    tokenizers.close()


# --- engines that come back, and others under the same name ----------------------------------------------------------

LONG = {"prompt": RULES}


def another(model) -> TokenizingWorker:
    """A worker whose tokenizer knows half of the merges."""
    files = read_files(model)
    file = json.loads(files["tokenizer.json"])
    file["model"]["merges"] = file["model"]["merges"][: len(file["model"]["merges"]) // 2]
    files["tokenizer.json"] = json.dumps(file)
    return TokenizingWorker(ChatTokenizer.from_files(files), files)


async def learned(tokenizers, url, worker="w0", boot="1") -> None:
    await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url, incarnation=(worker, boot))


async def test_an_engine_agrees_for_the_probed_boot_only(client, worker):
    tokenizers = Tokenizers(client)
    async with serving(worker.app) as url:
        await learned(tokenizers, url)
        ids = await tokenizers.ids(LONG, base_model=BASE, engine_url="")
        assert tokenizers.agrees(("w0", "1"), ids)
        assert not tokenizers.agrees(("w0", "2"), ids)
        assert not tokenizers.agrees(("w1", "1"), ids)
        assert not tokenizers.has_probed(BASE, ("w0", "2"))
        asked = worker.tokenize_asked
        await learned(tokenizers, url, boot="2")
        assert tokenizers.agrees(("w0", "2"), ids)
        assert not tokenizers.agrees(("w0", "1"), ids)
        assert asked < worker.tokenize_asked <= 2 * asked
        await learned(tokenizers, url, boot="2")
        assert worker.tokenize_asked <= 2 * asked
        assert worker.files_asked == 1
        tokenizers.forget("w0")
        assert not tokenizers.agrees(("w0", "2"), ids)
    tokenizers.close()


async def test_ids_from_engines_or_clients_never_count_as_agreed(client, worker):
    tokenizers = Tokenizers(client)
    async with serving(worker.app) as url:
        await learned(tokenizers, url)
        for body in ({"prompt": [1, 2, 3]}, {"prompt": "x", "truncate_prompt_tokens": 3}):
            assert not tokenizers.agrees(("w0", "1"), await tokenizers.ids(body, base_model=BASE, engine_url=url))
    tokenizers.close()


async def test_an_engine_with_unnoticed_restarts_never_agrees(client, worker):
    tokenizers = Tokenizers(client)
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url)
        assert tokenizers.knows(BASE)
        assert tokenizers.has_probed(BASE, (url, ""))
        ids = await tokenizers.ids(LONG, base_model=BASE, engine_url=url)
        assert (ids.source, tokenizers.agrees(("w0", "0.00"), ids)) == ("local", False)
    tokenizers.close()


async def test_a_disagreeing_minority_of_engines_changes_nothing(client, chat, model):
    tokenizers = Tokenizers(client)
    old, new = TokenizingWorker(chat, read_files(model)), another(model)
    async with serving(old.app) as old_url, serving(new.app) as new_url:
        for worker in ("w0", "w1", "w2"):
            await learned(tokenizers, old_url, worker)
        before = await tokenizers.ids(LONG, base_model=BASE, engine_url="")
        await learned(tokenizers, new_url, "w0", "2")
        assert not tokenizers.agrees(("w0", "2"), before)
        assert tokenizers.agrees(("w1", "1"), before)
        assert (await tokenizers.ids(LONG, base_model=BASE, engine_url="")).made_by == before.made_by
        assert new.files_asked == 0
        await learned(tokenizers, new_url, "w1", "2")
        after = await tokenizers.ids(LONG, base_model=BASE, engine_url="")
        assert after.ids == array("I", new.chat.completion_ids(RULES)) != before.ids
        assert tokenizers.agrees(("w1", "2"), after)
        # Tokens of the old tokenizer do not count for engines that agree with the new one.
        assert not tokenizers.agrees(("w1", "2"), before)
        assert not tokenizers.agrees(("w2", "1"), after)
        for worker, boot, url in (("w0", "2", new_url), ("w2", "1", old_url)):
            assert not tokenizers.has_probed(BASE, (worker, boot))
            await learned(tokenizers, url, worker, boot)
        assert [tokenizers.agrees(who, after) for who in (("w0", "2"), ("w2", "1"))] == [True, False]
        assert (await tokenizers.ids(LONG, base_model=BASE, engine_url="")).made_by == after.made_by
    tokenizers.close()


async def test_prompts_go_to_engines_if_most_disagree_with_every_tokenizer(client, worker):
    now = [100.0]
    tokenizers = Tokenizers(client, clock=lambda: now[0])
    async with serving(worker.app) as url:
        await learned(tokenizers, url)
        worker.offset = 7
        await learned(tokenizers, url, boot="2")
        assert not tokenizers.knows(BASE)
        assert (await tokenizers.ids(LONG, base_model=BASE, engine_url=url)).source == "remote"
        asked = worker.tokenize_asked
        await learned(tokenizers, url, boot="2")
        assert worker.tokenize_asked == asked
        worker.offset = 0
        now[0] += 61
        await learned(tokenizers, url, boot="2")
        assert (await tokenizers.ids(LONG, base_model=BASE, engine_url=url)).source == "local"
    tokenizers.close()


async def test_files_are_read_again_when_the_last_agreeing_engine_leaves(client, chat, model):
    tokenizers = Tokenizers(client)
    old, new = TokenizingWorker(chat, read_files(model)), another(model)
    async with serving(old.app) as old_url, serving(new.app) as new_url:
        await learned(tokenizers, old_url, "w0")
        await learned(tokenizers, new_url, "w1")
        assert tokenizers.has_probed(BASE, ("w1", "1"))
        tokenizers.forget("w0")
        assert not tokenizers.has_probed(BASE, ("w1", "1"))
        await learned(tokenizers, new_url, "w1")
        assert tokenizers.agrees(("w1", "1"), await tokenizers.ids(LONG, base_model=BASE, engine_url=""))
    tokenizers.close()


async def test_an_unreachable_engine_is_probed_again(client, worker):
    now = [100.0]
    tokenizers = Tokenizers(client, clock=lambda: now[0])
    async with serving(worker.app) as url:
        await learned(tokenizers, url)
        ids = await tokenizers.ids(LONG, base_model=BASE, engine_url="")
        with pytest.raises(httpx.HTTPError):
            await tokenizers.load_or_probe(
                BASE, agent_url=url, engine_url="http://127.0.0.1:1", incarnation=("w1", "1")
            )
        assert not tokenizers.agrees(("w1", "1"), ids)
        now[0] += 6
        await learned(tokenizers, url, "w1")
        assert tokenizers.agrees(("w1", "1"), ids)
    tokenizers.close()


async def test_an_engine_that_answers_no_probe_has_no_vote(client, worker):
    tokenizers, refusing = Tokenizers(client), TokenizingWorker(worker.chat, worker.files)
    refusing.tokenize_status = 401
    async with serving(worker.app) as url, serving(refusing.app) as other:
        await learned(tokenizers, url)
        ids = await tokenizers.ids(LONG, base_model=BASE, engine_url="")
        for n in (1, 2, 3):
            who = f"w{n}"
            await learned(tokenizers, f"{other}/{n}", who)
            assert not tokenizers.agrees((who, "1"), ids)
            assert not tokenizers.has_probed(BASE, (who, "1"))
        assert tokenizers.knows(BASE)
        worker.offset = 7
        await learned(tokenizers, url, boot="2")
        assert not tokenizers.knows(BASE)
    tokenizers.close()


async def test_few_engines_are_probed_at_a_time(client, worker):
    tokenizers = Tokenizers(client)
    async with serving(worker.app) as url:
        await learned(tokenizers, url)
        before = worker.tokenize_asked
        worker.answers.clear()
        asking = [asyncio.create_task(learned(tokenizers, f"{url}/{n}", f"w{n}")) for n in range(1, 20)]
        await until(lambda: worker.tokenize_asked == before + 4)
        assert sum(not task.done() for task in asking) == 4
        worker.answers.set()
        await asyncio.gather(*asking)
        ids = await tokenizers.ids(LONG, base_model=BASE, engine_url="")
        assert sum(tokenizers.agrees((f"w{n}", "1"), ids) for n in range(1, 20)) == 4
    tokenizers.close()


async def test_ids_replace_the_text_only_for_agreeing_boots(chat, model):
    def ids_of(body):
        text, special = chat.prompt_text(body)
        return chat.encode(text, add_special_tokens=special)

    engine, control, body = (
        EngineDouble("w0", ids_of=ids_of),
        AgentDouble(files=read_files(model)),
        LONG | {"model": BASE},
    )
    async with fleet(engine, control=control, tokenizer="auto") as (client, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))
        await client.post("/v1/completions", json=body)
        assert engine.bodies.pop()["prompt"] == chat.completion_ids(RULES)
        # It comes back, and has answered no probe yet.
        engine.ids_of = None
        control.boot_id = "second"
        control.tell()
        await until(lambda: parts.discovery.fleet.replicas["w0"].engine_boot_id == "second")
        await client.post("/v1/completions", json=body)
        assert parts.tokenizers.knows(BASE)
        assert engine.bodies.pop()["prompt"] == RULES
        # With another model under the same name.
        engine.ids_of = lambda body: [i + 7 for i in ids_of(body)]
        control.boot_id = "second, again"
        control.tell()
        await until(lambda: not parts.tokenizers.knows(BASE))
        engine.ids_of = ids_of
        control.boot_id = "third"
        control.tell()
        # An answer of the previous boot may still come; the third boot is then probed as well.
        async with within(10):
            await client.post("/v1/completions", json=body)
            while engine.bodies.pop()["prompt"] != chat.completion_ids(RULES):
                await asyncio.sleep(0.01)
                await client.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    ("setting", "with_ids"), [("off", set()), ("completions", {"completion"}), ("all", {"completion", "chat"})]
)
async def test_the_setting_decides_which_prompts_go_as_ids(chat, model, setting, with_ids):
    def ids_of(body):
        text, special = chat.prompt_text(body)
        return chat.encode(text, add_special_tokens=special)

    def chats(text, **more):
        return {"model": BASE, "messages": [{"role": "user", "content": text}], **more}

    engine, control = EngineDouble("w0", ids_of=ids_of), AgentDouble(files=read_files(model))
    async with fleet(engine, control=control, tokenizer="auto", send_prompt_ids=setting) as (client, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))

        async def goes_as_ids(path, body):
            assert (await client.post(path, json=body)).status_code == 200
            sent = engine.bodies.pop()
            return "kv_transfer_params" in sent or not isinstance(sent.get("prompt", ""), str)

        found = {
            "completion": await goes_as_ids("/v1/completions", LONG | {"model": BASE}),
            "short completion": await goes_as_ids("/v1/completions", {"model": BASE, "prompt": "hello"}),
            "chat": await goes_as_ids("/v1/chat/completions", chats(RULES)),
            "short chat": await goes_as_ids("/v1/chat/completions", chats("hello")),
            "effort": await goes_as_ids("/v1/chat/completions", chats(RULES, reasoning_effort="low")),
        }
        assert {kind for kind, is_so in found.items() if is_so} == with_ids


# --- what cannot be tokenized here ---------------------------------------------------------------------------------


async def test_a_silent_engine_delays_one_request_only(client, worker):
    now = [100.0]
    tokenizers = Tokenizers(client, mode="remote", remote_timeout_s=0.1, clock=lambda: now[0])
    worker.answers.clear()
    async with serving(worker.app) as url:
        async with within(20):
            assert (await tokenizers.ids(HI, base_model=BASE, engine_url=url)).source == "none"
        assert (await tokenizers.ids(HI, base_model=BASE, engine_url=url)).source == "none"
        assert worker.tokenize_asked == 1
        worker.answers.set()
        now[0] += 6.0
        tokenizers.remote_timeout_s = patience(5)
        assert (await tokenizers.ids(HI, base_model=BASE, engine_url=url)).source == "remote"
    tokenizers.close()


async def test_requests_that_waited_for_one_silent_engine_share_a_log_line(client, worker):
    now = [100.0]
    tokenizers = Tokenizers(client, mode="remote", remote_timeout_s=0.1, clock=lambda: now[0])
    worker.answers.clear()
    async with serving(worker.app) as url:
        with capture_logs() as lines:
            for _ in range(2):
                await asyncio.gather(*[tokenizers.ids(HI, base_model=BASE, engine_url=url) for _ in range(20)])
                now[0] += 61.0
        worker.answers.set()
    slow = [line for line in lines if line["event"].startswith("the engine tokenizes too slowly")]
    assert [line["failures"] for line in slow] == [1, 20]
    tokenizers.close()


async def test_agents_that_serve_no_files_share_a_log_line():
    control, names = AgentDouble(), [f"w{n}" for n in range(6)]
    control.files_status = 503
    with capture_logs() as lines:
        async with fleet(*map(EngineDouble, names), control=control, tokenizer="auto"):
            await until(lambda: control.files_asked >= len(names))
    assert [line["failures"] for line in lines if line["event"] == "tokenizer not fetched yet"] == [1]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([1, 2, 3], array("I", [1, 2, 3])),
        ([], None),
        ([1, True], None),
        ([1, -1], None),
        ([1, 2**32], None),
        ([[1, 2], [3]], None),
        (["a", "b"], None),
        ([[1, 2, 3]], array("I", [1, 2, 3])),
        ([[[1, 2, 3]]], None),
        ([[["a"]]], None),
        ([[]], None),
        ([[1, True]], None),
    ],
)
async def test_ids_in_the_request_are_used_unchanged_or_not_at_all(client, prompt, ids):
    tokenizers = Tokenizers(client)
    assert (await tokenizers.ids({"prompt": prompt}, base_model=BASE, engine_url="")).ids == ids
    tokenizers.close()


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]], ids=str)
@pytest.mark.parametrize(("most", "ids"), [(2, None), (-1, None), (None, array("I", [1, 2, 3]))])
async def test_ids_that_the_engine_truncates_are_not_used(client, prompt, most, ids):
    tokenizers = Tokenizers(client)
    body = {"prompt": prompt, "truncate_prompt_tokens": most}
    assert (await tokenizers.ids(body, base_model=BASE, engine_url="", kind="completion")).ids == ids
    tokenizers.close()


async def test_tool_call_keys_keep_vllms_order_in_responses_and_chats(client, model):
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    chat = ChatTokenizer.from_files(read_files(model) | {"chat_template.jinja": template})
    tokenizers = Tokenizers(client)
    tokenizers.adopt(BASE, chat)
    call = {"name": "f", "arguments": '{"a": 1}'}
    response = {"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "1", **call}]}
    turns = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    shown = [
        chat.decode((await tokenizers.ids(body, base_model=BASE, engine_url="", kind=kind)).ids)
        for kind, body in (("responses", response), ("chat", {"messages": [turns]}))
    ]
    assert shown == ['{"name": "f", "arguments": {"a": 1}}', '{"arguments": {"a": 1}, "name": "f"}']
    tokenizers.close()


async def test_a_batch_of_one_is_tokenized_as_one_prompt(client, tokens, worker, chat):
    expected = array("I", chat.completion_ids(RULES))
    assert (await tokens.ids({"prompt": [RULES]}, base_model=BASE, engine_url="")).ids == expected
    cut = {"prompt": [RULES], "truncate_prompt_tokens": 5}
    assert (await tokens.ids(cut, base_model=BASE, engine_url="")).ids is None
    remote = Tokenizers(client, mode="remote", remote_timeout_s=patience(5))
    async with serving(worker.app) as url:
        assert await remote.ids({"prompt": [RULES]}, base_model=BASE, engine_url=url) == Tokens(expected, "remote")
    remote.close()


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ({"input": RULES}, {"prompt": RULES}),
        ({"input": [RULES]}, {"prompt": RULES}),
        ({"input": [1, 2, 3]}, {"prompt": [1, 2, 3]}),
        ({"input": [[1, 2, 3]]}, {"prompt": [1, 2, 3]}),
        ({"input": RULES, "add_special_tokens": False}, {"prompt": RULES, "add_special_tokens": False}),
        (HI, HI | {"add_generation_prompt": False}),
        (HI | {"add_generation_prompt": True}, HI),
        ({"input": [RULES, RULES]}, None),
        ({"input": [[1], [2]]}, None),
        ({"input": RULES, "padding": "max_length"}, None),
        ({"input": [1, 2], "truncate_prompt_tokens": 1}, None),
        ({}, None),
    ],
)
async def test_one_text_to_classify_or_embed_has_the_ids_of_its_prompt(tokens, body, same):
    found = await tokens.ids(body, base_model=BASE, engine_url="", kind="input")
    assert found.ids == (None if same is None else (await tokens.ids(same, base_model=BASE, engine_url="")).ids)


@pytest.mark.parametrize("given", ["auto", None])
async def test_a_response_has_ids_unless_its_engine_may_cut_it(tokens, given):
    body = {"input": RULES}
    whole = await tokens.ids(body, base_model=BASE, engine_url="", kind="responses")
    assert whole.ids is not None

    async def cut(max_model_len):
        found = tokens.tokenize(
            body | {"truncation": given}, base_model=BASE, engine_url="", kind="responses", max_model_len=max_model_len
        )
        return (found if isinstance(found, Tokens) else await found()).ids

    assert await cut(len(whole.ids) + 1) == whole.ids
    assert await cut(len(whole.ids)) is None
    assert await cut(0) is None, "it is not known how much the engines take"


# --- what a long prompt costs the others ---------------------------------------------------------------------------


class Gate:
    """A tokenizer whose long prompts wait until the test releases them."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self.chat = chat
        self.go_on = threading.Event()
        self.threads: set[str] = set()

    def prompt_pieces(self, body, strftime=None):
        return self.chat.prompt_pieces(body, strftime)

    def encoding_steps(self, pieces, *, add_special_tokens):
        def work():
            self.threads.add(threading.current_thread().name)
            if sum(map(len, pieces)) > 65_536:
                self.go_on.wait(patience(60))
            return self.chat.encode_pieces(pieces, add_special_tokens=add_special_tokens)

        return (yield ThreadWork(sum(map(len, pieces)), work))


async def test_very_long_prompts_delay_no_others_and_are_bounded(client, chat):
    tokenizers, gate = Tokenizers(client, threads=2), Gate(chat)
    tokenizers.adopt(BASE, gate)
    book, chapter = {"prompt": RULES * 40}, {"prompt": RULES * 5}
    try:
        books = [asyncio.create_task(tokenizers.ids(book, base_model=BASE, engine_url="")) for _ in range(80)]
        async with within(5):
            assert (await tokenizers.ids(HI, base_model=BASE, engine_url="")).source == "local"
            assert (await tokenizers.ids(chapter, base_model=BASE, engine_url="")).source == "local"
            turned_away = [task for task in books if task.done()]
        assert len(turned_away) == 80 - 2 - 64
        assert {task.result().source for task in turned_away} == {"none"}
        for task in books[10:]:
            task.cancel()
        gate.go_on.set()
        done = await asyncio.gather(*books[:10])
        assert {tokens.source for tokens in done} == {"local"}
        assert len({name for name in gate.threads if name.startswith("tokenize-long")}) <= 2
    finally:
        gate.go_on.set()
        tokenizers.close()


@pytest.mark.parametrize(("max_model_len", "source"), [(0, "local"), (10_000, "local"), (1_000, "none")])
async def test_a_text_too_long_for_any_engine_is_not_tokenized(tokens, max_model_len, source):
    body = {"prompt": RULES * 20}  # some 60,000 characters
    found = tokens.tokenize(body, base_model=BASE, engine_url="", max_model_len=max_model_len)
    if not isinstance(found, Tokens):
        found = await found()
    assert found.source == source


async def test_the_event_loop_runs_while_a_32k_token_prompt_is_tokenized(tokens, chat):
    prompt = {"messages": [{"role": "user", "content": RULES * 40}]}
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticking = asyncio.create_task(tick())
    tokenized = await tokens.ids(prompt, base_model=BASE, engine_url="")
    ticking.cancel()
    assert len(tokenized.ids) > 32_000
    # It has eight slices of 16,384 characters; the loop has a turn between two of them.
    assert turns >= 4
