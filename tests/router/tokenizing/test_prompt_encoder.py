"""Prompts by our own tokenizers: seen turns come from caches, and long prompts delay no others."""

import asyncio
import threading
from array import array

import pytest

from lorafleet.tokenizer.chat import ChatTokenizer
from lorafleet.tokenizer.encoding import ThreadWork
from router.telemetry.metrics import RouterMetrics
from router.tokenizing.tokenizers import Tokenizers
from router.tokenizing.tokens import Tokens
from tests.patience import patience, within
from tests.router.tokenizing.tokenizing_worker import BASE, HI, RULES


def counted(metrics: RouterMetrics, origin: str) -> float:
    return metrics.registry.get_sample_value("lorafleet_router_tokenized_tokens_total", {"origin": origin}) or 0.0


def conversation(turns: int, words: str = "") -> dict:
    turns = [
        {"role": "assistant" if turn % 2 else "user", "content": f"turn {turn}: {words}{RULES[: 300 + turn]}"}
        for turn in range(turns)
    ]
    return {"messages": [{"role": "system", "content": RULES}, *turns]}


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


async def test_pieces_of_one_owner_save_another_no_time(tokens, metrics, chat):
    async def tokenized(owner):
        before = counted(metrics, "cache")
        found = tokens.tokenize(conversation(9), base_model=BASE, engine_url="", owner=owner)
        found = found if isinstance(found, Tokens) else await found()
        assert found.ids == array("I", chat.chat_ids(conversation(9)))
        return counted(metrics, "cache") - before

    for owner in ("acme", "rival", ""):
        first, _, third = [await tokenized(owner) for _ in range(3)]
        assert (first, third > 0) == (0, True), owner


async def test_tokens_have_the_lengths_of_seen_and_kept_prefixes(tokens, chat):
    first = await tokens.ids(conversation(2), base_model=BASE, engine_url="")
    await tokens.ids(conversation(2), base_model=BASE, engine_url="")
    again = await tokens.ids(conversation(2), base_model=BASE, engine_url="")
    longer = await tokens.ids(conversation(3), base_model=BASE, engine_url="")
    assert (first.seen, again.seen, longer.seen) == (0, first.kept, first.kept)
    assert 0 < first.kept < longer.kept < len(longer.ids)


async def test_a_cache_of_0_bytes_stores_nothing(client, chat):
    tokenizers = Tokenizers(client, cache_bytes=0)
    tokenizers.adopt(BASE, chat)
    await tokenizers.ids(conversation(5), base_model=BASE, engine_url="")
    assert tokenizers.cache_bytes == chat.word_cache.size_bytes > 0
    tokenizers.close()


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
