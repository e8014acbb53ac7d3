"""Token ids of prompts: from our tokenizer, an engine or the client, and what is sent on."""

import asyncio
from array import array

import httpx
import pytest
from structlog.testing import capture_logs

from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from router.tokenizing.tokenizers import Tokenizers
from router.tokenizing.tokens import Tokens
from tests.patience import patience, until, within
from tests.router.doubles import AgentDouble, EngineDouble, fleet
from tests.router.tokenizing.tokenizing_worker import BASE, HI, LONG, RULES, TokenizingWorker
from tests.serving import serving


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


async def test_a_configured_folder_is_read_instead_of_asking_an_agent(client, worker, model):
    worker.files = {}
    tokenizers = Tokenizers(client, paths={BASE: model})
    async with serving(worker.app) as url:
        await tokenizers.load_or_probe(BASE, agent_url="http://127.0.0.1:1", engine_url=url)
    assert tokenizers.knows(BASE)
    assert worker.files_asked == 0
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
