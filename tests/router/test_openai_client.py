"""`openai`'s own client before a router, whose engine answers as real vLLM did to the same requests."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from lorafleet.keys.key_files import hash_key
from tests.patience import until
from tests.recordings.openai_answers import ASKED, recorded_answers
from tests.router.doubles import BASE, AgentDouble
from tests.router.faults.faulty_fleet import answering, faulty_fleet, pieces
from tests.serving import client_of

MODEL = "sql/v1"
ANSWERS = recorded_answers()


def as_said(name: str) -> bytes:
    """The recorded answer as it comes on the wire; a stream in pieces that are cut anywhere."""
    kept = ANSWERS[name]
    body = kept["body"].encode()
    if not kept["type"].startswith("text/event-stream"):
        return answering(body, status=b"%d x" % kept["status"])
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kept["type"].encode()
    return head + pieces(*(body[at : at + 97] for at in range(0, len(body), 97))) + b"0\r\n\r\n"


async def vllm(engine, reader, writer):
    """Answers each request with what vLLM said to the one of the same name."""
    while True:
        body = json.loads(await engine.request(reader))
        name = body["user"]
        if name == "hang":
            await reader.read()
            return
        _path, asked = ASKED[name]
        assert {field: body[field] for field in asked if field != "stream_options"} == {
            field: value for field, value in asked.items() if field != "stream_options"
        }
        writer.write(as_said(name))


@asynccontextmanager
async def asking(tmp_path=None, *, engines=1, **settings):
    """(openai's client, the router)."""
    from openai import AsyncOpenAI

    control = AgentDouble()
    control.add_adapter(MODEL, on=[f"w{number}" for number in range(engines)])
    async with faulty_fleet(engines, control=control, **settings) as router:
        for engine in router.engines:
            engine.script = vllm
        async with AsyncOpenAI(
            base_url=f"{router.client.base_url}/v1",
            api_key="a",
            max_retries=0,
            http_client=client_of(),
        ) as client:
            yield client, router


def request(name):
    """What its client is to be asked, by keywords."""
    return {"model": MODEL, "user": name, **ASKED[name][1]}


async def test_a_chat_is_the_same_whole_and_streamed_and_its_model_is_the_one_asked_for():
    async with asking() as (client, _router):
        whole = await client.chat.completions.create(**request("chat"))
        chunks = [chunk async for chunk in await client.chat.completions.create(**request("chat, streamed"))]
        assert {whole.model, *(chunk.model for chunk in chunks)} == {MODEL}
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content != ""
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
        assert not any(chunk.usage for chunk in chunks)
        assert whole.usage.completion_tokens == 6
        asked = [chunk async for chunk in await client.chat.completions.create(**request("usage, streamed"))]
        assert (asked[-1].choices, asked[-1].usage.total_tokens) == ([], whole.usage.total_tokens)


async def test_a_call_of_a_tool_is_the_same_whole_and_streamed():
    async with asking() as (client, _router):
        (call,) = (await client.chat.completions.create(**request("tools"))).choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"city"}
        arguments, names = "", []
        async for chunk in await client.chat.completions.create(**request("tools, streamed")):
            for part in chunk.choices[0].delta.tool_calls or ():
                names += [part.function.name] if part.function.name else []
                arguments += part.function.arguments or ""
        assert (names, json.loads(arguments)) == (["weather"], json.loads(call.function.arguments))


async def test_two_choices_with_log_probabilities_are_the_same_whole_and_streamed():
    async with asking() as (client, _router):
        whole = await client.chat.completions.create(**request("two"))
        assert [choice.index for choice in whole.choices] == [0, 1]
        texts, tokens = ["", ""], [[], []]
        async for chunk in await client.chat.completions.create(**request("two, streamed")):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
        for choice in whole.choices:
            assert texts[choice.index] == choice.message.content
            assert [t.token for t in tokens[choice.index]] == [t.token for t in choice.logprobs.content]
            assert all(len(t.top_logprobs) == 2 for t in choice.logprobs.content)


async def test_completions_embeddings_and_responses_arrive():
    async with asking() as (client, _router):
        whole = await client.completions.create(**request("completion"))
        assert whole.choices[0].logprobs.token_logprobs
        stream = await client.completions.create(**request("completion, streamed"))
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
        embedded = await client.embeddings.create(**request("embedding"))
        assert [len(each.embedding) > 10 for each in embedded.data] == [True, True]
        response = await client.responses.create(**request("response"))
        events = [event async for event in await client.responses.create(**request("response, streamed"))]
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert events[-1].response.output_text == response.output_text != ""
        assert {whole.model, embedded.model, response.model, events[-1].response.model} == {MODEL}


async def test_what_goes_wrong_is_the_exception_that_openai_has_for_it(tmp_path):
    import openai

    keys = tmp_path / "keys.yaml"
    limits = {"concurrent_requests": 1}
    entry = {"sha256": hash_key("a"), "tenant": "a", "scopes": ["infer"], "limits": limits}
    keys.write_text(json.dumps({"keys": [entry]}))
    async with asking(key_files=(keys,)) as (client, router):
        for name in ("refused", "refused, streamed"):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**request(name))
            assert (refused.value.type, refused.value.param) == ("BadRequestError", "temperature")
        with pytest.raises(openai.BadRequestError) as steering:
            await client.chat.completions.create(**request("chat"), extra_body={"lora_adapter": MODEL})
        assert steering.value.param == "lora_adapter"
        chosen = request("chat") | {"model": BASE}
        named = await client.chat.completions.with_raw_response.create(**chosen, extra_body={"lora_path": MODEL})
        assert named.headers["x-lorafleet-adapter"].partition("@")[0] == MODEL
        with pytest.raises(openai.NotFoundError) as absent:
            await client.chat.completions.create(**request("chat") | {"model": "absent"})
        assert absent.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        assert MODEL in [model.id async for model in client.models.list()]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        hanging = asyncio.create_task(client.chat.completions.create(**request("chat") | {"user": "hang"}))
        await until(lambda: router.parts.scheduler.load.total_in_flight)
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(**request("chat"))
        assert limited.value.code == "rate_limited"
        assert int(limited.value.response.headers["retry-after"]) >= 1
        hanging.cancel()


async def test_an_engine_that_dies_is_a_503_or_an_error_in_the_stream():
    import openai

    async with asking(failover_wait_s=0.05) as (client, router):

        async def dies(engine, reader, writer):
            body = json.loads(await engine.request(reader))
            whole = as_said("chat, streamed")
            writer.write(whole[: len(whole) // 2] if body.get("stream") else b"")
            await writer.drain()

        router.engines[0].script = dies
        with pytest.raises(openai.InternalServerError) as gone:
            await client.chat.completions.create(**request("chat") | {"model": BASE})
        assert (gone.value.status_code, gone.value.code) == (503, "no_replica")
        stream = await client.chat.completions.create(**request("chat, streamed") | {"model": BASE})
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError) as broken:
            await read_on(stream)
        assert broken.value.code == "stream_broken"


async def read_on(stream):
    async for _ in stream:
        pass


async def test_a_client_that_stops_reading_a_stream_frees_everything():
    async with asking() as (client, router):
        async with await client.chat.completions.create(**request("tools, streamed")) as stream:
            await anext(aiter(stream))
        await until(router.is_idle)
