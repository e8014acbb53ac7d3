"""Token ids that hold no longer: dates of chat templates, and engines that changed without a restart."""

import json
from array import array
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse
from structlog.testing import capture_logs

from lorafleet.local.tiny_model import CHAT_TEMPLATE, make_model
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from router.tokenizing.dates import clock_of, possible_dates
from router.tokenizing.doubts import TokenDoubts
from router.tokenizing.tokenizers import Tokenizers
from tests.patience import until
from tests.router.doubles import AgentDouble, EngineDouble, fleet, sample_value
from tests.router.tokenizing.tokenizing_worker import BASE, RULES, TokenizingWorker
from tests.serving import client_of, serving

DATED = "{{- '<|im_start|>system\\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}\n" + CHAT_TEMPLATE.lstrip()
CHAT = {"messages": [{"role": "user", "content": RULES}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("doubts") / "tiny-qwen")


@pytest.fixture
async def client():
    async with client_of() as client:
        yield client


class DatedWorker(TokenizingWorker):
    """A worker whose engine's local time is `ahead` of UTC."""

    def __init__(self, files: dict[str, str], template: str = DATED) -> None:
        files = files | {"chat_template.jinja": template}
        super().__init__(ChatTokenizer.from_files(files), files)
        self.ahead = timedelta()
        self.text_of = self.chat.prompt_text
        self.chat.prompt_text = lambda body: self.text_of(body, self.strftime)  # type: ignore[method-assign]

    def strftime(self, form: str) -> str:
        return (datetime.now(UTC) + self.ahead).strftime(form)

    def ids(self, body) -> "array[int]":
        text, special = self.text_of(body, self.strftime)
        return array("I", self.chat.encode(text, add_special_tokens=special))


@pytest.fixture
def worker(model) -> DatedWorker:
    return DatedWorker(read_files(model))


async def probe(tokenizers, url, worker="w0") -> None:
    await tokenizers.load_or_probe(BASE, agent_url=url, engine_url=url, incarnation=(worker, "1"))


async def ids_of(tokenizers, url, body=CHAT):
    return await tokenizers.ids(body, base_model=BASE, engine_url=url)


# --- dates -----------------------------------------------------------------------------------------------------------


@given(
    utc=st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1)),  # noqa: DTZ001
    quarters=st.integers(-12 * 4, 14 * 4),
    forms=st.sets(st.sampled_from(["%d %b %Y", "%Y-%m-%d", "%A", "%H"]), min_size=1),
)
def test_the_date_in_any_time_zone_is_among_the_possible_ones(utc, quarters, forms):
    dates = list(possible_dates(forms, utc.replace(tzinfo=UTC)))
    local = utc + timedelta(minutes=15 * quarters)
    assert {form: local.strftime(form) for form in forms} in [dict(date.texts) for date in dates]
    assert len(dates) == len(set(dates))
    assert "%H" in forms or len(dates) <= 3
    here = {form: utc.strftime(form) for form in forms}
    assert dict(dates[0].texts) == here, "most engines run in UTC"


def test_an_engines_clock_is_read_from_its_answers():
    assert clock_of({"date": "Wed, 03 Sep 2031 11:22:33 GMT"}) == datetime(2031, 9, 3, 11, 22, 33, tzinfo=UTC)
    for headers in ({}, {"date": "soon"}):
        assert abs(clock_of(headers) - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("is_later", [True, False])
async def test_prompts_show_the_engines_date_and_a_new_one_within_a_minute(client, worker, is_later):
    now = [100.0]
    tokenizers = Tokenizers(client, clock=lambda: now[0])
    zones = [timedelta(), timedelta(hours=14)] if datetime.now(UTC).hour >= 12 else [timedelta(hours=-12), timedelta()]
    worker.ahead, soon = zones if is_later else reversed(zones)
    async with serving(worker.app) as url:
        await probe(tokenizers, url)
        before = await ids_of(tokenizers, url)
        assert (before.source, before.ids) == ("local", worker.ids(CHAT))
        assert tokenizers.agrees(("w0", "1"), before)
        worker.ahead = soon
        now[0] += 62
        assert not tokenizers.agrees(("w0", "1"), before), "prompts are not sent as ids of a date that may be over"
        assert not tokenizers.has_probed(BASE, ("w0", "1"))
        asked = worker.tokenize_asked
        await probe(tokenizers, url)
        assert worker.tokenize_asked == asked + 1
        after = await ids_of(tokenizers, url)
        assert (after.source, after.ids) == ("local", worker.ids(CHAT))
        assert after.ids != before.ids
        assert tokenizers.agrees(("w0", "1"), after)
    tokenizers.close()


@pytest.mark.parametrize("shown", ["strftime_now('%d %b %Y, %H:%M')", "strftime_now('%d ' ~ '%b')"])
async def test_prompts_that_show_what_was_not_read_from_an_engine_are_tokenized_there(client, model, shown):
    template = DATED + "{% if messages | length > 1 %}{{ " + shown + " }}{% endif %}"
    tokenizers, worker = Tokenizers(client), DatedWorker(read_files(model), template)
    async with serving(worker.app) as url:
        await probe(tokenizers, url)
        assert (await ids_of(tokenizers, url, {"prompt": RULES})).source != "local"
        assert not tokenizers.knows(BASE), "some probe shows it, and no date has the engine's ids"
        assert (await ids_of(tokenizers, url)).source == "remote"
    tokenizers.close()


async def test_a_date_that_no_probe_shows_is_left_to_the_engine(client, model):
    template = CHAT_TEMPLATE.lstrip() + "{% if documents %}{{ strftime_now('%H') }}{% endif %}"
    tokenizers, worker = Tokenizers(client), DatedWorker(read_files(model), template)
    worker.ahead = timedelta(hours=5)
    async with serving(worker.app) as url:
        await probe(tokenizers, url)
        assert (await ids_of(tokenizers, url)).source == "local"
        assert (await ids_of(tokenizers, url, CHAT | {"documents": [{"text": "a"}]})).source == "none"
        asked = worker.tokenize_asked
        assert tokenizers.has_probed(BASE, ("w0", "1"))
        assert worker.tokenize_asked == asked
    tokenizers.close()


async def test_while_engines_show_different_dates_chats_have_approximate_keys(client, model, worker):
    tokenizers, other = Tokenizers(client), DatedWorker(read_files(model))
    other.ahead = timedelta(days=0.58) if datetime.now(UTC).hour >= 12 else timedelta(days=-0.5)
    async with serving(worker.app) as url, serving(other.app) as other_url:
        await probe(tokenizers, url)
        with capture_logs() as lines:
            await probe(tokenizers, other_url, "w1")
        assert any("dates differ" in line["event"] for line in lines)
        assert "dates differ" in (tokenizers.note(BASE) or "")
        assert (await ids_of(tokenizers, url)).source == "none"
        assert (await ids_of(tokenizers, url, {"prompt": RULES})).source == "local"
        tokenizers.forget("w0")
        assert tokenizers.note(BASE) is None
        found = await ids_of(tokenizers, url)
        assert (found.source, found.ids) == ("local", other.ids(CHAT))
    tokenizers.close()


# --- engines that changed without a restart --------------------------------------------------------------------------

ENGINE = ("w0", "1")


def test_four_contradictions_in_a_row_make_a_doubt_and_agreement_takes_them_back():
    doubts = TokenDoubts()

    def contradicted(at, engine=ENGINE, body=None):
        return doubts.record(BASE, engine, body, at, contradicts=True)

    assert [contradicted(0.0) for _ in range(3)] == [None] * 3
    for _ in range(9):
        assert doubts.record(BASE, ENGINE, None, 0.0, contradicts=False) is None
    assert [contradicted(0.0) for _ in range(3)] == [None] * 3
    found = contradicted(0.0, ("w1", "1"), CHAT)
    assert found is not None
    assert (found.engines, found.body) == ({ENGINE, ("w1", "1")}, CHAT)
    # The engine agrees: the index is wrong, not the ids. The next doubt waits, longer each time.
    doubts.record_verdict(BASE, 0.0, agrees=True)
    assert not any(contradicted(59.0) for _ in range(20))
    assert any(contradicted(61.0) for _ in range(4))
    doubts.record_verdict(BASE, 61.0, agrees=True)
    assert not any(contradicted(180.0) for _ in range(20))
    assert any(contradicted(182.0) for _ in range(4))
    doubts.record_verdict(BASE, 182.0, agrees=False)
    assert any(contradicted(182.0) for _ in range(4))


def contradict(tokenizers, tokens, body=CHAT, engine=ENGINE) -> list[str]:
    """The workers to probe again, after four answers that contradict these tokens."""
    return [
        worker
        for _ in range(4)
        for worker in tokenizers.record_answer(BASE, engine, tokens, body, kind="chat", contradicts=True)
    ]


async def test_an_engine_whose_template_was_swapped_is_probed_again_and_tokenizes_until_it_agrees(client, model):
    now = [100.0]
    worker = TokenizingWorker(ChatTokenizer.from_dir(model), read_files(model))
    tokenizers, swapped = Tokenizers(client, clock=lambda: now[0]), DatedWorker(read_files(model))
    first = worker.chat
    async with serving(worker.app) as url:
        await probe(tokenizers, url)
        tokens = await ids_of(tokenizers, url)
        worker.chat = swapped.chat
        assert contradict(tokenizers, tokens) == ["w0"]
        assert not tokenizers.agrees(ENGINE, tokens), "no prompt goes as ids meanwhile"
        assert not tokenizers.has_probed(BASE, ENGINE)
        await probe(tokenizers, url)
        assert not tokenizers.knows(BASE)
        assert "tokenized at the engines" in (tokenizers.note(BASE) or "")
        found = await ids_of(tokenizers, url)
        assert (found.source, found.ids) == ("remote", swapped.ids(CHAT))
        worker.chat = first
        now[0] += 61
        await probe(tokenizers, url)
        assert tokenizers.note(BASE) is None
        assert (await ids_of(tokenizers, url)).source == "local"
    tokenizers.close()


async def test_a_template_that_differs_for_no_probe_is_found_by_the_contradicted_request_itself(client, model):
    files = read_files(model)
    worker = TokenizingWorker(ChatTokenizer.from_dir(model), files)
    odd = "{% if messages | length > 4 %}{{ 'A long talk. ' }}{% endif %}" + CHAT_TEMPLATE.lstrip()
    talk = {"messages": [{"role": role, "content": "so"} for role in ("user", "assistant") * 3]}
    tokenizers = Tokenizers(client)
    async with serving(worker.app) as url:
        await probe(tokenizers, url)
        tokens = await ids_of(tokenizers, url, talk)
        worker.chat = ChatTokenizer.from_files(files | {"chat_template.jinja": odd})
        assert contradict(tokenizers, tokens, talk) == ["w0"]
        await probe(tokenizers, url)
        assert (await ids_of(tokenizers, url, talk)).source == "remote"
    tokenizers.close()


async def test_an_engine_that_still_agrees_changes_nothing(client, model):
    worker = TokenizingWorker(ChatTokenizer.from_dir(model), read_files(model))
    tokenizers = Tokenizers(client)
    async with serving(worker.app) as url:
        await probe(tokenizers, url)
        tokens = await ids_of(tokenizers, url)
        assert contradict(tokenizers, tokens) == ["w0"]
        assert (await ids_of(tokenizers, url)).source == "local", "only a probe's answer takes the tokenizer away"
        await probe(tokenizers, url)
        assert tokenizers.agrees(ENGINE, await ids_of(tokenizers, url))
        assert contradict(tokenizers, tokens) == []
    tokenizers.close()


async def test_once_one_engine_has_changed_without_a_restart_all_are_probed_again(client, model):
    worker = TokenizingWorker(ChatTokenizer.from_dir(model), read_files(model))
    tokenizers = Tokenizers(client)
    async with serving(worker.app) as url:
        for name in ("w0", "w1", "w2"):
            await probe(tokenizers, url, name)
        tokens = await ids_of(tokenizers, url)
        worker.offset = 7
        assert contradict(tokenizers, tokens) == ["w0"]
        await probe(tokenizers, url)
        assert not any(tokenizers.has_probed(BASE, (name, "1")) for name in ("w1", "w2"))
        await probe(tokenizers, url, "w1")
        assert not tokenizers.knows(BASE)
    tokenizers.close()


async def test_answers_that_count_other_prompt_tokens_are_noticed_by_a_router(model):
    tokenizer = ChatTokenizer.from_dir(model)
    shift = [0]

    def theirs(body):
        text, special = tokenizer.prompt_text(body)
        return tokenizer.encode(text, add_special_tokens=special) + [1] * shift[0]

    async def answer(_engine, body):
        tokens = len(theirs(body))
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        choices = [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]
        return JSONResponse({"id": "1", "model": body["model"], "choices": choices, "usage": usage})

    engine = EngineDouble("w0", answer, ids_of=theirs)
    control = AgentDouble(files=read_files(model))
    async with fleet(engine, control=control, tokenizer="auto") as (client, _, parts):
        await until(lambda: parts.tokenizers.knows(BASE))
        body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
        assert parts.tokenizers.note(BASE) is None
        for _ in range(8):
            await client.post("/v1/chat/completions", json=body)
        assert parts.tokenizers.knows(BASE)
        shift[0] = 3
        for _ in range(4):
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        await until(lambda: not parts.tokenizers.knows(BASE))
        explained = (await client.post("/v1/route", json=body)).json()
        assert explained["tokens_from"] == "remote"
        assert "tokenized at the engines" in explained["note"]
        metrics = (await client.get("/metrics")).text
    assert sample_value(metrics, "lorafleet_router_token_doubts_total", outcome="differs") == 1
    assert sample_value(metrics, "lorafleet_router_tokenizer_distrusted", base_model=BASE) == 1


def test_the_dated_template_is_one_that_shows_the_date(model):
    chat = DatedWorker(read_files(model)).chat
    assert chat.date_forms == {"%d %b %Y"}
    assert json.dumps(chat.render(CHAT, lambda form: f"<{form}>")).count("<%d %b %Y>") == 1
