"""The table of routes, rendered prompts and engine bodies, compared with real vLLM."""

import asyncio
import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorafleet.tokenizer.chat import ChatTokenizer
from router.protocols.bodies import ItemAnswer
from router.protocols.prompts import prompt_body
from router.protocols.routes import ROUTES, Route, has_only_early_events
from router.protocols.sglang_generate import CumulativeStream, join_answers, split_batch
from router.protocols.stored_responses import tagged_response_id, worker_of_response
from router.protocols.usage import usage_of, usage_of_events
from router.request.engine_body import may_send_ids
from tests.bodies import CHAT_BODIES, COMPLETION_PROMPTS, WEATHER
from tests.contract.prompt_bodies import (
    CUSTOM,
    CUSTOM_CALL,
    MESSAGES_BODIES,
    NAMESPACE,
    RESPONSES_BODIES,
    UNSEEN_TOOLS,
    USER,
)
from tests.contract.surface import (
    ENGINE_NAME,
    LORA_ID,
    NOT_SERVED,
    POOLING,
    DirectEngine,
    assert_accepts_a_salt,
    assert_answers_its_example,
    assert_names_an_unknown_model,
    assert_salt_separates,
    assert_same_through_a_router,
    assert_table_has_every_route,
    comparable_answer,
    control_of,
    engine_with_adapter,
    example,
    has_only_closed_circuits,
    routed,
)
from tests.engines import Kind, RunningEngine
from tests.patience import until, within
from tests.properties import sample
from tests.router.doubles import BASE, counted
from workers.wire import Load

pytestmark = pytest.mark.vllm

ROWS = [route for route in ROUTES.values() if route.has_body and route.path not in {*POOLING, *NOT_SERVED}]
STREAMED = [route for route in ROUTES.values() if route.streams]
by_row = pytest.mark.parametrize("route", ROWS, ids=lambda route: route.path)


@pytest.fixture(scope="module")
def direct(engine_of: Callable[[Kind], RunningEngine], adapters: dict[str, Path]) -> Iterator[DirectEngine]:
    with engine_with_adapter(engine_of("vllm"), adapters["sql"]) as direct:
        yield direct


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.from_dir(model_dir)


# --- the table


@by_row
def test_every_route_answers_its_example_for_base_model_and_adapter(direct: DirectEngine, route: Route) -> None:
    assert_answers_its_example(direct, route)


@by_row
def test_every_route_names_an_unknown_model(direct: DirectEngine, route: Route) -> None:
    assert_names_an_unknown_model(direct, route)


@by_row
def test_body_of_every_route_has_a_salt_if_its_row_requires_one(direct: DirectEngine, route: Route) -> None:
    assert_accepts_a_salt(direct, route)


def test_salt_separates_prompts_on_every_route_with_a_prompt(direct: DirectEngine) -> None:
    text = "INSERT INTO salts VALUES ('sea', 'rock', 'none');\n" * 8
    chat = [{"role": "user", "content": text}]
    for number, (path, body) in enumerate(
        [
            ("/v1/chat/completions", {"messages": chat}),
            ("/v1/chat/completions/batch", {"messages": [chat]}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/messages", {"messages": chat}),
            ("/v1/responses", {"input": text, "max_output_tokens": 2}),
            ("/generative_scoring", {"query": text, "items": [text], "label_token_ids": [300, 301]}),
        ]
    ):
        assert_salt_separates(direct, path, body | {"max_tokens": 2}, f"{number}")


@pytest.mark.parametrize("route", STREAMED, ids=lambda route: route.path)
def test_last_events_of_a_stream_have_its_usage(direct: DirectEngine, route: Route) -> None:
    more: dict[str, Any] = {"stream": True}
    answer = direct.post(route.path, example(route.path) | more, model=ENGINE_NAME, ask_usage=route.hides_usage)
    assert answer.headers["content-type"].startswith("text/event-stream")
    usage = usage_of_events(route.usage, answer.content)
    assert usage is not None
    assert (usage.completion_tokens, usage.cached_tokens is None) == (4, False)
    events = [event + b"\n\n" for event in answer.content.split(b"\n\n") if event]
    begun = [has_only_early_events(route, event) for event in events]
    assert begun == [True] * 2 * bool(route.early_events) + [False] * (len(events) - 2 * bool(route.early_events))
    # An event of token ids names no model.
    assert (ENGINE_NAME.encode() in events[0]) == (route.prompt != "token_ids")
    if route.hides_usage:
        quiet = direct.post(route.path, example(route.path) | more, model=ENGINE_NAME)
        assert usage_of_events(route.usage, quiet.content) is None


def test_every_inference_route_of_the_engine_is_in_the_table(direct: DirectEngine) -> None:
    assert_table_has_every_route(direct)


# --- prompts


def test_prompts_of_responses_and_messages_equal_the_engines(direct: DirectEngine, tokenizer: ChatTokenizer) -> None:
    for path, kind, bodies, more in (
        ("/v1/responses", "responses", RESPONSES_BODIES, {}),
        ("/v1/messages", "messages", MESSAGES_BODIES, {"max_tokens": 1025}),
    ):
        for name, body in bodies:
            chat = prompt_body(kind, body, tokenizer)
            assert chat is not None, name
            assert tokenizer.chat_ids(chat) == direct.ids(path, body | more), f"{path} {name}"


def test_responses_and_messages_report_cached_tokens(direct: DirectEngine) -> None:
    text = "SELECT name FROM customers WHERE id = 7;\n" * 8
    for route, body in (
        (ROUTES["POST", "/v1/responses"], {"input": text}),
        (ROUTES["POST", "/v1/messages"], {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
    ):
        first, second = (usage_of(route.usage, direct.post(route.path, body).content) for _ in range(2))
        ids = direct.ids(route.path, body)
        assert first is not None
        assert second is not None
        assert first.prompt_tokens == second.prompt_tokens == len(ids)
        assert second.cached_tokens == (len(ids) - 1) // 32 * 32


# --- ids in place of text


def assert_ids_change_nothing(direct: DirectEngine, path: str, body: dict[str, Any], ids: list[int], name: str) -> None:
    kind = ROUTES["POST", path].prompt
    for more in ({}, {"stream": True}):
        direct.post(path, body | more, model=ENGINE_NAME)  # from now on both find the same cache
        text = direct.post(path, body | more, model=ENGINE_NAME)
        given = direct.post(path, body | more, model=ENGINE_NAME, prompt=kind, prompt_ids=array("I", ids))
        assert (given.status_code, comparable_answer(given.text)) == (text.status_code, comparable_answer(text.text)), (
            f"{path} {name}"
        )
    if path != "/v1/completions":
        short = direct.post(path, body, model=ENGINE_NAME, prompt=kind, prompt_ids=array("I", ids[: len(ids) // 2]))
        assert comparable_answer(short.text) != comparable_answer(direct.post(path, body, model=ENGINE_NAME).text), (
            f"{name}: ids were not read"
        )


MORE_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("logprobs", {"logprobs": True, "top_logprobs": 2}),
    ("prompt logprobs", {"prompt_logprobs": 1}),
    ("several", {"n": 2, "temperature": 0.5, "seed": 3}),
    ("a stop", {"stop": ["e"]}),
    ("JSON", {"response_format": {"type": "json_object"}}),
    ("a tool that must be called", {"tools": [WEATHER], "tool_choice": "required"}),
    ("ids in the answer", {"return_token_ids": True}),
    ("a salt", {"cache_salt": "pepper"}),
]


def test_chat_by_ids_gets_the_same_answer(direct: DirectEngine, tokenizer: ChatTokenizer) -> None:
    limits = {"max_tokens": 8, "temperature": 0}
    chats = [*CHAT_BODIES, *((name, {"messages": [USER], **more}) for name, more in MORE_CHATS)]
    for name, body in sample(chats, 4):
        assert_ids_change_nothing(direct, "/v1/chat/completions", limits | body, tokenizer.chat_ids(body), name)
    for name, body in sample(RESPONSES_BODIES, 2):
        chat = prompt_body("responses", body, tokenizer)
        assert chat is not None
        whole = {"max_output_tokens": 8, "temperature": 0} | body
        assert_ids_change_nothing(direct, "/v1/responses", whole, tokenizer.chat_ids(chat), name)
    for name, body in sample(MESSAGES_BODIES, 2):
        chat = prompt_body("messages", body, tokenizer)
        assert chat is not None
        if name != "thinking":  # this engine has no parser for it
            assert_ids_change_nothing(direct, "/v1/messages", limits | body, tokenizer.chat_ids(chat), name)


MORE_COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"prompt_logprobs": 2},
    {"return_token_ids": True},
    {"n": 2, "seed": 1, "temperature": 0.7},
    {"stop": ["e"]},
    {"add_special_tokens": False},
    {"use_beam_search": True, "n": 2},
    {"min_tokens": 3},
    {"cache_salt": "pepper"},
    {"repetition_penalty": 1.5, "bad_words": ["a"]},
]


def test_completion_by_ids_gets_the_same_answer(direct: DirectEngine, tokenizer: ChatTokenizer) -> None:
    pairs = list(itertools.product(filter(None, COMPLETION_PROMPTS), MORE_COMPLETIONS))
    for prompt, more in sample(pairs, len(MORE_COMPLETIONS) // 2 + 1):
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0} | more
        if body.get("use_beam_search"):
            body["stream"] = False
        ids = tokenizer.completion_ids(prompt)
        assert_ids_change_nothing(direct, "/v1/completions", body, ids, f"{prompt!r} {more}")


def test_requests_that_would_show_ids_are_not_sent_as_ids(direct: DirectEngine, tokenizer: ChatTokenizer) -> None:
    """If this fails, vLLM no longer shows the ids, and `may_send_ids` may be less strict."""
    prompt = "e\u0301 one two three"
    ids = array("I", tokenizer.completion_ids(prompt))
    for field, value in (("suffix", "x"), ("truncate_prompt_tokens", 2)):
        body = {"prompt": prompt, field: value, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        fields = {name: json.dumps(inner).encode() for name, inner in body.items()}
        assert not may_send_ids("completion", fields, prompt_tokens=len(ids), max_model_len=2048)  # type: ignore[arg-type]
    long = {"prompt": "one " * 3000, "max_tokens": 1}
    text = direct.post("/v1/completions", long).json()["error"]["message"]
    given = direct.post(
        "/v1/completions", long, prompt="completion", prompt_ids=array("I", tokenizer.completion_ids(long["prompt"]))
    )
    assert given.json()["error"]["message"] != text
    chat = {"messages": [USER], "return_prompt_text": True, "max_tokens": 1, "temperature": 0}
    ids = array("I", tokenizer.chat_ids(chat))
    shown, hidden = (
        direct.post("/v1/chat/completions", chat, prompt="chat", prompt_ids=given).json()["prompt_text"]
        for given in (None, ids)
    )
    assert (shown is None, hidden) == (False, None)


# --- stored responses


def test_response_is_stored_under_the_routers_id(direct: DirectEngine) -> None:
    name = tagged_response_id(None, "f00", tenant="team", worker="10.0.0.7:8090")
    made = direct.post("/v1/responses", {"input": "hello", "max_output_tokens": 2}, response_id=name)
    assert made.json()["id"] == name
    assert direct.client.get(f"/v1/responses/{name}").json()["output"] == made.json()["output"]
    assert worker_of_response(name, tenant="team", param="response_id") == "10.0.0.7:8090"
    follow = {"input": "and then?", "previous_response_id": name, "max_output_tokens": 2}
    assert direct.post("/v1/responses", follow).json()["previous_response_id"] == name
    assert direct.client.post(f"/v1/responses/{name}/cancel").status_code == 400, "it is over"
    assert direct.client.get("/v1/responses/resp_unknown").status_code == 404


def test_background_response_is_found_and_cancelled_by_id(direct: DirectEngine) -> None:
    name = tagged_response_id(None, "f01", tenant=None, worker="w0")
    body = {"input": "hello", "max_output_tokens": 1500, "background": True}
    assert direct.post("/v1/responses", body, response_id=name).json()["status"] == "queued"
    assert direct.client.get(f"/v1/responses/{name}").json()["id"] == name
    assert direct.client.post(f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"


# --- /generate


def generate_batch_answer(direct: DirectEngine, **body: Any) -> Any:
    batch = split_batch(json.dumps(body).encode())
    answers = []
    for item in batch.items:
        fields = json.loads(item)
        weights = ENGINE_NAME if fields.get("lora_id") else BASE
        answer = direct.post("/v1/completions", fields, model=weights)
        assert answer.status_code == 200, answer.text
        answers.append(ItemAnswer(answer.content, weights))
    if batch.is_streamed:
        growing = CumulativeStream(batch.names[0])
        growing.weights = answers[0].weights
        return growing.events(answers[0].body)
    return json.loads(join_answers(batch, answers))


def test_generate_batch_answers_each_text_like_a_completion(direct: DirectEngine) -> None:
    params = {"max_new_tokens": 4, "temperature": 0}
    first, second = generate_batch_answer(
        direct, text=["hello", "hello"], lora_path=["sql/v1", None], sampling_params=params
    )
    for output, model in ((first, ENGINE_NAME), (second, BASE)):
        body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
        (choice,) = direct.post("/v1/completions", body, model=model).json()["choices"]
        assert output["text"] == choice["text"]
        assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
        assert (output["meta_info"]["prompt_tokens"], output["meta_info"]["completion_tokens"]) == (3, 4)
    assert first["text"] != second["text"]


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_schema": '{"type":"integer","minimum":10,"maximum":12}'}, "1[0-2]"),
    ],
)
def test_constraint_of_generate_holds(direct: DirectEngine, params: dict[str, str], pattern: str) -> None:
    output = generate_batch_answer(
        direct, text="hello", sampling_params={"max_new_tokens": 8, "temperature": 1, **params}
    )
    assert re.fullmatch(pattern, output["text"])
    assert output["meta_info"]["finish_reason"]["type"] == "stop"


def test_last_event_of_a_generate_stream_equals_the_whole_answer(direct: DirectEngine) -> None:
    ask = {"text": "hello there", "rid": "me", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    whole = generate_batch_answer(direct, **ask)
    *events, done = generate_batch_answer(direct, **ask, stream=True).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    texts = [json.loads(event.removeprefix(b"data: "))["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert json.loads(events[-1].removeprefix(b"data: ")) == whole


# --- behind a router

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
LIMITS = {"max_tokens": 8, "temperature": 0}
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    *((CHAT, name, {"messages": [USER], **LIMITS, **more}) for name, more in MORE_CHATS),
    (CHAT, "usage", {"messages": [USER], **LIMITS, "stream_options": {"include_usage": True}}),
    (CHAT, "no usage", {"messages": [USER], **LIMITS, "stream_options": {"include_usage": []}}),
    (CHAT, "all usage", {"messages": [USER], **LIMITS, "stream_options": {"continuous_usage_stats": True}}),
    (CHAT, "an echo", {"messages": [USER], **LIMITS, "echo": True}),
    (CHAT, "the prompt's text", {"messages": [USER], **LIMITS, "return_prompt_text": True}),
    (CHAT, "a wrong field", {"messages": [USER], "max_tokens": -1}),
    (CHAT, "no messages", {"messages": []}),
    (CHAT, "too long", {"messages": [{"role": "user", "content": "one " * 3000}]}),
    (
        CHAT,
        "a picture",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ),
    *((COMPLETIONS, str(more), {"prompt": "e\u0301 one two", **LIMITS, **more}) for more in MORE_COMPLETIONS),
    *(
        (COMPLETIONS, str(more), {"prompt": "e\u0301 one two", **LIMITS, **more})
        for more in ({"echo": True}, {"echo": True, "logprobs": 1}, {"suffix": "x"}, {"truncate_prompt_tokens": 2})
    ),
    (COMPLETIONS, "several", {"prompt": ["one", "two"], **LIMITS}),
    (COMPLETIONS, "ids", {"prompt": [300, 301], **LIMITS}),
    *(
        (COMPLETIONS, f"one in a batch {more}", {"prompt": ["e\u0301 one two " * 99], **LIMITS, **more})
        for more in ({}, {"echo": True}, {"suffix": "x"}, {"truncate_prompt_tokens": 2}, {"n": 2, "seed": 1})
    ),
    (COMPLETIONS, "ids in a batch", {"prompt": [[300, 301]], **LIMITS}),
    (COMPLETIONS, "a batch in a batch", {"prompt": [[[300, 301]]], **LIMITS}),
    (COMPLETIONS, "nothing", {"prompt": "", **LIMITS}),
    (COMPLETIONS, "too long", {"prompt": "one " * 3000, **LIMITS}),
    *((RESPONSES, name, {"max_output_tokens": 8, "temperature": 0, **body}) for name, body in RESPONSES_BODIES),
    (RESPONSES, "an earlier response that is no text", {"input": "x", "previous_response_id": 3}),
    (RESPONSES, "an id that is no text", {"input": "x", "request_id": 3}),
    *((MESSAGES, name, {**LIMITS, **body}) for name, body in MESSAGES_BODIES),
    (MESSAGES, "no limit", {"messages": [USER]}),
]


async def test_tools_that_are_no_functions_work_behind_a_router(direct: DirectEngine, model_dir: Path) -> None:
    limits = {"max_output_tokens": 4, "temperature": 0}
    message = {"input": [USER, CUSTOM_CALL, {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}]}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    async with routed(direct, model_dir) as (client, parts):
        for tools, more, status, tokens_from in (
            ([*UNSEEN_TOOLS, CUSTOM, NAMESPACE], {}, 200, "local"),
            (UNSEEN_TOOLS, {}, 200, "local"),
            ([{**CUSTOM, "format": grammar}], {}, 400, "approximate"),
            ([{"type": "of_tomorrow"}], {}, 400, "approximate"),
            ([CUSTOM], {"truncation": "auto"}, 200, "local"),
        ):
            body = {**limits, **message, **more, "tools": tools}
            await assert_same_through_a_router(direct, client, RESPONSES, body, str(tools))
            again = await client.post(RESPONSES, json=body | {"model": BASE})
            assert again.status_code == status, again.text
            assert parts.decisions[-1].tokens_from == tokens_from
            if status == 200:
                cached = again.json()["usage"]["input_tokens_details"]["cached_tokens"]
                assert cached > 0
                is_known = tokens_from == "local"
                assert int(again.headers["x-lorafleet-cached-tokens"]) == (cached if is_known else 0)


async def test_router_answers_every_example_like_the_engine(direct: DirectEngine, model_dir: Path) -> None:
    async with routed(direct, model_dir) as (client, _parts):
        for route in ROWS:
            await assert_same_through_a_router(direct, client, route.path, example(route.path), "example")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_router_answers_every_request_variant_like_the_engine(
    direct: DirectEngine, model_dir: Path, path: str
) -> None:
    async with routed(direct, model_dir) as (client, _parts):
        requested = [(name, body) for route, name, body in ASKED if route == path]
        for name, body in sample(requested, 3):
            await assert_same_through_a_router(direct, client, path, body, name)
            if not body.get("use_beam_search"):
                await assert_same_through_a_router(direct, client, path, body | {"stream": True}, f"{name}, streamed")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_behind_a_router_has_the_same_fingerprint(
    direct: DirectEngine, model_dir: Path, path: str
) -> None:
    async with routed(direct, model_dir) as (client, _parts):
        for more in ({}, {"n": 2, "seed": 1}, {"stream_options": {"include_usage": True}}):
            body = {"model": BASE, "stream": True, "max_tokens": 4, "messages": [USER], "prompt": "hello"} | more
            for _ in range(2):
                behind = (await client.post(path, json=body)).text
            assert behind.count("system_fingerprint") == direct.client.post(path, json=body).text.count(
                "system_fingerprint"
            )


async def test_routers_expected_cached_tokens_equal_the_engines(direct: DirectEngine, model_dir: Path) -> None:
    text = "Count the orders of every customer in May. " * 12
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        COMPLETIONS: {"prompt": text, "max_tokens": 1},
        RESPONSES: {"input": text + "!", "max_output_tokens": 1},
        MESSAGES: {"messages": [{"role": "user", "content": text + "?"}], "max_tokens": 1},
    }
    async with routed(direct, model_dir) as (client, _parts):
        for path, body in bodies.items():
            route = ROUTES["POST", path]
            for _ in range(2):
                answer = await client.post(path, json={"model": "sql/v1", "cache_salt": route.prompt, **body})
                assert answer.status_code == 200, answer.text
            usage = usage_of(route.usage, answer.content)
            assert usage is not None
            assert int(answer.headers["x-lorafleet-cached-tokens"]) == usage.cached_tokens, path
            assert usage.cached_tokens


async def test_router_expects_a_hit_only_where_the_engine_searches_its_cache(
    direct: DirectEngine, model_dir: Path
) -> None:
    text = "Count the orders of every supplier in June. " * 12
    chat = {"messages": [{"role": "user", "content": text}]}
    requested: list[tuple[str, dict[str, Any], bool]] = [
        (COMPLETIONS, {"prompt": [text]}, True),
        (COMPLETIONS, {"prompt": text, "echo": True}, True),
        (COMPLETIONS, {"prompt": text, "echo": True, "logprobs": 0}, False),
        (COMPLETIONS, {"prompt": text, "prompt_logprobs": 0}, False),
        (CHAT, chat | {"echo": True}, False),
        (CHAT, chat | {"prompt_logprobs": 1}, False),
        (CHAT, chat | {"add_generation_prompt": "no", "add_special_tokens": 0}, True),
    ]
    async with routed(direct, model_dir) as (client, _parts):
        for path, body, is_looked_for in requested:
            for _ in range(2):
                answer = await client.post(path, json={"model": "sql/v1", "max_tokens": 1, **body})
                assert answer.status_code == 200, answer.text
            usage = usage_of(ROUTES["POST", path].usage, answer.content)
            assert usage is not None
            assert int(answer.headers["x-lorafleet-cached-tokens"]) == usage.cached_tokens, body
            assert bool(usage.cached_tokens) == is_looked_for, body


@pytest.mark.thorough  # it would import vLLM into this process, which takes longer than the tests
@pytest.mark.filterwarnings("ignore")
def test_special_tokens_are_added_to_the_same_prompts_as_in_vllm(tokenizer: ChatTokenizer) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    for kind, model, body in (
        ("chat", ChatCompletionRequest, {"messages": [USER]}),
        ("chat", ChatCompletionRequest, {"messages": [USER], "add_special_tokens": True}),
        ("completion", CompletionRequest, {"prompt": "x"}),
        ("completion", CompletionRequest, {"prompt": "x", "add_special_tokens": False}),
        ("responses", ResponsesRequest, {"input": "x"}),
    ):
        theirs = model.model_validate(body).build_tok_params(SimpleNamespace(max_model_len=2048))
        chat = prompt_body(kind, body, tokenizer)
        assert chat is not None
        assert tokenizer.prompt_text(chat)[1] == theirs.add_special_tokens, body


@pytest.mark.parametrize(
    ("given", "before"),
    [
        ("application/json", b""),
        ("application/json", b"\xef\xbb\xbf"),
        ("Application/JSON; charset=utf-8", b""),
        ("text/plain", b""),
        ("application/x-www-form-urlencoded", b""),
        (None, b""),
    ],
)
async def test_router_judges_content_types_like_the_engine(
    direct: DirectEngine, model_dir: Path, given: str | None, before: bytes
) -> None:
    headers = {} if given is None else {"content-type": given}
    async with routed(direct, model_dir) as (client, _parts):
        for route in ROWS:
            raw = before + json.dumps(example(route.path) | {"model": BASE}).encode()
            alone = direct.client.post(route.path, content=raw, headers=headers)
            behind = await client.post(route.path, content=raw, headers=headers)
            assert behind.status_code == alone.status_code, (route.path, behind.text, alone.text)


# The engine may have finished before it is polled.
TRIES = 6


async def test_unsupported_task_is_the_engines_answer_and_opens_no_circuit(
    direct: DirectEngine, model_dir: Path
) -> None:
    async with routed(direct, model_dir) as (client, parts):
        for path in NOT_SERVED:
            answer = await client.post(path, json=example(path) | {"model": BASE})
            assert answer.status_code in {400, 404, 501}, answer.text
        assert not len(parts.scheduler.breaker)


async def test_unsupported_schema_is_the_clients_error_if_the_engine_says_so(
    direct: DirectEngine, model_dir: Path
) -> None:
    schema = {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}
    body = {"model": BASE, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "output_config": schema}
    async with routed(direct, model_dir) as (client, parts):
        for more in ({}, {"stream": True}):
            answer = await client.post("/v1/messages", json=body | more)
            assert answer.status_code == 400, answer.text
        assert not len(parts.scheduler.breaker)


async def test_engine_that_answers_bad_requests_with_500_counts_as_healthy(
    direct: DirectEngine, model_dir: Path
) -> None:
    wrong = {"model": BASE, "prompt": "hello", "max_tokens": 4, "structured_outputs": True}
    async with routed(direct, model_dir, breaker_failures=2) as (client, parts):
        for _ in range(TRIES):
            answer = await client.post("/v1/completions", json=wrong)
            assert answer.status_code == 500, "no longer an error of the engine's own"
        await until(lambda: parts.metrics.circuit_looks.labels("well").value)
        assert has_only_closed_circuits(parts)


async def test_anthropic_client_streams_counts_and_raises_its_own_errors(direct: DirectEngine, model_dir: Path) -> None:
    from anthropic import AsyncAnthropic, BadRequestError, NotFoundError  # a second to import

    ask: dict[str, Any] = {"max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    ask["extra_body"] = {"temperature": 0}
    async with routed(direct, model_dir) as (http, _parts):
        client = AsyncAnthropic(base_url=str(http.base_url), api_key="any", max_retries=0)
        whole = await client.messages.create(model=LORA_ID, **ask)
        async with client.messages.stream(model=LORA_ID, **ask) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            last = await stream.get_final_message()
        assert (last.model, last.usage.output_tokens, last.stop_reason) == (LORA_ID, 8, "max_tokens")
        assert text == last.content[0].text == whole.content[0].text
        counted = await client.messages.count_tokens(model=BASE, messages=ask["messages"])
        assert counted.input_tokens == whole.usage.input_tokens == last.usage.input_tokens
        with pytest.raises(NotFoundError, match="does not exist"):
            await client.messages.create(model="nope", **ask)
        with pytest.raises(BadRequestError):
            await client.messages.create(model=LORA_ID, **{**ask, "max_tokens": -1})
        await client.close()


async def test_response_broken_off_before_its_start_opens_no_circuit(direct: DirectEngine, model_dir: Path) -> None:
    ask = {"model": BASE, "input": "hello", "max_output_tokens": 4, "truncation": None}
    async with routed(direct, model_dir, breaker_failures=2) as (client, parts):
        assert (await client.post(RESPONSES, json=ask)).status_code == 400
        answer = await client.post(RESPONSES, json=ask | {"stream": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        retries = [sample for metric in parts.metrics.retries.collect() for sample in metric.samples]
        assert {sample.labels["reason"] for sample in retries} == {"begun_only"}
        assert has_only_closed_circuits(parts)


async def test_response_can_be_continued_by_its_creator(direct: DirectEngine, model_dir: Path) -> None:
    ask = {"model": "sql/v1", "input": "hello", "max_output_tokens": 4, "temperature": 0}
    async with routed(direct, model_dir) as (client, _parts), routed(direct, model_dir) as (other, _):
        made = (await client.post(RESPONSES, json=ask)).json()
        kept = await other.get(f"{RESPONSES}/{made['id']}")
        assert (kept.status_code, kept.json()) == (200, made), "any router knows where it is"
        more = await other.post(RESPONSES, json={**ask, "previous_response_id": made["id"]})
        assert (more.status_code, more.json()["previous_response_id"]) == (200, made["id"])
        assert more.json()["usage"]["input_tokens"] > made["usage"]["input_tokens"]
        over = await client.post(f"{RESPONSES}/{made['id']}/cancel")
        assert (over.status_code, over.json()["error"]["param"]) == (400, "response_id")
        background = {**ask, "max_output_tokens": 1500, "ignore_eos": True, "background": True}
        for _ in range(TRIES):
            queued = (await client.post(RESPONSES, json=background)).json()
            cancelled = await other.post(f"{RESPONSES}/{queued['id']}/cancel")
            if cancelled.status_code == 200:
                break
            # The answer was already complete, see `is_at_work`.
            assert cancelled.json()["error"]["param"] == "response_id", cancelled.text
        assert (cancelled.status_code, cancelled.json().get("status")) == (200, "cancelled")
        foreign = tagged_response_id(None, "f00", tenant="another", worker="w0")
        gone = tagged_response_id(None, "f00", tenant=None, worker="w9")
        for name, why in ((foreign, "not found"), (gone, "'w9', which is gone"), ("resp_1", "not found")):
            for answer in (
                await client.get(f"{RESPONSES}/{name}"),
                await client.post(RESPONSES, json={**ask, "previous_response_id": name}),
            ):
                assert answer.status_code == 404
                assert why in answer.json()["error"]["message"]


async def test_background_response_counts_as_in_flight_until_its_engine_finishes_it(
    direct: DirectEngine, model_dir: Path
) -> None:
    control = control_of(direct, figures=Load(running=1))

    def output_tokens() -> int:
        return sum(counts.output_tokens for counts in counted(control, parts).values())

    async with routed(direct, model_dir, control=control) as (client, parts):
        ask = {"model": "sql/v1", "input": "hello", "max_output_tokens": 100, "ignore_eos": True, "background": True}
        for more in ({}, {"stream": True}):
            async with client.stream("POST", RESPONSES, json=ask | more) as answer:
                assert answer.status_code == 200
                pieces = answer.aiter_bytes()
                await anext(pieces)
            before = output_tokens()
            await until(lambda: len(parts.background) == 1)
            assert [name for _, name, _ in parts.scheduler.load.counts_by_name()] == [ENGINE_NAME]
            await until(lambda: not len(parts.background), within_s=60)
            assert not list(parts.scheduler.load.counts_by_name())
            assert output_tokens() == before + 100


async def test_completion_with_an_adapter_for_each_prompt_answers_each_as_alone(
    direct: DirectEngine, model_dir: Path
) -> None:
    adapters, shared = ["sql/v1", None], {"max_tokens": 4, "temperature": 0, "model": BASE}
    async with routed(direct, model_dir) as (client, _parts):
        ask = shared | {"prompt": ["hello", "hello"], "lora_path": adapters}
        whole = (await client.post(COMPLETIONS, json=ask)).json()
        alone = [
            (await client.post(COMPLETIONS, json=shared | {"prompt": "hello", "lora_id": adapter})).json()
            for adapter in adapters
        ]
    texts = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(texts))
    assert texts[0] != texts[1]
    assert whole["model"] == BASE
    assert whole["usage"]["total_tokens"] == sum(answer["usage"]["total_tokens"] for answer in alone)


async def test_batch_of_generate_mixes_adapters_and_the_base_model(direct: DirectEngine, model_dir: Path) -> None:
    params = {"max_new_tokens": 4, "temperature": 0}
    ask = {"text": ["hello", "hello"], "lora_path": ["sql/v1", None], "sampling_params": params, "rid": "me"}
    async with routed(direct, model_dir) as (client, _parts):
        answer = await client.post("/generate", json=ask)
        assert answer.json() == generate_batch_answer(direct, **ask)
        one = {"text": "hello", "lora_path": "sql/v1", "sampling_params": params, "rid": "me"}
        assert (await client.post("/generate", json=one)).json() == generate_batch_answer(direct, **one)
        streamed = await client.post("/generate", json={**one, "stream": True})
        assert streamed.content == generate_batch_answer(direct, **one, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        failed = await client.post("/generate", json=ask | {"lora_path": ["sql/v1", "nobody/v1"]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (404, "model_not_found")
        refused = await client.post("/generate", json=ask | {"sampling_params": {"temperature": -1}})
        assert (refused.status_code, "temperature" in refused.text) == (400, True)


# --- clients that leave

LONG = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
LONG_ASKS: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"model": "sql/v1", "messages": [USER], **LONG}, 1),
    (COMPLETIONS, {"model": BASE, "prompt": ["one", "two"], **LONG}, 2),
    (RESPONSES, {"model": BASE, "input": "hello", "max_output_tokens": 1500, "ignore_eos": True, "temperature": 0}, 1),
    (
        "/generate",
        {"text": ["one", "two", "three"], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}},
        3,
    ),
]


def requests_at_work(direct: DirectEngine) -> int:
    """Requests that run or wait in the engine, by its metrics."""
    metrics = direct.client.get("/metrics").text
    shown = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert len(shown) == 2
    return sum(int(float(count)) for count in shown)


async def wait_for_requests_at_work(direct: DirectEngine, count: int, *, within_s: float = 20.0) -> None:
    """Wait until the engine has `count` requests; polls in a thread, so that the router goes on."""
    async with within(within_s):
        while await asyncio.to_thread(requests_at_work, direct) != count:
            await asyncio.sleep(0.02)


async def is_at_work(direct: DirectEngine, count: int) -> bool:
    """Whether the engine soon has `count` requests. On a busy machine vLLM's API server may answer nothing,
    neither metrics nor first events, until the whole answer is done, even without a router.
    """
    try:
        await wait_for_requests_at_work(direct, count, within_s=5)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(("path", "body", "count"), LONG_ASKS, ids=[path for path, _, _ in LONG_ASKS])
async def test_disconnecting_client_ends_the_engines_work(
    direct: DirectEngine, model_dir: Path, path: str, body: dict[str, Any], count: int
) -> None:
    async with routed(direct, model_dir) as (client, parts):
        for _ in range(TRIES):
            whole = asyncio.create_task(client.post(path, json=body))
            if await is_at_work(direct, count):
                break
            await whole
        else:
            pytest.fail(f"never {count} at work")
        whole.cancel()
        await wait_for_requests_at_work(direct, 0)
        late = await client.post(path, json=body, headers={"x-lorafleet-timeout-s": "0.5"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        await wait_for_requests_at_work(direct, 0)
        if path != "/generate":
            for _ in range(TRIES):
                async with client.stream("POST", path, json=body | {"stream": True}) as answer:
                    assert answer.status_code == 200
                    pieces = answer.aiter_bytes()  # keep a reference: a dropped iterator closes the stream
                    await anext(pieces)
                    if await is_at_work(direct, count):
                        break
            else:
                pytest.fail(f"never {count} at work")
            await wait_for_requests_at_work(direct, 0)
        assert not list(parts.scheduler.load.counts_by_name())
