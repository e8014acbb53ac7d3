"""A server that answers as a small model would, in OpenAI's and Anthropic's forms, and keeps each request it gets."""

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "tiny-qwen"
_TEXT = "It is in notes.txt."
Json = dict[str, Any]
_VECTOR = {"object": "embedding", "index": 0, "embedding": [0.1] * 8}
_USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
_EMBEDDING = {"object": "list", "model": MODEL, "data": [_VECTOR], "usage": {"prompt_tokens": 1, "total_tokens": 1}}
# Of vLLM's tokenizer by HTTP.
_SHORT = {
    "/tokenizer_info": {"tokenizer_class": "Stub", "eos_token": "</s>", "chat_template": "{{ messages }}"},
    "/tokenize": {"tokens": [301, 302, 303]},
    "/detokenize": {"prompt": "text"},
}


class RecordingStub:
    """Answers the first question of a conversation with a call of a tool that reads, if there is one; else with text.

    calls  what has come: method, path, headers and body of each request
    """

    def __init__(self, read_file: str) -> None:
        self.calls: list[Json] = []
        self._read_file = read_file
        # By the end of a path, the longer ones first.
        self._answers: Mapping[str, Callable[[Json], tuple[Json, Iterator[Json | str]]]] = {
            "/chat/completions": self._chat,
            "/completions": lambda body: (_completion(body), iter(())),
            "/responses": self._response,
            "/messages": self._message,
            "/count_tokens": lambda _: ({"input_tokens": 12}, iter(())),
            "/embeddings": lambda _: (_EMBEDDING, iter(())),
        }
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "HEAD", "DELETE"])])

    async def _answer(self, request: Request) -> Response:
        raw = await request.body()
        body = json.loads(raw) if raw[:1] in (b"{", b"[") else None
        path = f"/{request.path_params['path']}"
        self.calls.append({"method": request.method, "path": path, "headers": dict(request.headers), "body": body})
        if path.endswith("/models"):
            return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub"}]})
        if path in _SHORT:
            return JSONResponse(_SHORT[path])
        for end, answers in self._answers.items():
            if path.endswith(end) and isinstance(body, dict):
                whole, events = answers(body)
                is_stream = body.get("stream") is True
                return (
                    StreamingResponse(_sse(events), media_type="text/event-stream")
                    if is_stream
                    else JSONResponse(whole)
                )
        return JSONResponse({"error": {"message": f"no {path}"}}, 404)

    def _tool_call(self, body: Json, results: str) -> tuple[str, Json] | None:
        """The name and arguments of the tool to call; None: answer with text."""
        if re.search(results, json.dumps(body)):
            return None
        for tool in body.get("tools") or []:
            name = tool.get("name") or tool.get("function", {}).get("name")
            if name == "Read":
                return name, {"file_path": self._read_file}
            if name in ("exec_command", "shell", "shell_command"):
                command = f"cat {self._read_file}"
                return name, {"cmd": command} if name == "exec_command" else {
                    "command": ["bash", "-lc", command] if name == "shell" else command
                }
            if name in ("read_note", "bash", "read_file"):
                return name, {"cmd": f"cat {self._read_file}"} if name == "bash" else {"name": "notes.txt"}
        return None

    def _chat(self, body: Json) -> tuple[Json, Iterator[Json | str]]:
        call = self._tool_call(body, r'"role": "tool"')
        message: Json = {"role": "assistant", "content": _TEXT}
        if call is not None:
            made = {"id": "call_1", "type": "function", "function": {"name": call[0], "arguments": json.dumps(call[1])}}
            message = {"role": "assistant", "content": None, "tool_calls": [made]}
        reason = "stop" if call is None else "tool_calls"
        head = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
        whole = head | {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": _USAGE,
        }
        delta = message if call is None else message | {"tool_calls": [message["tool_calls"][0] | {"index": 0}]}

        def events() -> Iterator[Json | str]:
            chunk = head | {"object": "chat.completion.chunk"}
            yield chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            yield chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
            yield chunk | {"choices": [], "usage": _USAGE}
            yield "[DONE]"

        return whole, events()

    def _response(self, body: Json) -> tuple[Json, Iterator[Json | str]]:
        call = self._tool_call(body, r'"function_call_output"')
        item: Json = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": _TEXT, "annotations": []}],
        }
        if call is not None:
            item = {
                "id": "fc_1",
                "type": "function_call",
                "call_id": "call_1",
                "name": call[0],
                "arguments": json.dumps(call[1]),
                "status": "completed",
            }
        whole = {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": MODEL,
            "status": "completed",
            "output": [item],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": 12,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 15,
            },
        }

        def events() -> Iterator[Json | str]:
            yield {
                "type": "response.created",
                "sequence_number": 0,
                "response": whole | {"status": "in_progress", "output": []},
            }
            yield {"type": "response.output_item.added", "sequence_number": 1, "output_index": 0, "item": item}
            if call is None:
                yield {
                    "type": "response.output_text.delta",
                    "sequence_number": 2,
                    "item_id": "msg_1",
                    "output_index": 0,
                    "content_index": 0,
                    "delta": _TEXT,
                    "logprobs": [],
                }
            yield {"type": "response.output_item.done", "sequence_number": 3, "output_index": 0, "item": item}
            yield {"type": "response.completed", "sequence_number": 4, "response": whole}

        return whole, events()

    def _message(self, body: Json) -> tuple[Json, Iterator[Json | str]]:
        call = self._tool_call(body, r'"type": "tool_result"')
        block: Json = {"type": "text", "text": _TEXT}
        if call is not None:
            block = {"type": "tool_use", "id": "toolu_1", "name": call[0], "input": call[1]}
        reason = "end_turn" if call is None else "tool_use"
        usage = {"input_tokens": 12, "output_tokens": 3}
        whole = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [block],
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }

        def events() -> Iterator[Json | str]:
            yield {"type": "message_start", "message": whole | {"content": [], "stop_reason": None}}
            empty = {"type": "text", "text": ""} if call is None else block | {"input": {}}
            yield {"type": "content_block_start", "index": 0, "content_block": empty}
            delta = (
                {"type": "text_delta", "text": _TEXT}
                if call is None
                else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            )
            yield {"type": "content_block_delta", "index": 0, "delta": delta}
            yield {"type": "content_block_stop", "index": 0}
            yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
            yield {"type": "message_stop"}

        return whole, events()


def _completion(body: Json) -> Json:
    prompts = body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    logprobs = {
        "tokens": ["a"] * 99,
        "token_logprobs": [-0.5] * 99,
        "top_logprobs": [{"a": -0.5}] * 99,
        "text_offset": [0] * 99,
    }
    choices = [
        {
            "index": at,
            "text": " text",
            "finish_reason": "stop",
            "logprobs": logprobs if body.get("logprobs") is not None else None,
        }
        for at in range(count)
    ]
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": choices,
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


async def _sse(events: Iterator[Json | str]) -> AsyncIterator[str]:
    for event in events:
        if isinstance(event, str):
            yield f"data: {event}\n\n"
        else:
            named = f"event: {event['type']}\n" if "type" in event else ""
            yield f"{named}data: {json.dumps(event)}\n\n"
