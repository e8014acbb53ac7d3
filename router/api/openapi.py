"""The inference routes' part of the OpenAPI document; FastAPI cannot generate it, since it does not serve them.

Each has an example of what to send and of what comes back; a test sends the first to a real engine and holds the
answer's keys against the second. Schemas say what the router reads and no more: every other field is the engine's.
"""

import re
from collections.abc import Mapping
from typing import Any

from lorafleet.service.http.openapi import ERROR_SCHEMA, Json
from router.protocols import sglang_generate
from router.protocols.routes import COMPLETIONS, GENERATE_TOKENS, ROUTES, Route

_MODEL = "sql-expert/v1"
_HELLO = [{"role": "user", "content": "Which customers ordered twice?"}]
_USAGE = {"prompt_tokens": 27, "total_tokens": 31, "completion_tokens": 4}
_VECTOR = [0.0947, 0.0737, -0.0067]
_MESSAGE = {"role": "assistant", "content": "SELECT"}
_CHOICE = {"index": 0, "message": _MESSAGE, "finish_reason": "length"}
_SCORES: Json = {
    "id": "score-1",
    "object": "list",
    "model": _MODEL,
    "data": [{"index": 0, "object": "score", "score": 0.5}],
    "usage": _USAGE,
}
_RANKED: Json = {
    "id": "score-1",
    "model": _MODEL,
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
    "results": [{"index": 0, "document": {"text": "SELECT 1"}, "relevance_score": 0.5}],
}
_RESPONSE: Json = {
    "id": "resp_1.2d06800538d394c2.dzA",
    "object": "response",
    "model": _MODEL,
    "status": "completed",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "SELECT", "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 27, "output_tokens": 4, "total_tokens": 31},
}

# What to send -> what comes back, by path; a row without a body has None.
EXAMPLES: Mapping[str, tuple[Json | None, Json]] = {
    "/v1/chat/completions": (
        {"model": _MODEL, "messages": _HELLO, "max_tokens": 4},
        {"id": "chatcmpl-1", "object": "chat.completion", "model": _MODEL, "choices": [_CHOICE], "usage": _USAGE},
    ),
    "/v1/chat/completions/batch": (
        {"model": _MODEL, "messages": [_HELLO, _HELLO], "max_tokens": 4},
        {"id": "chatcmpl-1", "object": "chat.completion", "model": _MODEL, "choices": [_CHOICE], "usage": _USAGE},
    ),
    "/v1/completions": (
        {"model": _MODEL, "prompt": "SELECT", "max_tokens": 4},
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": _MODEL,
            "choices": [{"index": 0, "text": " name FROM", "finish_reason": "length"}],
            "usage": _USAGE,
        },
    ),
    GENERATE_TOKENS: (
        {
            "model": _MODEL,
            "token_ids": [836, 329],
            "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 0},
        },
        {
            "request_id": "generate-tokens-1",
            "model": _MODEL,
            "choices": [
                {
                    "index": 0,
                    "token_ids": [295],
                    "logprobs": {"content": [{"token_id": 295, "logprob": -0.5, "rank": 1, "top_logprobs": []}]},
                    "finish_reason": "length",
                }
            ],
            "usage": _USAGE,
        },
    ),
    "/v1/responses": ({"model": _MODEL, "input": "Which customers ordered twice?", "max_output_tokens": 4}, _RESPONSE),
    "/v1/responses/{id}": (None, _RESPONSE),
    "/v1/responses/{id}/cancel": (None, _RESPONSE | {"status": "cancelled"}),
    "/v1/messages": (
        {"model": _MODEL, "messages": _HELLO, "max_tokens": 4},
        {
            "id": "chatcmpl-1",
            "type": "message",
            "role": "assistant",
            "model": _MODEL,
            "content": [{"type": "text", "text": "SELECT"}],
            "stop_reason": "max_tokens",
            "usage": {"input_tokens": 27, "output_tokens": 4},
        },
    ),
    "/v1/messages/count_tokens": ({"model": _MODEL, "messages": _HELLO}, {"input_tokens": 27}),
    "/v1/embeddings": (
        {"model": _MODEL, "input": "SELECT 1"},
        {
            "id": "embd-1",
            "object": "list",
            "model": _MODEL,
            "data": [{"index": 0, "object": "embedding", "embedding": _VECTOR}],
            "usage": _USAGE,
        },
    ),
    "/v2/embed": (
        {"model": _MODEL, "texts": ["SELECT 1"], "embedding_types": ["float"]},
        {"id": "embd-1", "embeddings": {"float": [_VECTOR]}},
    ),
    "/pooling": (
        {"model": _MODEL, "input": "SELECT 1"},
        {
            "id": "pooling-1",
            "object": "list",
            "model": _MODEL,
            "data": [{"index": 0, "object": "pooling", "data": _VECTOR}],
            "usage": _USAGE,
        },
    ),
    "/classify": (
        {"model": _MODEL, "input": "SELECT 1"},
        {
            "id": "classify-1",
            "object": "list",
            "model": _MODEL,
            "data": [{"index": 0, "label": "LABEL_0", "probs": [0.25, 0.75], "num_classes": 2}],
            "usage": _USAGE,
        },
    ),
    "/score": ({"model": _MODEL, "text_1": "SELECT", "text_2": ["INSERT", "café"]}, _SCORES),
    "/v1/score": ({"model": _MODEL, "text_1": "SELECT", "text_2": ["INSERT", "café"]}, _SCORES),
    "/rerank": ({"model": _MODEL, "query": "SELECT", "documents": ["INSERT", "café"]}, _RANKED),
    "/v1/rerank": ({"model": _MODEL, "query": "SELECT", "documents": ["INSERT", "café"]}, _RANKED),
    "/v2/rerank": ({"model": _MODEL, "query": "SELECT", "documents": ["INSERT", "café"]}, _RANKED),
    "/generative_scoring": (
        {"model": _MODEL, "query": "Is it SQL?", "items": ["SELECT 1"], "label_token_ids": [300, 301]},
        _SCORES | {"id": "generative-scoring-1"},
    ),
    "/v1/systemone": (
        {"model": _MODEL, "state": "SELECT 1", "questions": {"sql": {"type": "boolean", "instructions": "Is it SQL?"}}},
        {
            "id": "1",
            "object": "structured_decision",
            "model": _MODEL,
            "answers": {"sql": {"value": True}},
            "usage": {"input_tokens": 27, "output_tokens": 1},
        },
    ),
    "/v1/decisions": (
        {
            "model": _MODEL,
            "input": "SELECT 1",
            "questions": [{"type": "predicate", "name": "sql", "instructions": "Is it SQL?"}],
        },
        {
            "model": _MODEL,
            "answers": [{"type": "predicate", "name": "sql", "probability": 0.9}],
            "usage": {"input_tokens": 27, "output_tokens": 1, "total_tokens": 28},
        },
    ),
    "/tokenize": ({"model": _MODEL, "prompt": "SELECT"}, {"count": 1, "max_model_len": 32768, "tokens": [4925]}),
    "/detokenize": ({"model": _MODEL, "tokens": [4925]}, {"prompt": "SELECT"}),
    sglang_generate.PATH: (
        {"text": ["SELECT", "Hello"], "lora_path": [_MODEL, None], "sampling_params": {"max_new_tokens": 4}},
        {
            "text": " name FROM",
            "output_ids": [836, 4295],
            "meta_info": {
                "id": "cmpl-1",
                "finish_reason": {"type": "length", "length": 4},
                "prompt_tokens": 1,
                "completion_tokens": 4,
                "cached_tokens": 0,
                "weight_version": "sql-expert/v1@0123456789ab",
            },
        },
    ),
}

_ERRORS: Mapping[str, str] = {
    "400": "The body is not what this call takes, or names a field that steers the engine",
    "401": "No such key",
    "404": "No such model, adapter or stored response, or not this caller's",
    "409": "The adapter failed its checks",
    "413": "The body is too large",
    "429": "Too much waits here already, or a limit is reached; see Retry-After",
    "503": "Nothing can serve it now; see Retry-After",
}
_OURS: Json = {
    "model": {"type": ["string", "null"], "description": "a base model, an adapter, an alias, or base:adapter"},
    "lora_id": {"type": ["string", "null"], "description": "the adapter; model may then be left out"},
    "lora_path": {"type": ["string", "null"], "description": "SGLang's name for lora_id"},
}
_ADAPTER_OR_LIST: Json = {
    "oneOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": ["string", "null"]}}],
    "description": "the adapter, or one for each prompt; null: what model names",
}
_STREAM: Json = {"stream": {"type": ["boolean", "null"], "description": "answer as server-sent events"}}


def openapi_paths() -> Json:
    """`paths` of an OpenAPI 3.1 document: every inference route, to be merged with those of the framework."""
    paths: Json = {}
    for route in ROUTES.values():
        paths.setdefault(route.path, {})[route.method.lower()] = _route_operation(route)
    paths[sglang_generate.PATH] = {"post": _sglang_generate_operation()}
    return paths


def _route_operation(route: Route) -> Json:
    """The OpenAPI operation of one route, with its example."""
    sent, answered = EXAMPLES[route.path]
    answers: Json = {"application/json": {"schema": _example_schema(answered), "example": answered}}
    if route.streams:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    operation: Json = {
        "summary": route.summary,
        "tags": ["inference"],
        "operationId": _operation_id(route.method, route.path),
        "responses": _openapi_responses(answers),
    }
    if "{id}" in route.path:
        where = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [where]
    if sent is not None:
        ours = _OURS | (_STREAM if route.streams else {})
        if route.path == COMPLETIONS:
            ours |= {"lora_id": _ADAPTER_OR_LIST, "lora_path": _ADAPTER_OR_LIST}
        operation["requestBody"] = _openapi_body(sent, ours, optional={"model"})
    return operation


def _operation_id(method: str, path: str) -> str:
    """A name for the operation that generated clients give to its function."""
    return re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")


def _sglang_generate_operation() -> Json:
    """The OpenAPI operation of SGLang's POST /generate."""
    sent, answered = EXAMPLES[sglang_generate.PATH]
    assert sent is not None
    one = _example_schema(answered)
    either = {"oneOf": [one, {"type": "array", "items": one}]}
    answers = {
        "application/json": {"schema": either, "example": [answered, answered]},
        "text/event-stream": {"schema": {"type": "string"}},
    }
    properties: Json = {
        "text": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
        "lora_id": _ADAPTER_OR_LIST,
        "lora_path": _ADAPTER_OR_LIST,
        "sampling_params": {"oneOf": [{"type": ["object", "null"]}, {"type": "array", "items": {"type": "object"}}]},
        "model": _OURS["model"],
        "return_logprob": {
            "type": ["boolean", "null"],
            "description": "triples [logprob, token id, text] in meta_info",
        },
        "logprob_start_len": {"type": ["integer", "null"], "description": "first token of the prompt that has one; -1"},
        "top_logprobs_num": {"type": ["integer", "null"], "description": "likeliest tokens at each place; 0"},
    }
    return {
        "summary": "SGLang's native call; one batch may mix adapters and the base model",
        "tags": ["inference"],
        "operationId": _operation_id("POST", sglang_generate.PATH),
        "requestBody": _openapi_body(sent, properties | _STREAM, optional={"lora_path", "sampling_params"}),
        "responses": _openapi_responses(answers),
    }


def _openapi_responses(content: Json) -> Json:
    """The OpenAPI responses: this content for 200, and the router's errors."""
    errors = {
        status: {"description": why, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
        for status, why in _ERRORS.items()
    }
    return {
        "200": {"description": "The engine's answer, with the name that was asked for", "content": content}
    } | errors


def _openapi_body(example: Json, known: Json, *, optional: set[str]) -> Json:
    """The OpenAPI request body of this example.

    known     schemas of fields, beside or in place of the example's
    optional  fields of the example that are not required
    """
    properties = _example_schema(example)["properties"] | known
    required = sorted(example.keys() - optional)
    schema = {"type": "object", "properties": properties, "required": required}
    return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}


def _example_schema(example: Any) -> Json:
    """The shape of an example; further fields may come with any object. An empty list may have items of any kind."""
    if isinstance(example, dict):
        return {"type": "object", "properties": {name: _example_schema(value) for name, value in example.items()}}
    if isinstance(example, list):
        return {"type": "array", "items": _example_schema(example[0]) if example else {}}
    return {"type": _TYPES[type(example)]}


_TYPES: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
