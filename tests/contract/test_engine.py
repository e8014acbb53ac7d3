"""The behaviour that the sim must share with vLLM 0.32.0."""

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lorafleet.tokenizer.chat import ChatTokenizer
from tests.bodies import assert_same_tokens_as_engine
from tests.contract import golden
from tests.contract.conftest import EVENT_WITHIN_MS, EngineUnderTest
from tests.contract.golden import fits

HELLO = [{"role": "user", "content": "hello world"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream; fails if its framing differs from vLLM's."""
    assert text.endswith("data: [DONE]\n\n")
    parts = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: {") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def envelope(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# --- routes


def test_models_lists_the_base_model_then_adapters_with_path_and_parent(bench: EngineUnderTest) -> None:
    bench.load("listed", bench.adapters["sql"])
    answer = bench.client.get("/v1/models").json()
    bench.unload("listed")
    base, adapter = answer["data"]
    card = {"id": "str", "object": "model", "created": "int", "owned_by": "vllm", "root": "str", "parent": "str"}
    card |= {"max_model_len": None, "permission": [golden.PERMISSION]}
    assert list(answer) == ["object", "data"]
    assert fits(adapter, card) is None
    assert fits(base, card | {"parent": None, "max_model_len": 2048}) is None
    assert (base["id"], base["parent"]) == ("tiny-qwen", None)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("listed", str(bench.adapters["sql"]), "tiny-qwen")


def test_health_version_and_event_sources_answer(bench: EngineUnderTest) -> None:
    assert (bench.client.get("/health").status_code, bench.client.get("/health").content) == (200, b"")
    assert (bench.client.get("/ping").status_code, bench.client.post("/ping").status_code) == (200, 200)
    assert bench.client.get("/version").json() == {"version": "0.32.0"}
    sources = bench.client.get("/kv_event_sources").json()
    assert list(sources) == ["0"]
    assert sources["0"] == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": bench.engine.kv_endpoint,
        "replay_endpoint": bench.engine.replay_endpoint,
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv",
    }


def test_unknown_route_is_404_and_wrong_method_is_405(bench: EngineUnderTest) -> None:
    for answer, status, detail in (
        (bench.client.get("/nope"), 404, "Not Found"),
        (bench.client.get(CHAT), 405, "Method Not Allowed"),
        (bench.client.post("/v1/models"), 405, "Method Not Allowed"),
    ):
        assert (answer.status_code, answer.json()) == (status, {"detail": detail})
    assert bench.client.head("/v1/models").status_code == 405


def test_metrics_contain_all_series_that_routers_and_agents_read(bench: EngineUnderTest) -> None:
    bench.complete(bench.tokens(2), max_tokens=3)
    answer = bench.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    lines = answer.text.splitlines()
    assert [name for name in golden.METRICS if not any(line.startswith(name) for line in lines)] == []
    info = next(line for line in lines if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="32"' in info
    assert 'num_gpu_blocks="256"' in info


# --- text


def test_chat_answer_has_vllms_keys_in_its_order(bench: EngineUnderTest) -> None:
    answer = bench.client.post(
        CHAT,
        json={"model": "tiny-qwen", "messages": HELLO, "max_tokens": 4, "temperature": 0, "ignore_eos": True},
        headers={"X-Request-Id": "abc"},
    )
    assert answer.headers["content-type"] == "application/json"
    assert fits(answer.json(), golden.CHAT) is None
    assert (answer.json()["id"], answer.json()["model"]) == ("chatcmpl-abc", "tiny-qwen")
    usage = answer.json()["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (4, usage["prompt_tokens"] + 4)


def test_completion_has_vllms_keys_in_its_order(bench: EngineUnderTest) -> None:
    body = {"model": "tiny-qwen", "prompt": "hello world", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = bench.client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "abc"}).json()
    assert fits(answer, golden.COMPLETION) is None
    assert answer["id"] == "cmpl-abc"


def test_body_without_a_model_is_answered_by_the_base(bench: EngineUnderTest) -> None:
    answer = bench.client.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
    assert answer.json()["model"] == "tiny-qwen"


def test_token_ids_are_returned_on_request(bench: EngineUnderTest) -> None:
    tokenized = bench.client.post("/tokenize", json={"model": "tiny-qwen", "messages": HELLO}).json()["tokens"]
    body = {"messages": HELLO, "max_completion_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    chat = bench.client.post(CHAT, json=body).json()
    assert chat["prompt_token_ids"] == tokenized
    assert len(chat["choices"][0]["token_ids"]) == 3
    completion = bench.complete([[5, 6], [7]], max_tokens=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in completion["choices"]] == [[5, 6], [7]]
    assert [len(choice["token_ids"]) for choice in completion["choices"]] == [2, 2]
    assert (completion["usage"]["prompt_tokens"], completion["usage"]["completion_tokens"]) == (3, 4)


def test_chat_uses_the_prompt_ids_in_its_body(bench: EngineUnderTest) -> None:
    ids = bench.tokens(1, extra=5)
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    chat = bench.client.post(CHAT, json=body | {"kv_transfer_params": {"prompt_token_ids": ids}}).json()
    alone = bench.complete(ids, max_tokens=4, return_token_ids=True)
    assert chat["prompt_token_ids"] == ids
    assert chat["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert (chat["usage"]["prompt_tokens"], chat["kv_transfer_params"]) == (len(ids), None)
    without = bench.client.post(CHAT, json=body).json()["prompt_token_ids"]
    for more in ({"kv_transfer_params": {}}, {"kv_transfer_params": {"prompt_token_ids": ids}, "echo": True}):
        assert bench.client.post(CHAT, json=body | more).json()["prompt_token_ids"] == without
    for odd in ([], "x", [-1], [True], [1.0]):
        refused = bench.client.post(CHAT, json=body | {"kv_transfer_params": {"prompt_token_ids": odd}})
        message = (
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers. "
            "(parameter=kv_transfer_params.prompt_token_ids)"
        )
        expected = envelope(message, "BadRequestError", 400, "kv_transfer_params.prompt_token_ids")
        assert (refused.status_code, refused.json()) == (400, expected)
    unknown = bench.client.post(CHAT, json=body | {"kv_transfer_params": {"prompt_token_ids": [9999]}})
    assert (unknown.status_code, "9999 is out of vocabulary" in unknown.text) == (400, True)


def test_several_prompts_and_choices_are_numbered_in_order(bench: EngineUnderTest) -> None:
    answer = bench.complete(["one", "two"], n=2, temperature=1, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    tokens = bench.client.post("/tokenize", json={"prompt": "one"}).json()["count"]
    tokens += bench.client.post("/tokenize", json={"prompt": "two"}).json()["count"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (tokens, 8)


def test_equal_requests_get_equal_text_and_adapters_get_other_text(bench: EngineUnderTest) -> None:
    bench.load("one", bench.adapters["sql"])
    bench.load("two", bench.adapters["python"])
    prompt = bench.tokens(1)

    def text(model: str) -> str:
        return str(bench.complete(prompt, model=model, max_tokens=8)["choices"][0]["text"])

    assert text("tiny-qwen") == text("tiny-qwen")
    assert len({text("tiny-qwen"), text("one"), text("two")}) == 3
    bench.unload("one")
    bench.unload("two")


def test_streamed_chat_starts_with_the_role_and_ends_with_done(bench: EngineUnderTest) -> None:
    body = {"model": "tiny-qwen", "messages": HELLO, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = bench.client.post(CHAT, json=body | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    first, *middle, last = chunks_of(answer.text)
    assert fits(first, golden.CHAT_CHUNKS[0]) is None
    assert [fits(chunk, golden.CHAT_CHUNKS[1]) for chunk in middle] == [None] * len(middle)
    assert fits(last, golden.CHAT_CHUNKS[2]) is None
    assert len({chunk["id"] for chunk in (first, *middle, last)}) == 1
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in (first, *middle, last))
    whole = bench.client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    assert text == whole


def test_include_usage_adds_one_chunk_without_choices(bench: EngineUnderTest) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "ignore_eos": True, "stream": True}
    answer = bench.client.post(CHAT, json=body | {"stream_options": {"include_usage": True}})
    *_, last, usage = chunks_of(answer.text)
    assert "system_fingerprint" not in last
    assert fits(usage, golden.CHAT_USAGE_CHUNK) is None
    assert usage["usage"]["completion_tokens"] == 3


def test_streamed_completion_has_vllms_chunks(bench: EngineUnderTest) -> None:
    body = {"model": "tiny-qwen", "prompt": "hello world", "max_tokens": 3, "ignore_eos": True, "stream": True}
    *middle, last = chunks_of(bench.client.post(COMPLETIONS, json=body).text)
    assert [fits(chunk, golden.COMPLETION_CHUNK) for chunk in middle] == [None] * len(middle)
    final = golden.COMPLETION_CHUNK | {
        "choices": [{**golden.COMPLETION_CHUNK["choices"][0], "finish_reason": "length"}]
    }
    assert fits(last, final | {"system_fingerprint": "str"}) is None
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *middle, usage = chunks_of(bench.client.post(COMPLETIONS, json=body).text)
    assert [list(chunk["usage"]) for chunk in middle] == [["prompt_tokens", "total_tokens", "completion_tokens"]] * len(
        middle
    )
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_disconnecting_client_ends_the_request(bench: EngineUnderTest) -> None:
    body = {"model": "tiny-qwen", "prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}

    def metric(name: str) -> float:
        found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", bench.client.get("/metrics").text, re.MULTILINE)
        assert found
        return float(found[1])

    def running_becomes(count: int) -> bool:
        # vLLM updates its gauges after sending a step's tokens, so a reader may be ahead of them.
        deadline = time.monotonic() + 5
        while metric("num_requests_running") != count and time.monotonic() < deadline:
            time.sleep(0.02)
        return metric("num_requests_running") == count

    before = metric("generation_tokens_total")
    with bench.client.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()  # keep a reference: a dropped iterator closes the stream
        next(lines)
        assert running_becomes(1)
    assert running_becomes(0)
    assert metric("generation_tokens_total") - before < 1900


# --- refusals

MISSING = (
    "1 validation error:\n  {'type': 'missing', 'loc': 'body.%s', 'msg': 'Field required', 'input': '<dict of %d "
    "items>'}"
)
TOO_LONG = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains %s input tokens, which exceeds "
    "this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=%d)"
)
TOO_MANY_CHARACTERS = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains %d characters (more than 36864 "
    "characters, which is the upper bound for 2048 input tokens). Please reduce the length of the input prompt. "
    "(parameter=input_text, value=%d)"
)
UNKNOWN = "The model `zz` does not exist. Valid aliases: tiny-qwen."
REFUSED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "unknown model": (CHAT, {"model": "zz", "messages": HELLO}, envelope(UNKNOWN, "NotFoundError", 404, "model")),
    "unknown model, streamed": (
        COMPLETIONS,
        {"model": "zz", "prompt": "x", "stream": True},
        envelope(UNKNOWN, "NotFoundError", 404, "model"),
    ),
    "unknown model to tokenize": (
        "/tokenize",
        {"model": "zz", "prompt": "x"},
        envelope(UNKNOWN, "NotFoundError", 404, "model"),
    ),
    "no messages": (
        CHAT,
        {"model": "tiny-qwen"},
        envelope(MISSING % ("messages", 1), "Bad Request", 400, "body.messages"),
    ),
    "empty messages": (
        CHAT,
        {"messages": []},
        envelope(
            "Cannot apply chat template to an empty conversation. Provide at least one message.", "BadRequestError", 400
        ),
    ),
    "two wrong types": (
        CHAT,
        {"messages": "hi", "max_tokens": "x"},
        envelope(
            "2 validation errors:\n  {'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input should be a valid "
            "list', 'input': 'hi'}\n  {'type': 'int_parsing', 'loc': 'body.max_tokens', 'msg': 'Input should be a "
            "valid integer, unable to parse string as an integer', 'input': 'x'}",
            "Bad Request",
            400,
            "body.messages",
        ),
    ),
    "not an object": (
        CHAT,
        [1],
        envelope(
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid "
            "dictionary or object to extract fields from', 'input': '<list of 1 items>'}",
            "Bad Request",
            400,
            "body",
        ),
    ),
    "no choices": (CHAT, {"messages": HELLO, "n": 0}, envelope("n must be at least 1, got 0.", "BadRequestError", 400)),
    "greedy choices": (
        CHAT,
        {"messages": HELLO, "n": 2, "temperature": 0},
        envelope("n must be 1 when using greedy sampling, got 2.", "BadRequestError", 400),
    ),
    "no output": (
        CHAT,
        {"messages": HELLO, "max_tokens": 0},
        envelope(
            "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
            "BadRequestError",
            400,
            "max_tokens",
        ),
    ),
    "too much output": (
        CHAT,
        {"messages": HELLO, "max_tokens": 5000},
        envelope(
            "max_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens. "
            "(parameter=max_tokens, value=5000)",
            "BadRequestError",
            400,
            "max_tokens",
        ),
    ),
    "negative temperature": (
        CHAT,
        {"messages": HELLO, "temperature": -1},
        envelope(
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
            "BadRequestError",
            400,
            "temperature",
        ),
    ),
    "stream options without a stream": (
        CHAT,
        {"messages": HELLO, "stream_options": {"include_usage": True}},
        envelope(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            "BadRequestError",
            400,
            "stream_options",
        ),
    ),
    "empty salt": (
        CHAT,
        {"messages": HELLO, "cache_salt": ""},
        envelope(
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
            "BadRequestError",
            400,
            "cache_salt",
        ),
    ),
    "no prompt": (
        COMPLETIONS,
        {"model": "tiny-qwen"},
        envelope(
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            "BadRequestError",
            400,
            "prompt",
        ),
    ),
    "empty list of prompts": (
        COMPLETIONS,
        {"prompt": []},
        envelope("You must pass at least one prompt", "BadRequestError", 400),
    ),
    "an empty text among others": (
        COMPLETIONS,
        {"prompt": ["hello", ""]},
        envelope("The decoder prompt cannot be empty", "BadRequestError", 400),
    ),
    "an empty list of token ids": (
        COMPLETIONS,
        {"prompt": [[]]},
        envelope("The decoder prompt cannot be empty", "BadRequestError", 400),
    ),
    "token out of vocabulary": (
        COMPLETIONS,
        {"prompt": [999999]},
        envelope("Token id 999999 is out of vocabulary", "BadRequestError", 400),
    ),
    "too many token ids": (
        COMPLETIONS,
        {"prompt": [5] * 2100},
        envelope(TOO_LONG % (2100, 2100), "BadRequestError", 400, "input_tokens"),
    ),
    "too long a text": (
        COMPLETIONS,
        {"prompt": "hello world " * 2000},
        envelope(TOO_LONG % ("at least 2049", 2049), "BadRequestError", 400, "input_tokens"),
    ),
    "too long a chat": (
        CHAT,
        {"messages": [{"role": "user", "content": "hello world " * 2000}]},
        envelope(TOO_LONG % ("at least 2049", 2049), "BadRequestError", 400, "input_tokens"),
    ),
    "a text of more characters than its tokens could have": (
        COMPLETIONS,
        {"prompt": "hello world " * 5000},
        envelope(TOO_MANY_CHARACTERS % (60_000, 60_000), "BadRequestError", 400, "input_text"),
    ),
    "a prompt that leaves no room": (
        COMPLETIONS,
        {"prompt": [5] * 2048},
        envelope(
            "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
            "BadRequestError",
            400,
            "max_tokens",
        ),
    ),
    "nothing to tokenize": (
        "/tokenize",
        {"model": "tiny-qwen"},
        envelope(
            "2 validation errors:\n  {'type': 'missing', 'loc': 'body.prompt', 'msg': 'Field required', 'input': "
            "'<dict of 1 items>'}\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': "
            "'<dict of 1 items>'}",
            "Bad Request",
            400,
            "body.prompt",
        ),
    ),
    "load without a path": (
        LOAD,
        {"lora_name": "x"},
        envelope(MISSING % ("lora_path", 1), "Bad Request", 400, "body.lora_path"),
    ),
    "load with an empty name": (
        LOAD,
        {"lora_name": "", "lora_path": "/x"},
        envelope("Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput", 400),
    ),
    "load under the base model's name": (
        LOAD,
        {"lora_name": "tiny-qwen", "lora_path": "/x"},
        envelope("The lora adapter 'tiny-qwen' conflicts with a served base model.", "InvalidUserInput", 400),
    ),
    "unload of an unknown name": (
        UNLOAD,
        {"lora_name": "zz"},
        envelope("The lora adapter 'zz' cannot be found.", "NotFoundError", 404),
    ),
    "unload of no name": (
        UNLOAD,
        {"lora_name": ""},
        envelope("'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput", 400),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_is_refused_with_vllms_message(bench: EngineUnderTest, case: str) -> None:
    path, body, expected = REFUSED[case]
    answer = bench.client.post(path, json=body)
    assert answer.json() == expected
    assert answer.status_code == expected["error"]["code"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, LOAD, "/tokenize"])
def test_invalid_json_is_refused_with_vllms_message(bench: EngineUnderTest, path: str) -> None:
    as_json = {"content-type": "application/json"}
    answer = bench.client.post(path, content=b'{"model":', headers=as_json)
    fault = (
        "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.9', 'msg': 'JSON decode error', 'input': "
        "'<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}"
    )
    assert (answer.status_code, answer.json()) == (400, envelope(fault, "Bad Request", 400, "body.9"))
    answer = bench.client.post(path, content=b"{}", headers={"content-type": "text/plain"})
    fault = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    assert (answer.status_code, answer.json()) == (400, envelope(fault, "Bad Request", 400))
    fault = "1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}"
    answer = bench.client.post(path, content=b"", headers=as_json)
    assert (answer.status_code, answer.json()) == (400, envelope(fault, "Bad Request", 400, "body"))


# --- tokens


def test_tokenize_and_detokenize_are_inverse(bench: EngineUnderTest) -> None:
    answer = bench.client.post("/tokenize", json={"model": "tiny-qwen", "prompt": "SELECT one FROM two"}).json()
    assert list(answer) == ["count", "max_model_len", "tokens", "token_strs"]
    assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (len(answer["tokens"]), 2048, None)
    back = bench.client.post("/detokenize", json={"model": "tiny-qwen", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": "SELECT one FROM two"}


def test_the_tokenizer_is_told_with_its_special_tokens_as_texts_and_its_template(bench: EngineUnderTest) -> None:
    told = bench.client.get("/tokenizer_info").json()
    assert isinstance(told["eos_token"], str)
    assert len(bench.client.post("/tokenize", json={"prompt": told["eos_token"]}).json()["tokens"]) == 1
    assert "messages" in told["chat_template"]


def test_tokenize_without_the_generation_prompt_is_a_prefix(bench: EngineUnderTest) -> None:
    whole = bench.client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    bare = bench.client.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    assert whole[: len(bare)] == bare
    assert len(bare) < len(whole)


def test_our_tokenizer_gives_the_same_ids_as_the_engine(bench: EngineUnderTest, model_dir: Path) -> None:
    assert_same_tokens_as_engine(ChatTokenizer.from_dir(model_dir), bench.engine.url, bench.engine.model)


# --- adapters


def test_load_and_unload_answer_plain_text_and_take_effect_at_once(bench: EngineUnderTest) -> None:
    load = bench.client.post(LOAD, json={"lora_name": "a/v1@0123", "lora_path": str(bench.adapters["legal"])})
    assert (load.status_code, load.text) == (200, "Success: LoRA adapter 'a/v1@0123' added successfully.")
    assert "content-type" not in load.headers
    chat = bench.client.post(CHAT, json={"model": "a/v1@0123", "messages": HELLO, "max_tokens": 2})
    assert chat.json()["model"] == "a/v1@0123"
    unload = bench.client.post(UNLOAD, json={"lora_name": "a/v1@0123"})
    assert (unload.status_code, unload.text) == (200, "Success: LoRA adapter 'a/v1@0123' removed successfully.")
    gone = bench.client.post(CHAT, json={"model": "a/v1@0123", "messages": HELLO})
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")


def test_a_stream_on_an_unloaded_adapter_is_finished(bench: EngineUnderTest) -> None:
    """A victim may be unloaded although requests run on it, and others then take its places on host and device."""
    body = {"model": "spared", "messages": HELLO, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    others = [f"next-{n}" for n in range(4)]  # as many as the engine keeps on the host
    bench.load("spared", bench.adapters["sql"])
    whole = bench.client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    with bench.client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()
        said = [next(line for line in lines if line)]
        bench.unload("spared")
        assert bench.client.post(CHAT, json=body).status_code == 404
        for name in others:
            bench.load(name, bench.adapters["python"])
        said += [line for line in lines if line]
    for name in others:
        bench.unload(name)
    *events, done = (line.removeprefix("data: ") for line in said)
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert done == "[DONE]"
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole
    assert choices[-1]["finish_reason"] == "length"


def test_name_can_be_loaded_once(bench: EngineUnderTest) -> None:
    bench.load("twice", bench.adapters["sql"])
    answer = bench.client.post(LOAD, json={"lora_name": "twice", "lora_path": str(bench.adapters["python"])})
    bench.unload("twice")
    fault = (
        "The lora adapter 'twice' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True."
    )
    assert (answer.status_code, answer.json()) == (400, envelope(fault, "InvalidUserInput", 400))


# A model in processes of its own (several GPUs) has the fault within "Worker failed with error '%s', ...".
FAULT = "Call to add_lora method failed: %s"
BAD_ADAPTERS = {
    "rank": (500, FAULT % r"LoRA rank 32 is greater than max_lora_rank 16\."),
    "dora": (500, FAULT % r"vLLM does not yet support DoRA\."),
    "bias": (500, FAULT % r"Adapter bias is not supported\."),
    "badjson": (500, FAULT % r"Expecting property name enclosed in double quotes: line 1 column 2 \(char 1\)"),
    "noweights": (500, FAULT % "<path> doesn't contain tensors"),
    "corrupt": (500, FAULT % "Error while deserializing header: header too large"),
    "short": (500, FAULT % "Error while deserializing header: incomplete metadata, file not fully covered"),
    "modules": (
        500,
        FAULT
        % r"While loading <path>, expected target modules in \{.*\} but received \['model\.layers\.0\..*z_proj.*\]\. "
        "Please verify that the loaded LoRA module is correct",
    ),
    "noconfig": (404, "Loading lora bad-noconfig failed: No adapter found for <path>"),
}


@pytest.mark.parametrize("fault", BAD_ADAPTERS)
def test_bad_adapter_is_refused_with_vllms_message(
    bench: EngineUnderTest, bad_adapters: dict[str, Path], fault: str
) -> None:
    status, pattern = BAD_ADAPTERS[fault]
    answer = bench.client.post(LOAD, json={"lora_name": f"bad-{fault}", "lora_path": str(bad_adapters[fault])})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, status, None)
    assert error["type"] == {404: "NotFoundError", 500: "InternalServerError"}[status]
    assert re.fullmatch(pattern, error["message"], re.DOTALL), error["message"]


def test_load_from_a_missing_path_is_404(bench: EngineUnderTest) -> None:
    answer = bench.client.post(LOAD, json={"lora_name": "q", "lora_path": "/tmp/there/is/nothing"})
    expected = envelope("Loading lora q failed: No adapter found for <path>", "NotFoundError", 404)
    assert (answer.status_code, answer.json()) == (404, expected)


# --- cache and KV events


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_whole_blocks_are_cached_and_a_full_hit_sends_no_event(bench: EngineUnderTest) -> None:
    bench.settle()
    prompt = bench.tokens(3, extra=7)
    assert cached(bench.complete(prompt)) == 0
    [stored] = bench.wire.stored()
    assert fits(stored, golden.BLOCK_STORED) is None
    assert (len(stored["block_hashes"]), stored["token_ids"]) == (3, prompt[:96])
    assert (stored["block_size"], stored["medium"], stored["group_idx"]) == (32, "GPU", 0)
    assert cached(bench.complete(prompt)) == 96
    marker = bench.tokens(1)
    bench.complete(marker)
    assert [event["token_ids"] for event in bench.wire.stored()] == [marker]


def test_last_block_of_a_repeated_prompt_is_computed_and_stored_again(bench: EngineUnderTest) -> None:
    bench.settle()
    prompt = bench.tokens(2)
    bench.complete(prompt)
    [first] = bench.wire.stored()
    assert cached(bench.complete(prompt)) == 32
    [second] = bench.wire.stored()
    assert second["block_hashes"] == first["block_hashes"][1:]
    assert second["parent_block_hash"] == first["block_hashes"][0]


def test_events_of_generated_blocks_name_their_parent(bench: EngineUnderTest) -> None:
    bench.settle()
    prompt = bench.tokens(1, extra=20)
    answer = bench.complete(prompt, max_tokens=20, return_token_ids=True)
    [first] = bench.wire.stored()
    [second] = bench.wire.stored()
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert second["token_ids"] == [*prompt[32:], *answer["choices"][0]["token_ids"]][:32]


def test_each_salt_and_adapter_has_its_own_blocks(bench: EngineUnderTest) -> None:
    bench.load("salted", bench.adapters["sql"])
    bench.settle()
    prompt = bench.tokens(2, extra=1)
    hashes = set()
    for more, name, keys in (
        ({}, None, [None, None]),
        ({"cache_salt": "s"}, None, [["s"], None]),
        ({"model": "salted"}, "salted", [["salted"], ["salted"]]),
        ({"model": "salted", "cache_salt": "s"}, "salted", [["salted", "s"], ["salted"]]),
    ):
        assert cached(bench.complete(prompt, **more)) == 0
        [stored] = bench.wire.stored()
        assert (stored["lora_name"], stored["extra_keys"]) == (name, keys)
        assert isinstance(stored["lora_id"], int) == (name is not None)
        hashes |= set(stored["block_hashes"])
        assert cached(bench.complete(prompt, **more)) == 64
    assert len(hashes) == 8
    bench.unload("salted")


def test_same_name_from_another_path_shares_nothing(bench: EngineUnderTest) -> None:
    prompt = bench.tokens(2, extra=1)
    bench.load("moved", bench.adapters["sql"])
    bench.complete(prompt, model="moved")
    bench.unload("moved")
    bench.load("moved", bench.adapters["legal"])
    assert cached(bench.complete(prompt, model="moved")) == 0
    bench.unload("moved")
    bench.load("moved", bench.adapters["sql"])
    assert cached(bench.complete(prompt, model="moved")) == 64  # blocks outlive unload and reload
    bench.unload("moved")


def test_report_mode_full_sends_events_for_reused_blocks(bench: EngineUnderTest) -> None:
    bench.settle()
    prompt = bench.tokens(2, extra=1)
    bench.complete(prompt)
    [first] = bench.wire.stored()
    bench.complete(prompt, vllm_xargs={"kv_cache_report_mode": "full"})
    assert bench.wire.stored() == [first]


def test_oldest_blocks_are_evicted_first_with_events_before_new_blocks(bench: EngineUnderTest) -> None:
    bench.settle()
    old = bench.tokens(3)
    bench.complete(old)
    [stored] = bench.wire.stored()
    removed: list[int] = []
    for filler in range(5):  # 5 x 62 blocks into a pool of 255
        prompt = [3000 + filler] * 1984
        bench.complete(prompt)
        events = bench.wire.until(prompt)
        kinds = [event["type"] for event in events]
        assert kinds == sorted(kinds), "a removal came after the store that needed its room"
        for event in events[: kinds.index("BlockStored")]:
            assert fits(event, golden.BLOCK_REMOVED) is None
            assert len(event["block_hashes"]) == 1
            removed += event["block_hashes"]
    mine = [block for block in removed if block in stored["block_hashes"]]
    assert mine == stored["block_hashes"][::-1]  # the last blocks are evicted first
    assert cached(bench.complete(old)) == 0


def test_replay_repeats_all_batches_from_the_requested_number(bench: EngineUnderTest) -> None:
    bench.settle()
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set_hwm(0)
    dealer.connect(bench.engine.replay_endpoint)
    last = bench.wire.heard[-1][0]
    try:
        for start in (bench.wire.heard[0][0], last, last + 1):
            dealer.send_multipart((b"", start.to_bytes(8, "big")))
            got = []
            while True:
                assert dealer.poll(EVENT_WITHIN_MS), "the replay did not end"
                empty, topic, seq_bytes, payload = dealer.recv_multipart()
                assert empty == b""
                if seq_bytes == b"\xff" * 8:
                    assert (topic, payload) == (b"", b"")
                    break
                assert topic == b"kv"
                seq = int.from_bytes(seq_bytes, "big")
                got += [(seq, event) for event in msgspec.msgpack.decode(payload)[1]]
            assert got == [(seq, event) for seq, event in bench.wire.heard if seq >= start]
    finally:
        dealer.close(linger=0)
        context.term()
