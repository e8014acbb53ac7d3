import json
import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from router.core.errors import BadBody, ReplicaUnreachable
from router.protocols.adapter_fields import (
    ADAPTER_HEADERS,
    chosen_adapter,
    is_adapter_name,
    prompt_adapters,
    refuse_adapter_fields,
    with_extra_body,
)
from router.protocols.bodies import ItemAnswer
from router.protocols.completion_batch import join_completions, split_completions
from router.protocols.routes import ROUTES
from tests.router.doubles import BASE, CHAT, DIGEST, EngineDouble, error_of, fleet, with_sql

SQL, LEGAL = "sql/v1", "legal/v2"
# What gateways and engines call it.
FOREIGN = [
    "adapter",
    "adapterId",
    "adapter_id",
    "adapter_ids",
    "adapter-id",
    "adapter_name",
    "adapterName",
    "adapter_parameters",
    "adapter_path",
    "adapter_source",
    "adapters",
    "ADAPTER_ID",
    "activeAdapter",
    "active_adapters",
    "extra_lora",
    "hf_lora",
    "lora",
    "lora-id",
    "loraId",
    "loraName",
    "loraPath",
    "LoRA",
    "LORA_PATH",
    "lora_adapter",
    "lora_adapter_name",
    "lora_adapters",
    "lora_config",
    "lora_dir",
    "lora_ids",
    "lora_int_id",
    "lora_model",
    "lora_modules",
    "lora_name",
    "lora_names",
    "lora_request",
    "lora_scale",
    "lora_task_id",
    "lora_weights",
    "loraAdapters",
    "loras",
    "loraRequest",
    "merged_adapters",
    "peft",
    "peft_model_id",
    "peftModel",
    "qlora",
    "useLoRA",
    "use_lora",
]
CONTAINERS = (
    "parameters",
    "options",
    "sampling_params",
    "generate_config",
    "extra_configs",
    "vllm_xargs",
    "model_kwargs",
    "providerOptions",
)
NOTHING = ["null", "false", "[]", "[ ]", "{}", '""']


def raw(body: object) -> dict[str, msgspec.Raw]:
    text = body if isinstance(body, str) else json.dumps(body)
    return msgspec.json.decode(text, type=dict[str, msgspec.Raw])


def refused(body: object) -> BadBody:
    with pytest.raises(BadBody) as caught:
        refuse_adapter_fields(raw(body))
    return caught.value


# --- names


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_adapter_field_is_refused_with_the_field_to_use(name):
    error = refused({"prompt": "x", name: "sql"})
    assert (error.param, str(error)) == (name, f"{name} is not accepted: use lora_id")


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_adapter_field_is_refused_as_json_may_spell_it(name):
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    assert refused(f'{{"{escaped}":0}}').param == name
    assert refused(f'{{"{name}":null,"{name}":[{{"id":0,"scale":1.0}}]}}').param == name


@pytest.mark.parametrize("container", CONTAINERS)
def test_adapter_field_within_a_gateways_parameters_is_refused(container):
    for name in (*FOREIGN, "lora_id", "lora_path"):
        error = refused({container: {"top_k": 1, "more": [{name: "sql"}]}})
        assert error.param == f"{container}.more.{name}"
        assert "use lora_id, at the top of the body" in str(error)


@pytest.mark.parametrize("nothing", NOTHING)
def test_foreign_adapter_field_that_says_nothing_is_dropped(nothing):
    body = raw(f'{{"adapter_id":{nothing},"loraAdapter":{nothing},"parameters":{{"adapter_id":{nothing}}},"n":1}}')
    refuse_adapter_fields(body)
    assert body.keys() == {"parameters", "n"}


@given(st.text(string.ascii_letters, max_size=8), st.sampled_from(["lora", "loras", "adapter", "adapters", "peft"]))
def test_word_for_an_adapter_is_found_wherever_it_begins_a_word(other, word):
    assert is_adapter_name(word + "_" + other)
    assert is_adapter_name(other + "_" + word)
    assert is_adapter_name(other + "-" + word.upper())
    assert is_adapter_name((other.lower() or "a") + word.capitalize())


@pytest.mark.parametrize("name", ["exploration", "exploration_rate", "flora", "colorado", "adaptive", "adapt", "kleft"])
def test_word_that_only_holds_those_letters_is_no_adapter_field(name):
    assert not is_adapter_name(name)


def test_no_field_that_a_route_reads_looks_like_an_adapter_field():
    read = {name for route in ROUTES.values() for name in route.fields}
    assert {name for name in read if is_adapter_name(name)} == {"lora_id", "lora_path"}


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"adapter": "v1"}},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"properties": {"lora_id": {}}}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"adapter": {}}}}}},
        {"messages": [{"role": "user", "content": "lora_adapter", "adapter": 1}]},
        {"chat_template_kwargs": {"adapter": "x"}},
        {"unknown": {"deep": [{"metadata": {"lora": 1}}], "exploration": 1}},
    ],
)
def test_keys_of_the_clients_own_are_let_through(body):
    given_fields = raw(body)
    refuse_adapter_fields(given_fields)
    assert given_fields == raw(body)


# --- lora_id, lora_path and extra_body


def test_lora_path_means_lora_id_and_the_two_may_not_differ():
    assert chosen_adapter({}) == ("lora_id", None)
    assert chosen_adapter({"lora_id": SQL}) == ("lora_id", SQL)
    assert chosen_adapter({"lora_path": SQL}) == ("lora_path", SQL)
    assert chosen_adapter({"lora_path": SQL, "lora_id": SQL}) == ("lora_path", SQL)
    for nothing in (None, "", False, [], {}):
        assert chosen_adapter({"lora_path": nothing, "lora_id": SQL}) == ("lora_id", SQL)
    assert chosen_adapter({"lora_path": 0}) == ("lora_path", 0)
    with pytest.raises(BadBody, match="leave one of them out"):
        chosen_adapter({"lora_path": SQL, "lora_id": LEGAL})


def test_literal_extra_body_is_merged_into_the_body():
    merged = with_extra_body(raw({"top_k": 1, "n": 2, "extra_body": {"lora_path": SQL, "top_k": 7}}))
    assert {name: json.loads(bytes(value)) for name, value in merged.items()} == {"top_k": 7, "n": 2, "lora_path": SQL}
    assert with_extra_body(raw({"n": 2, "extra_body": None})).keys() == {"n"}
    for wrong in (["x"], "x", {"extra_body": {"lora_id": SQL}}):
        with pytest.raises(BadBody) as caught:
            with_extra_body(raw({"extra_body": wrong}))
        assert caught.value.param == "extra_body"


def test_list_of_adapters_has_one_for_each_prompt():
    assert prompt_adapters("lora_path", [SQL, None], ["a", "b"]) == [SQL, None]
    assert prompt_adapters("lora_path", [SQL, LEGAL], [[1, 2], [3]]) == [SQL, LEGAL]
    assert prompt_adapters("lora_path", [SQL, SQL], ["a", "b"]) == SQL
    assert prompt_adapters("lora_path", [None], ["a"]) is None
    for adapters, prompt, why in (
        ([SQL], "a", "there is one prompt"),
        ([SQL], [1, 2], "there is one prompt"),
        ([SQL], None, "there is one prompt"),
        ([SQL] * 3, ["a", "b"], "3 entries for 2 prompts"),
        ([SQL, 1], ["a", "b"], "must be a text, null, or a list"),
    ):
        with pytest.raises(BadBody, match=why) as caught:
            prompt_adapters("lora_path", adapters, prompt)
        assert caught.value.param == "lora_path"


# --- completions with several adapters


def test_each_prompt_of_a_list_becomes_a_completion_with_its_adapter():
    call = {"model": BASE, "prompt": ["a", "b"], "lora_path": [SQL, None], "n": 2, "request_id": "mine"}
    first, second = map(json.loads, split_completions(raw(call), call["prompt"], call["lora_path"]))
    assert first == {"model": BASE, "n": 2, "prompt": "a", "lora_id": SQL}
    assert second == {"model": BASE, "n": 2, "prompt": "b"}


def test_choices_are_joined_in_the_order_of_the_prompts_and_usage_is_added_up():
    def answer(*texts, cached=None):
        choices = [{"index": i, "text": text} for i, text in enumerate(texts)]
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        usage["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
        body = {"id": "x", "model": "m", "choices": choices[::-1], "usage": usage}
        return ItemAnswer(json.dumps(body).encode(), "m")

    joined = json.loads(join_completions("cmpl-1", [answer("a", "b"), answer("c", "d", cached=2)]))
    assert [(choice["index"], choice["text"]) for choice in joined["choices"]] == list(enumerate("abcd"))
    assert (joined["id"], joined["model"]) == ("cmpl-1", "m")
    assert joined["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    for wrong in (b"{}", b"[", b'{"choices":[{"index":"x"}],"usage":{}}'):
        with pytest.raises(ReplicaUnreachable, match="no completion"):
            join_completions("cmpl-1", [answer("a"), ItemAnswer(wrong, "m")])


# --- before a router


async def completing(engine, body):
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    choices = [{"index": i, "text": f"{body['model']}: {prompt}"} for i, prompt in enumerate(prompts)]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return JSONResponse({"id": "cmpl-e", "model": body["model"], "choices": choices, "usage": usage})


def two_adapters():
    control = with_sql("w0")
    control.add_adapter(LEGAL, on=["w0"])
    return control


async def test_no_inference_route_ignores_a_foreign_adapter_field():
    engine = EngineDouble("w0")
    paths = [path for (_, path), route in ROUTES.items() if route.has_body]
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        for path in paths:
            for more in ({"loraAdapter": SQL}, {"parameters": {"adapter_id": SQL}}, {"extra_body": {"lora_name": SQL}}):
                answer = await client.post(path, json={"model": BASE, "prompt": "x", "input": "x", **more})
                assert (answer.status_code, "use lora_id" in answer.text) == (400, True), (path, answer.text)
    assert engine.bodies == []


async def test_items_of_generate_and_the_route_of_decisions_refuse_foreign_adapter_fields():
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        for body in ({"text": ["a"], "loras": [SQL]}, {"text": "a", "sampling_params": [{"adapter_id": SQL}]}):
            answer = await client.post("/generate", json=body)
            assert error_of(answer) == (400, "invalid_request_body")
        answer = await client.post("/generate", json={"text": "a", "sampling_params": {"adapter_id": SQL}})
        assert "use lora_id" in answer.text
        answer = await client.post("/v1/route", json={**CHAT, "adapterId": SQL})
        assert (error_of(answer)[0], answer.json()["error"]["param"]) == (400, "adapterId")
    assert engine.bodies == []


async def test_header_that_chooses_an_adapter_elsewhere_is_refused():
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        for name in sorted(ADAPTER_HEADERS):
            for path, body in (("/v1/chat/completions", CHAT), ("/generate", {"text": "a"})):
                answer = await client.post(path, json=body, headers={name.decode().title(): SQL})
                assert error_of(answer) == (400, "invalid_request_body")
                assert "use lora_id, in the body" in answer.json()["error"]["message"]
        answer = await client.post("/v1/chat/completions?api-version=1&loraId=sql", json=CHAT)
        assert (error_of(answer)[0], answer.json()["error"]["param"]) == (400, "loraId")
    assert engine.bodies == []


async def test_lora_path_and_its_extra_body_form_run_the_adapter():
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        for more in ({"lora_path": SQL}, {"extra_body": {"lora_path": SQL}}, {"extra_body": {"lora_id": SQL}}):
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"model": BASE, "prompt": "x"})):
                answer = await client.post(path, json=body | more)
                assert answer.headers["x-lorafleet-adapter"] == f"{SQL}@{DIGEST[:12]}"
        assert (await client.post("/v1/chat/completions", json=CHAT | {"lora_path": None})).headers[
            "x-lorafleet-adapter"
        ] == "base"
        answer = await client.post("/v1/chat/completions", json=CHAT | {"lora_path": "absent"})
        assert error_of(answer) == (404, "model_not_found")
        assert answer.json()["error"]["param"] == "lora_path"
        answer = await client.post("/v1/chat/completions", json=CHAT | {"lora_path": [SQL]})
        assert error_of(answer) == (400, "invalid_request_body")
        assert "/v1/completions takes a list" in answer.json()["error"]["message"]
    assert [set(body) & {"lora_path", "lora_id", "extra_body"} for body in engine.bodies] == [set()] * 7


async def test_prompts_of_one_completion_may_have_different_adapters():
    engine = EngineDouble("w0", answer=completing)
    async with fleet(engine, control=two_adapters()) as (client, _, _):
        call = {"model": BASE, "prompt": ["a", "b", "c"]}
        for field in ("lora_path", "lora_id"):
            answer = await client.post("/v1/completions", json=call | {field: [SQL, None, LEGAL]})
            found = answer.json()
            assert [choice["text"].rpartition(":")[0].partition("@")[0] for choice in found["choices"]] == [
                SQL,
                BASE,
                LEGAL,
            ]
            assert [choice["text"][-1] for choice in found["choices"]] == ["a", "b", "c"]
            assert (found["model"], found["usage"]["total_tokens"]) == (BASE, 6)
            assert found["id"] == f"cmpl-{answer.headers['x-request-id']}"
        without_model = await client.post("/v1/completions", json={"prompt": ["a", "b"], "lora_path": [SQL, LEGAL]})
        assert without_model.json()["model"] == SQL
        # One adapter for all is one request, which may be streamed.
        engine.bodies.clear()
        same = await client.post("/v1/completions", json=call | {"lora_path": [SQL] * 3})
        assert (same.headers["x-lorafleet-adapter"], len(engine.bodies)) == (f"{SQL}@{DIGEST[:12]}", 1)
        engine.bodies.clear()
        for more, param in (
            ({"lora_path": [SQL, LEGAL]}, "lora_path"),
            ({"lora_path": [SQL, None, LEGAL], "stream": True}, "stream"),
            ({"lora_path": [SQL, None, LEGAL], "stream": "true"}, "stream"),
            ({"lora_path": [SQL, None, LEGAL], "stream": 1}, "stream"),
            ({"prompt": "a", "lora_path": [SQL]}, "lora_path"),
        ):
            answer = await client.post("/v1/completions", json=call | more)
            assert error_of(answer) == (400, "invalid_request_body")
            assert answer.json()["error"]["param"] == param
        assert engine.bodies == []
        answer = await client.post("/v1/completions", json=call | {"lora_path": [SQL, None, "absent"]})
        assert error_of(answer) == (404, "model_not_found")
        answer = await client.post("/v1/route", json=call | {"lora_path": [SQL, None, LEGAL]})
        assert error_of(answer) == (400, "invalid_request_body")
