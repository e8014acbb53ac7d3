"""Prompts with pictures: token ids with the engine's tokens for a picture, and its id in the blocks' hashes."""

import base64
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.identity import BlockHash, Tier
from lorafleet.kv.events import BlocksStored, KvEventBatch
from lorafleet.kv.ledger import BlockLedger
from lorafleet.kv.pictures import PlacedPicture, picture_id
from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from lorafleet.tokenizer.messages import without_pictures
from router.tokenizing.pictures import KnownPicture, tokens_in_place, with_pictures
from router.tokenizing.tokens import Tokens
from tests.lorafleet.kv.test_pictures import png
from tests.patience import until
from tests.properties import examples
from tests.router.doubles import BASE, AgentDouble, EngineDouble, fleet, with_sql

CHATS = "/v1/chat/completions"
PATH = "/models/tiny-vlm"
PLACEHOLDER = "<tool_call>"  # one token of the tiny model's
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<tool_call>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RED, BLUE = png(2), png(2) + b"blue"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = make_model(tmp_path_factory.mktemp("vlm") / "tiny-qwen")
    return read_files(folder) | {"chat_template.jinja": TEMPLATE}


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(*pictures: str, text: str = "What is this?", **part: Any) -> dict[str, Any]:
    shown = [{"type": "image_url", "image_url": {"url": url}, **part} for url in pictures]
    system = {"role": "system", "content": "Describe each picture in ten words, without its frame. " * 3}
    return {"messages": [system, {"role": "user", "content": [*shown, {"type": "text", "text": text}]}]}


class SeeingEngine(EngineDouble):
    """An engine of a model that takes pictures: each is as many tokens as its file has bytes, between two marks."""

    def __init__(self, name: str, tokenizer: ChatTokenizer) -> None:
        super().__init__(name)
        self.tokenizer = tokenizer
        self.asked: list[str] = []  # pictures, by /tokenize
        self.ids_of = self.tokens

    def tokens(self, body: dict[str, Any]) -> list[int]:
        if "messages" not in body:
            text, special = self.tokenizer.prompt_text(body)
            return self.tokenizer.encode(text, add_special_tokens=special)
        messages, pictures = without_pictures(body["messages"])
        self.asked += [picture.url for picture in pictures]
        ids, rest = [], iter(pictures)
        [placeholder] = self.tokenizer.encode(PLACEHOLDER, add_special_tokens=False)
        for token in self.tokenizer.chat_ids({**body, "messages": messages}):
            size = len(base64.b64decode(next(rest).url.partition(",")[2])) if token == placeholder else 0
            ids += [7, *[placeholder] * size, 9] if size else [token]
        return ids


class IndexSink:
    """What a ledger finds stored at the device."""

    def __init__(self) -> None:
        self.stored: list[BlockHash] = []

    def add(self, tier: Tier, hashes: Any) -> None:
        self.stored += hashes

    def drop(self, tier: Tier, hashes: Any) -> None: ...

    def clear(self) -> None: ...


def blocks_at_engine(
    engine: SeeingEngine, body: dict[str, Any], pictures: list[bytes], adapter: str = ""
) -> list[BlockHash]:
    """Our hashes of the blocks that vLLM stores for this chat, from its KV event as it would be."""
    ids, size = engine.tokens(body), 16
    [placeholder] = engine.tokenizer.encode(PLACEHOLDER, add_special_tokens=False)
    placed, at = [], 0
    for data in pictures:
        at = ids.index(placeholder, at) - 1  # the mark before it
        placed.append(PlacedPicture(picture_id(data, PATH) or "", at, len(data) + 2))
        at += len(data) + 2
    whole = len(ids) // size
    keys = [
        [adapter] * bool(adapter)
        + [[p.id, p.offset - n * size] for p in placed if n * size < p.offset + p.length and p.offset < (n + 1) * size]
        or None
        for n in range(whole)
    ]
    sink = IndexSink()
    names = list(range(1, whole + 1))
    stored = BlocksStored(names, None, ids[: whole * size], block_size=size, lora_name=adapter or None, extra_keys=keys)
    ledger = BlockLedger(BASE, size, sink)
    ledger.apply(KvEventBatch(1.0, [stored]))
    assert not ledger.rejected
    return sink.stored


async def depths(client: Any, body: dict[str, Any]) -> dict[str, int]:
    answer = await client.post("/v1/route", json={"model": BASE, **body})
    assert answer.status_code == 200, answer.text
    return {score["worker_id"]: score["depth_blocks"] for score in answer.json()["scores"]}


def seeing(files: dict[str, str], *, control: AgentDouble | None = None) -> Any:
    """(client of a router, control, parts) in front of two engines that take pictures; the first of them."""
    control = control or AgentDouble()
    control.files, control.model_path = files, PATH
    tokenizer = ChatTokenizer.from_files(files)
    engines = [SeeingEngine("w0", tokenizer), SeeingEngine("w1", tokenizer)]
    return engines, fleet(*engines, control=control, tokenizer="auto")


async def test_a_picture_matches_its_own_blocks_and_no_other_pictures(files):
    engines, running = seeing(files, control=with_sql("w0", "w1"))
    async with running as (client, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))
        index = parts.feeds.index(BASE, 16)
        body = chat(url_of(RED), url_of(RED))
        index.add("w1", blocks_at_engine(engines[0], body, [RED, RED]))
        whole = len(engines[0].tokens(body)) // 16
        before = len(engines[0].tokens(chat(text=""))) // 16
        assert (await depths(client, body))["w1"] == whole
        assert before < (await depths(client, chat(url_of(RED), url_of(BLUE))))["w1"] < whole
        assert (await depths(client, chat(url_of(BLUE), url_of(RED))))["w1"] <= before
        assert (await depths(client, {**body, "lora_id": "sql/v1"}))["w1"] == 0
        answer = await client.post(CHATS, json={"model": BASE, **body})
        assert answer.headers["x-lorafleet-worker"] == "w1"
        assert int(answer.headers["x-lorafleet-cached-tokens"]) >= (whole - 1) * 16


async def test_an_engine_is_asked_once_for_each_picture_and_never_for_a_prompt(files):
    engines, running = seeing(files)
    async with running as (client, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))
        for text in ("one", "two", "three"):
            await depths(client, chat(url_of(RED), url_of(BLUE), text=text))
        assert sorted(engines[0].asked + engines[1].asked) == sorted([url_of(RED), url_of(BLUE)])


async def test_a_clients_own_id_names_the_picture(files):
    engines, running = seeing(files)
    async with running as (client, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))
        index = parts.feeds.index(BASE, 16)
        index.add("w0", blocks_at_engine(engines[0], chat(url_of(RED)), [RED]))
        assert (await depths(client, chat(url_of(RED))))["w0"] > (await depths(client, chat(url_of(RED), uuid="x")))[
            "w0"
        ]


@pytest.mark.parametrize(
    "body",
    [
        chat("https://example.com/cat.png"),
        chat(url_of(b"GIF89a")),
        chat("data:image/png;base64,%%%"),
        chat("data:image/png," + "x" * 40),
        chat(url_of(RED), text=f"literally {PLACEHOLDER}"),
        {**chat(url_of(RED)), "mm_processor_kwargs": {"do_resize": True}},
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url_of(RED)}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None}]}]},
    ],
    ids=["url", "mode", "base64", "plain", "placeholder", "processor", "video", "null"],
)
async def test_prompts_with_other_media_have_approximate_keys(files, body):
    _, running = seeing(files)
    async with running as (client, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))
        answer = await client.post(CHATS, json={"model": BASE, **body})
        assert answer.status_code == 200
        assert [decision.tokens_from for decision in parts.decisions] == ["approximate"]


async def test_without_the_models_path_pictures_have_approximate_keys(files):
    control = AgentDouble()
    engines, running = seeing(files, control=control)
    control.model_path = ""
    async with running as (client, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))
        await client.post(CHATS, json={"model": BASE, **chat(url_of(RED))})
        assert [decision.tokens_from for decision in parts.decisions] == ["approximate"]
        assert not engines[0].asked


async def test_responses_and_messages_with_a_picture_match_the_blocks_of_their_chat(files):
    engines, running = seeing(files)
    text, (mark, data) = "What is this?", url_of(RED).split(",")
    chatted = {"messages": [{"role": "user", "content": [*chat(url_of(RED))["messages"][1]["content"][:1], text]}]}
    response = {"type": "input_image", "image_url": url_of(RED), "detail": "auto"}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    shown = {"role": "user", "content": chat(url_of(RED))["messages"][1]["content"][:1]}
    others = {
        "responses": {"input": [{"role": "user", "content": [response, {"type": "input_text", "text": text}]}]},
        "messages": {"messages": [{"role": "user", "content": [block, {"type": "text", "text": text}]}]},
    }
    called = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen"}, block]}
    result = [{"role": "tool", "tool_call_id": "a", "content": "seen"}]
    assert mark == "data:image/png;base64"
    async with running as (_, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))
        found = []
        for kind, body in [("chat", chatted), *others.items()]:
            tokens = parts.tokenizers.tokenize(
                body,
                base_model=BASE,
                engine_url=parts.discovery.fleet.replicas["w0"].engine_url,
                kind=kind,
                model_path=PATH,
            )
            found.append(tokens if isinstance(tokens, Tokens) else await tokens())
        assert found[0].pictures
        pair = []
        for kind, messages in (("chat", [*result, shown]), ("messages", [{"role": "user", "content": [called]}])):
            body = {"messages": messages}
            url = parts.discovery.fleet.replicas["w0"].engine_url
            tokens = parts.tokenizers.tokenize(body, base_model=BASE, engine_url=url, kind=kind, model_path=PATH)
            pair.append(tokens if isinstance(tokens, Tokens) else await tokens())
        assert pair[0].pictures
        assert (pair[0].ids, pair[0].pictures) == (pair[1].ids, pair[1].pictures)
        assert found[0].ids.tolist() == engines[0].tokens(chatted)
        assert [(tokens.ids, tokens.pictures) for tokens in found[1:]] == [(found[0].ids, found[0].pictures)] * 2


async def test_pictures_are_never_tokenized_at_the_engine(files):
    engine = SeeingEngine("w0", ChatTokenizer.from_files(files))
    async with fleet(engine, control=AgentDouble(model_path=PATH), tokenizer="remote") as (client, _, parts):
        await client.post(CHATS, json={"model": BASE, **chat(url_of(RED))})
        assert [decision.tokens_from for decision in parts.decisions] == ["approximate"]
        assert not engine.asked


# --- ids alone -----------------------------------------------------------------------------------------------------

TEXTS = st.lists(st.integers(10, 14), max_size=4)


@given(TEXTS, TEXTS, st.integers(1, 30), st.sampled_from(([], [20], [20, 21])), st.sampled_from(([], [22], [23, 22])))
@settings(max_examples=examples(300))
def test_the_placeholder_is_found_by_what_the_engine_repeats(before, after, repeats, open_marks, close_marks):
    tokens = [*open_marks, *[3] * repeats, *close_marks]
    found = tokens_in_place([*before, 3, *after], [*before, *tokens, *after])
    if len(tokens) == 1:
        assert found is None, "nothing was added"
    elif repeats > 1:
        assert found == (3, array("I", tokens))
    elif found is not None:
        assert [*before, *found[1], *after] == [*before, *tokens, *after] or found[0] != 3


def test_no_place_explains_other_ids():
    assert tokens_in_place([1, 3, 2], [1, 3, 2]) is None
    assert tokens_in_place([1, 3, 2], [5, 3, 3, 4]) is None
    assert tokens_in_place([], [1]) is None


def test_each_picture_is_placed_where_its_placeholder_was():
    one, two = KnownPicture("a", 3, array("I", [8, 3, 3])), KnownPicture("b", 3, array("I", [3]))
    whole, placed = with_pictures([1, 3, 2, 3], [one, two])
    assert whole.tolist() == [1, 8, 3, 3, 2, 3]
    assert placed == (PlacedPicture("a", 1, 3), PlacedPicture("b", 5, 1))
    assert with_pictures([1, 3], [one, two]) is None
    assert with_pictures([3, 3, 3], [one, two]) is None
