"""sgl-jax's server without a model: `python -m tests.sgl_jax_stub` with sgl-jax's own flags.

Its behaviour follows sgl-jax's source of August 2026 as far as lorafleet depends on it, including its pitfalls:
adapters come with `--lora-paths` alone, no route lists them, a completion selects one by `lora_path`, and chat ignores
that field. Text is a function of the adapter's weights and the prompt.

source  sgl_jax/srt/server_args.py, entrypoints/http_server.py, entrypoints/openai/serving_completions.py,
        entrypoints/openai/serving_chat.py, lora/lora_registry.py, lora/lora_manager.py
"""

import argparse
import hashlib
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lorafleet.tokenizer.chat import ChatTokenizer


@dataclass(frozen=True)
class StubLoraRef:
    """An adapter of the engine's arguments; its id is drawn at each start."""

    lora_name: str
    lora_path: str
    pinned: bool = True
    lora_id: str = field(default_factory=lambda: uuid.uuid4().hex)


def ref_of(argument: str) -> StubLoraRef:
    """An adapter of `--lora-paths`: `name=path`, or a path whose last part is the name."""
    name, separator, path = argument.partition("=")
    return StubLoraRef(name, path) if separator else StubLoraRef(Path(argument).name, argument)


class SglJaxStub:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = ChatTokenizer.from_dir(Path(args.model_path))
        self.refs = {ref.lora_name: ref for ref in map(ref_of, args.lora_paths)}
        if len(self.refs) > args.max_loras_per_batch - 1:
            raise SystemExit(f"Cannot pin adapter: max {args.max_loras_per_batch - 1}")
        self.weights = {
            ref.lora_name: (Path(ref.lora_path) / "adapter_model.safetensors").read_bytes()
            for ref in self.refs.values()
        }

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        ids = self.tokenizer.completion_ids(prompt) if isinstance(prompt, str) else prompt
        return self.answer(body, ids, body.get("lora_path"), is_chat=False)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        return self.answer(body, self.tokenizer.chat_ids(body), None, is_chat=True)

    def answer(self, body: dict[str, Any], tokens: list[int], name: str | None, *, is_chat: bool) -> Response:
        if name is not None and name not in self.refs:
            message = (
                f"The following requested LoRA adapters are not loaded: {name}\nLoaded adapters: {self.refs.keys()}."
            )
            error = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse(error, 400)
        seed = hashlib.sha256(self.weights.get(name or "", b"") + json.dumps(tokens).encode()).digest()
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        words = [self.tokenizer.decode([token]) for token in Random(seed).choices(range(300, 2000), k=wanted)]
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": body.get("model")}
        counts = {"prompt_tokens": len(tokens), "completion_tokens": wanted, "total_tokens": len(tokens) + wanted}

        def choice(text: str, part: str) -> dict[str, Any]:
            content = {part: {"role": "assistant", "content": text}} if is_chat else {"text": text}
            return {"index": 0, **content, "finish_reason": None if part == "delta" else "length"}

        def lines() -> Iterator[str]:
            for word in words:
                yield f"data: {json.dumps(head | {'choices': [choice(word, 'delta')]})}\n\n"
            if (body.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps(head | {'choices': [], 'usage': counts})}\n\n"
            yield "data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(lines(), media_type="text/event-stream")
        return JSONResponse(head | {"choices": [choice("".join(words), "message")], "usage": counts})

    async def models(self, _request: Request) -> Response:
        served = self.args.served_model_name
        card = {"object": "model", "created": int(time.time()), "owned_by": "sglang-jax", "root": served}
        return JSONResponse(
            {"object": "list", "data": [{"id": served, **card, "max_model_len": self.args.context_length}]}
        )

    async def info(self, _request: Request) -> Response:
        state = {"running_batch_size": 0, "waiting_queue_size": 0}
        args = vars(self.args) | {"enable_lora": bool(self.refs), "precompile_token_paddings": None, "random_seed": 42}
        args["lora_paths"] = [asdict(ref) for ref in self.refs.values()] or None
        args |= {"max_total_num_tokens": self.args.max_total_tokens, "internal_states": [state], "version": "0.0.3"}
        return JSONResponse(args)

    async def health(self, _request: Request) -> Response:
        return Response()

    @property
    def app(self) -> Starlette:
        post = {"methods": ["POST"]}
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, **post),
                Route("/v1/completions", self.complete, **post),
                Route("/v1/models", self.models),
                Route("/get_server_info", self.info),
                Route("/health", self.health),
            ]
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """sgl-jax's flags; unknown ones are refused."""
    parser = argparse.ArgumentParser(prog="sgl_jax.launch_server", allow_abbrev=False)
    for flag in ("--model-path", "--served-model-name", "--host"):
        parser.add_argument(flag, required=True)
    for flag in ("--device", "--dtype", "--attention-backend"):
        parser.add_argument(flag)
    parser.add_argument("--lora-paths", nargs="*", default=[])
    parser.add_argument("--lora-target-modules", nargs="*")
    for flag, default in (
        ("--port", 30000),
        ("--max-loras-per-batch", 8),
        ("--max-lora-rank", None),
        ("--page-size", 1),
        ("--tp-size", 1),
        ("--max-running-requests", None),
        ("--chunked-prefill-size", 4096),
        ("--context-length", 2048),
        ("--max-total-tokens", 8192),
    ):
        parser.add_argument(flag, type=int, default=default)
    for flag in (
        "--enable-lora",
        "--enable-cache-report",
        "--disable-overlap-schedule",
        "--disable-precompile",
        "--skip-server-warmup",
    ):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    uvicorn.run(SglJaxStub(args).app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
