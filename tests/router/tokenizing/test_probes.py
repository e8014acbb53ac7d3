"""Probes: our ids are used only where an engine's are the same."""

import asyncio
import json
from array import array

import httpx
import pytest

from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from router.tokenizing.tokenizers import Tokenizers
from tests.patience import until
from tests.router.tokenizing.tokenizing_worker import BASE, HI, LONG, RULES, TokenizingWorker
from tests.serving import serving


async def test_a_tokenizer_that_differs_from_the_engine_is_not_used(client, worker):
    tokenizers = Tokenizers(client)
    worker.offset = 1
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url)
        assert not tokenizers.knows(BASE)
        assert (await tokenizers.ids(HI, base_model=BASE, engine_url=url)).source == "remote"
    tokenizers.close()


async def test_an_engine_without_tokenize_goes_by_the_files_that_its_agent_serves(client, worker):
    tokenizers, engine = Tokenizers(client), ("w0", "1")
    worker.offset = 1  # nobody asks it
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url=url, engine_url="", incarnation=engine)
        found = await tokenizers.ids(HI, base_model=BASE, engine_url="")
    assert (found.source, tokenizers.has_probed(BASE, engine), tokenizers.agrees(engine, found)) == (
        "local",
        True,
        True,
    )
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


async def test_a_configured_folder_of_another_model_is_refused_by_the_probes(client, worker, model):
    tokenizers = Tokenizers(client, paths={BASE: model})
    worker.offset = 1
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url)
    assert not tokenizers.knows(BASE)
    tokenizers.close()


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
