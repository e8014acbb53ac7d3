"""What trainers send and read, on the sim and on real vLLM: through the router as from the engine, and KV matches."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from router.protocols.routes import ROUTES
from router.protocols.usage import usage_of, usage_of_events
from tests.contract.surface import (
    ENGINE_NAME,
    LORA_ID,
    NAMES,
    STREAM_ATTEMPTS,
    DirectEngine,
    assert_same_through_a_router,
    comparable_answer,
    engine_with_adapter,
    routed,
)
from tests.engines import Kind, RunningEngine, start_engine
from tests.router.doubles import BASE, DIGEST

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
TRAINERS_NAME = "m:eval@3"
IDS = [300 + number % 97 for number in range(130)]
USER = {"role": "user", "content": "Which customers ordered twice?"}
TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
GREEDY = {"temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module", params=["sim", pytest.param("vllm", marks=pytest.mark.vllm)])
def direct(
    request: pytest.FixtureRequest, engine_of: Callable[[Kind], RunningEngine], adapters: dict[str, Path]
) -> Iterator[DirectEngine]:
    with engine_with_adapter(engine_of(request.param), adapters["sql"]) as direct:
        name = f"{TRAINERS_NAME}@{DIGEST[:12]}"
        loaded = direct.client.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapters["sql"])}
        )
        assert loaded.status_code == 200, loaded.text
        yield direct
        direct.client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(direct: DirectEngine, model_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncExitStack() as stack:
        behind, _parts = await stack.enter_async_context(routed(direct, model_dir, also=[TRAINERS_NAME]))
        yield behind


def is_vllm(direct: DirectEngine) -> bool:
    return direct.engine.kind == "vllm"


_OWN = re.compile(rb'"(?:id|request_id)":"[^"]*"|"created":\d+')


def masked(body: bytes) -> bytes:
    """An answer's bytes without its id and time."""
    return _OWN.sub(b"", body)


COMPLETION_BODIES: list[tuple[dict[str, Any], bool]] = [
    ({"prompt": IDS, **GREEDY, **TOKENS, "logprobs": 0}, True),
    ({"prompt": IDS, **GREEDY, **TOKENS, "logprobs": 3, "seed": 7}, True),
    ({"prompt": [IDS, IDS[:70]], **GREEDY, **TOKENS, "logprobs": 1}, True),
    ({"prompt": [IDS], "temperature": 1, "seed": 7, "max_tokens": 5, **TOKENS}, True),
    ({"prompt": IDS, **GREEDY, "return_token_ids": True, "logprobs": 0}, True),  # TRL's: tokens named by their text
    ({"prompt": IDS, **GREEDY, **TOKENS, "prompt_logprobs": 1, "logprobs": 1}, False),
    ({"prompt": [IDS, IDS[:70]], **GREEDY, "prompt_logprobs": 0, "return_token_ids": True}, False),
    ({"prompt": "SELECT name", **GREEDY, "logprobs": 2, "return_token_ids": True}, False),
]
GENERATE_BODIES: list[tuple[dict[str, Any], bool]] = [
    ({"token_ids": IDS, "sampling_params": GREEDY}, True),
    ({"token_ids": IDS, "sampling_params": {**GREEDY, "logprobs": 1, "output_kind": 2}, "cache_salt": "5"}, True),
    ({"token_ids": IDS, "sampling_params": {**GREEDY, "logprobs": 0}, "return_token_ids": True, "priority": 0}, True),
    ({"token_ids": IDS, "sampling_params": {**GREEDY, "extra_args": {"session_id": "x"}}}, True),
    ({"token_ids": IDS, "sampling_params": {**GREEDY, "prompt_logprobs": 1}}, False),
    ({"token_ids": IDS, "sampling_params": {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 4}}, False),
    ({"token_ids": IDS, "sampling_params": {**GREEDY, "logprobs": 1}, "output_mode": "text"}, False),
]


@pytest.mark.parametrize(
    ("path", "body", "on_sim"),
    [(COMPLETIONS, *row) for row in COMPLETION_BODIES] + [(GENERATE, *row) for row in GENERATE_BODIES],
)
async def test_token_ids_and_logprobs_are_byte_for_byte_the_engines(
    direct: DirectEngine, client: httpx.AsyncClient, path: str, body: dict[str, Any], on_sim: bool
) -> None:
    if not (on_sim or is_vllm(direct)):
        pytest.skip("the sim engine does not compute it")
    for requested, engine_name in NAMES.items():
        for _ in range(2):  # the second one has the cache that the router's request finds, too
            alone = direct.client.post(path, json=body | {"model": engine_name})
        behind = await client.post(path, json=body | {"model": requested})
        assert behind.status_code == alone.status_code == 200, alone.text
        expected = alone.content.replace(json.dumps(engine_name).encode(), json.dumps(requested).encode())
        assert masked(behind.content) == masked(expected)
        if path == GENERATE and requested != BASE:
            chosen = await client.post(path, json=body | {"lora_id": requested, "model": BASE})
            assert masked(chosen.content) == masked(expected).replace(
                f'"model":"{requested}"'.encode(), f'"model":"{BASE}"'.encode()
            )
    # vLLM refuses the prompt's log-probabilities in streams; its error is the same, too.
    await assert_same_through_a_router(direct, client, path, body | {"stream": True}, "stream", within=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER], **GREEDY, **TOKENS, "logprobs": True, "top_logprobs": 2},
        {"messages": [USER], "temperature": 1, "seed": 5, "max_tokens": 4, **TOKENS, "prompt_logprobs": 1},
    ],
)
async def test_chats_with_logprobs_are_the_engines(
    direct: DirectEngine, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    await assert_same_through_a_router(direct, client, CHAT, body, "whole")
    await assert_same_through_a_router(direct, client, CHAT, body | {"stream": True}, "stream")  # the sim refuses


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("salt", [None, "step-5"])
@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_predicted_cached_tokens_of_given_ids_are_the_engines(
    client: httpx.AsyncClient, path: str, salt: str | None, streamed: bool
) -> None:
    ids = [[900, 1100][path == GENERATE] + 7 * bool(salt) + 3 * streamed, *IDS]
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 1}
    if path == GENERATE:
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1}}
    body |= {"cache_salt": salt} if salt else {}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    predicted, actual = [], []
    for _ in range(2):
        answer = await client.post(path, json=body | {"model": LORA_ID}, headers={"x-session-id": "run-1"})
        assert answer.status_code == 200, answer.text
        usage = (usage_of_events if streamed else usage_of)(ROUTES["POST", path].usage, answer.content)
        assert usage is not None
        assert answer.headers["x-lorafleet-adapter"] == ENGINE_NAME
        predicted.append(int(answer.headers["x-lorafleet-cached-tokens"]))
        actual.append(usage.cached_tokens or 0)
    assert predicted == actual
    assert actual[0] == 0
    assert actual[1] >= 96
    other = await client.post(path, json=body | {"model": LORA_ID, "cache_salt": "another"})
    assert int(other.headers["x-lorafleet-cached-tokens"]) == 0


_CHOICE = "index,finish_reason,stop_reason,token_ids,routed_experts,sampling_mask,weight_versions,logprobs"
_WHOLE = (
    "request_id,model,created,usage,prompt_logprobs,prompt_token_id_logprobs,prompt_token_ids,mm_placeholders,metrics,"
    "kv_transfer_params,ec_transfer_params,output_mode,choices"
)


def keys(found: dict[str, Any]) -> str:
    return ",".join(found)


@pytest.mark.parametrize("by_id", [False, True], ids=["by text", "by id"])
async def test_logprobs_of_completions_and_chats_have_vllms_form(direct: DirectEngine, by_id: bool) -> None:
    asked = {"model": ENGINE_NAME, **GREEDY, "return_token_ids": True, "return_tokens_as_token_ids": by_id}
    (completion,) = direct.client.post(COMPLETIONS, json=asked | {"prompt": IDS, "logprobs": 0}).json()["choices"]
    found = completion["logprobs"]
    assert keys(found) == "text_offset,token_logprobs,tokens,top_logprobs"
    assert all(value < 0 for value in found["token_logprobs"])
    assert [[*row] for row in found["top_logprobs"]] == [[name] for name in found["tokens"]]
    (chat,) = direct.client.post(CHAT, json=asked | {"messages": [USER], "logprobs": True}).json()["choices"]
    rows = chat["logprobs"]["content"]
    assert {keys(row) for row in rows} == {"token,logprob,bytes,top_logprobs"}
    assert all(row["logprob"] < 0 for row in rows)
    assert {len(row["top_logprobs"]) for row in rows} == {0}
    for choice, names in ((completion, found["tokens"]), (chat, [row["token"] for row in rows])):
        ids = [f"token_id:{token}" for token in choice["token_ids"]]
        assert (names == ids) is by_id
        if not by_id:
            assert "".join(names) == (choice["text"] if choice is completion else choice["message"]["content"])
    if not by_id:  # else the bytes are those of the text, which the row does not have
        assert all(row["bytes"] == [*row["token"].encode()] for row in rows)


async def test_answers_in_token_ids_have_vllms_keys_in_its_order(direct: DirectEngine) -> None:
    body = {"token_ids": IDS, "sampling_params": {**GREEDY, "logprobs": 2}, "model": ENGINE_NAME}
    whole = direct.client.post(GENERATE, json=body).json()
    (choice,) = whole["choices"]
    (first, *_) = choice["logprobs"]["content"]
    assert (keys(whole), keys(choice)) == (_WHOLE, _CHOICE)
    assert keys(first) == "token_id,logprob,rank,top_logprobs"
    assert keys(first["top_logprobs"][0]) == "token_id,logprob,rank"
    streamed = direct.client.post(GENERATE, json=body | {"stream": True, "return_token_ids": True}).text
    events = [json.loads(part.removeprefix("data: ")) for part in streamed.split("\n\n") if part.endswith("}")]
    assert events[0]["prompt_token_ids"] == IDS
    assert keys(events[0]) == "request_id,usage,prompt_token_ids,output_mode,choices"
    assert {keys(event["choices"][0]) for event in events} == {_CHOICE}
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice["token_ids"]


async def test_prompts_logprobs_predict_no_hit_on_generate(direct: DirectEngine, client: httpx.AsyncClient) -> None:
    sampled = {"prompt_logprobs": 0} if is_vllm(direct) else {"skip_reading_prefix_cache": True}
    body = {"token_ids": [1200, *IDS], "sampling_params": {"max_tokens": 1, **sampled}, "model": LORA_ID}
    for _ in range(2):
        answer = await client.post(GENERATE, json=body)
        assert answer.status_code == 200, answer.text
        assert int(answer.headers["x-lorafleet-cached-tokens"]) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}}}}, "kv_transfer_params"),
        ({"sampling_params": {"extra_args": {"kv_cache_report_mode": "full"}}}, "kv_cache_report_mode"),
        ({"sampling_params": {"lora_request": "x"}}, "sampling_params.lora_request"),
        ({"lora_name": "x"}, "lora_name"),
    ],
)
async def test_what_steers_an_engine_is_refused_within_sampling_parameters(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    answer = await client.post(GENERATE, json={"token_ids": IDS, "sampling_params": {}, "model": LORA_ID} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].endswith(param)


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": []},
        {"token_ids": [1], "sampling_params": {"max_tokens": -1}},
        {"token_ids": [1], "sampling_params": 3},
        {"token_ids": [99_999_999]},
        {"token_ids": "text"},
        {},
    ],
)
async def test_an_engines_error_of_generate_passes_unchanged(
    direct: DirectEngine, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    asked = {"sampling_params": {"max_tokens": 1}} | body
    alone = direct.client.post(GENERATE, json=asked | {"model": ENGINE_NAME})
    behind = await client.post(GENERATE, json=asked | {"model": LORA_ID})
    assert (behind.status_code, behind.content) == (alone.status_code, alone.content)
    assert behind.status_code == 400


# --- SGLang's form


@pytest.mark.parametrize("top", [0, 2])
async def test_generate_of_sglang_has_the_engines_ids_and_logprobs(
    direct: DirectEngine, client: httpx.AsyncClient, top: int
) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0, "stop_token_ids": [], "frequency_penalty": 0}
    asked = {"input_ids": IDS, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": top}
    asked |= {"image_data": None, "stream": False, "rid": "mine"}
    for lora_id, engine_name in ((LORA_ID, ENGINE_NAME), (None, BASE)):
        answer = await client.post("/generate", json=asked | {"lora_path": lora_id})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        body = {"prompt": IDS, **GREEDY, **TOKENS, "logprobs": top, "model": engine_name}
        (choice,) = direct.client.post(COMPLETIONS, json=body).json()["choices"]
        meta = found["meta_info"]
        assert (found["text"], found["output_ids"]) == (choice["text"], choice["token_ids"])
        values = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
        assert meta["output_token_logprobs"] == [[value, token, None] for value, token in values]
        assert meta["finish_reason"] == {"type": "length", "length": 5}
        assert (meta["id"], meta["weight_version"]) == ("mine", engine_name)
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(IDS), 5)
        if top:
            for place, likeliest in zip(choice["logprobs"]["top_logprobs"], meta["output_top_logprobs"], strict=True):
                assert {f"token_id:{token}": value for value, token, _ in likeliest}.items() <= place.items()
                assert len(likeliest) == top


@pytest.mark.vllm
async def test_logprobs_of_sglangs_form_reach_the_prompt_the_texts_and_streams(
    direct: DirectEngine, client: httpx.AsyncClient
) -> None:
    if not is_vllm(direct):
        pytest.skip("the sim engine does not compute it")
    asked = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "lora_path": LORA_ID}
    asked |= {"return_logprob": True}
    whole = (await client.post("/generate", json=asked | {"logprob_start_len": 100, "top_logprobs_num": 2})).json()
    meta = whole["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == IDS[100:]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(value < 0 for value, _, _ in meta["input_token_logprobs"][1:])
    assert [len(place or ()) for place in meta["input_top_logprobs"]] == [0, *[2] * (len(IDS) - 101)]
    named = (await client.post("/generate", json=asked | {"return_text_in_logprobs": True})).json()
    texts = [text for _, _, text in named["meta_info"]["output_token_logprobs"]]
    assert "".join(texts) == named["text"] == whole["text"]
    streamed = await client.post("/generate", json=asked | {"stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    last = json.loads(events[-2])
    assert last["meta_info"]["output_token_logprobs"] == named["meta_info"]["output_token_logprobs"] or [
        row[:2] for row in last["meta_info"]["output_token_logprobs"]
    ] == [row[:2] for row in named["meta_info"]["output_token_logprobs"]]
    refused = await client.post("/generate", json=asked | {"logprob_start_len": 0, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_start_len")
    both = await client.post("/generate", json=asked | {"top_logprobs_num": 1, "return_text_in_logprobs": True})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "return_text_in_logprobs")


# --- names, and which weights answered


@pytest.mark.parametrize("form", ["{}", f"{BASE}:{{}}", f"{{}}@{DIGEST[:12]}", f"{BASE}:{{}}@{DIGEST[:12]}"])
async def test_a_trainers_name_answers_on_every_route_by_its_digest_too(client: httpx.AsyncClient, form: str) -> None:
    model = form.format(TRAINERS_NAME)
    for path, body in (
        (CHAT, {"messages": [USER], "max_tokens": 2}),
        (COMPLETIONS, {"prompt": IDS, "max_tokens": 2}),
        (GENERATE, {"token_ids": IDS, "sampling_params": {"max_tokens": 2}}),
    ):
        answer = await client.post(path, json=body | {"model": model})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        assert answer.headers["x-lorafleet-adapter"] == f"{TRAINERS_NAME}@{DIGEST[:12]}"
        streamed = await client.post(path, json=body | {"model": model, "stream": True})
        assert f"{TRAINERS_NAME}@{DIGEST[:12]}" not in streamed.text.replace(model, "")
    unknown = await client.post(COMPLETIONS, json={"prompt": IDS, "model": f"{TRAINERS_NAME}@{'0' * 12}"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert f"{TRAINERS_NAME}@{DIGEST[:12]} now" in unknown.json()["error"]["message"]
    card = await client.get(f"/v1/models/{TRAINERS_NAME.replace(':', '%3A').replace('@', '%40')}")
    assert card.json()["id"] == TRAINERS_NAME


@pytest.mark.parametrize("model", [LORA_ID, BASE])
@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
async def test_the_weights_are_the_fingerprint_where_a_client_asks(
    direct: DirectEngine, client: httpx.AsyncClient, model: str, usage: dict[str, Any] | None
) -> None:
    weights = ENGINE_NAME if model == LORA_ID else BASE
    asks = {"x-lorafleet-fingerprint": "adapter"}
    for path, body in (
        (CHAT, {"messages": [USER], **GREEDY}),
        # vLLM's stream has the cached tokens of whichever prompt answers first: both have as many.
        (COMPLETIONS, {"prompt": [IDS, IDS[::-1]], **GREEDY}),
    ):
        body |= {"model": model}
        plain = (await client.post(path, json=body)).json()
        signed = (await client.post(path, json=body, headers=asks)).json()
        assert plain["system_fingerprint"] != weights
        assert signed["system_fingerprint"] == weights
        own = {"id": None, "created": None, "system_fingerprint": None, "usage": None}
        assert signed | own == plain | own
        stream = body | {"stream": True} | ({"stream_options": usage} if usage else {})
        for _ in range(STREAM_ATTEMPTS):
            events = (await client.post(path, json=stream, headers=asks)).text
            texts = [part.removeprefix("data: ") for part in events.split("\n\n") if part]
            assert texts[-1] == "[DONE]"
            assert {json.loads(text)["system_fingerprint"] for text in texts[:-1]} == {weights}
            assert all(text.count("system_fingerprint") == 1 for text in texts[:-1])
            both = (events, (await client.post(path, json=stream)).text)
            unsigned, alone = (comparable_answer(re.sub(r',?"system_fingerprint":"[^"]*"', "", text)) for text in both)
            if unsigned == alone:
                break
        assert unsigned == alone
    after = await asyncio.to_thread(direct.post, CHAT, {"messages": [USER], **GREEDY, "stream": True}, ask_usage=True)
    assert ENGINE_NAME not in after.text


async def test_a_list_of_adapters_names_the_weights_of_each_choice(client: httpx.AsyncClient) -> None:
    body = {"prompt": [IDS, IDS, IDS], "lora_id": [LORA_ID, None, LORA_ID], "model": BASE, **GREEDY}
    answer = (await client.post(COMPLETIONS, json=body, headers={"x-lorafleet-fingerprint": "adapter"})).json()
    assert [choice["system_fingerprint"] for choice in answer["choices"]] == [ENGINE_NAME, BASE, ENGINE_NAME]
    assert answer["system_fingerprint"] == f"{ENGINE_NAME},{BASE}"
    assert "system_fingerprint" not in (await client.post(COMPLETIONS, json=body)).json()["choices"][0]


async def test_a_setting_asks_for_the_weights_and_a_header_for_the_engines_own(
    direct: DirectEngine, model_dir: Path
) -> None:
    body = {"prompt": IDS, "model": LORA_ID, "max_tokens": 1}
    async with routed(direct, model_dir, fingerprint="adapter") as (client, _parts):
        assert (await client.post(COMPLETIONS, json=body)).json()["system_fingerprint"] == ENGINE_NAME
        own = await client.post(COMPLETIONS, json=body, headers={"x-lorafleet-fingerprint": "engine"})
        assert own.json()["system_fingerprint"] != ENGINE_NAME
        wrong = await client.post(COMPLETIONS, json=body, headers={"x-lorafleet-fingerprint": "both"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-lorafleet-fingerprint")


async def test_hints_for_another_gateway_are_dropped_and_counted_and_its_orders_refused(
    direct: DirectEngine, model_dir: Path
) -> None:
    body = {"messages": [USER], "model": LORA_ID, **GREEDY, **TOKENS}
    async with routed(direct, model_dir) as (client, _parts):
        plain = await client.post(CHAT, json=body)
        hinted = await client.post(CHAT, json=body | {"nvext": {"extra_fields": ["engine_data"]}})
        assert hinted.status_code == 200
        own = {"id": None, "created": None, "usage": None}
        assert hinted.json() | own == plain.json() | own
        page = (await client.get("/metrics")).text
        assert 'lorafleet_router_dropped_fields_total{field="nvext"} 1.0' in page
        for order in ({"backend_instance_id": 3}, {"extra_fields": [], "greed_sampling": True}, "x"):
            refused = await client.post(CHAT, json=body | {"nvext": order})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "nvext")


async def test_an_engine_without_the_route_says_which_flag_it_lacks(
    direct: DirectEngine, adapters: dict[str, Path], model_dir: Path
) -> None:

    if is_vllm(direct):
        pytest.skip("the sim has vLLM's words")
    engine = await asyncio.to_thread(start_engine, "sim", model_dir)
    try:
        with engine_with_adapter(engine, adapters["sql"]) as without:
            async with routed(without, model_dir) as (client, parts):
                body = {"token_ids": IDS, "sampling_params": {}, "model": LORA_ID}
                answer = await client.post(GENERATE, json=body)
                assert (answer.status_code, "--enable-scale-out" in answer.text) == (403, True)
                assert (
                    not parts.scheduler.breaker.open_count if hasattr(parts.scheduler.breaker, "open_count") else True
                )
    finally:
        await asyncio.to_thread(engine.stop)
