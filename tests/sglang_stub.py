"""SGLang's server without a model: `python -m tests.sglang_stub` with SGLang's own flags.

Its behaviour follows SGLang 0.5.23 as far as lorafleet depends on it, including its pitfalls, as seen
running: adapters are chosen by `base:adapter` alone and bare names fall through to the base model; an unloaded name
comes back with the next request; each load has a new id, which seeds the hashes of the adapter's blocks; an unload
waits for requests in flight and publishes nothing. Text is a function of the adapter's content and the prompt.

source  sglang/srt/managers/tokenizer_control_mixin.py, tokenizer_manager.py, lora/lora_registry.py,
        entrypoints/http_server.py, entrypoints/openai/serving_base.py, mem_cache/events.py,
        disaggregation/kv_events.py, observability/metrics_collector.py
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import os
import random
import time
import uuid
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lorafleet.sim.events import KVEventPublisher
from lorafleet.sim.settings import EventsConfig
from lorafleet.tokenizer.chat import ChatTokenizer

_GAUGE_EVERY = 40  # decoded tokens between two updates of the gauge of running requests


class StubKVEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class StubBlockStored(StubKVEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class StubBlockRemoved(StubKVEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


@dataclass(frozen=True)
class StubAdapter:
    """One load of an adapter."""

    name: str
    path: str
    digest: bytes
    is_deadly: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class StubPage:
    parent: int | None
    children: int = 0


class StubPageCache:
    """Pages of tokens by the hash of their prefix; the least recently used leaf is evicted first."""

    def __init__(self, page_size: int, pages: int) -> None:
        self.page_size, self.most = page_size, pages
        self.pages: OrderedDict[int, StubPage] = OrderedDict()
        self.events: list[StubKVEvent] = []

    def hashes(self, tokens: list[int], ref: StubAdapter | None, salt: str | None) -> list[int]:
        running, found = hashlib.sha256(f"{ref.id if ref else ''}|{salt or ''}".encode()).digest(), []
        for start in range(0, len(tokens) - len(tokens) % self.page_size, self.page_size):
            page = json.dumps(tokens[start : start + self.page_size]).encode()
            running = hashlib.sha256(running + page).digest()
            found.append(int.from_bytes(running[:8], "big", signed=True))
        return found

    def match(self, tokens: list[int], ref: StubAdapter | None, salt: str | None) -> int:
        """Number of cached tokens; the last token is always computed."""
        found = 0
        for page in self.hashes(tokens[:-1], ref, salt):
            if page not in self.pages:
                break
            self.pages.move_to_end(page)
            found += self.page_size
        return found

    def store(self, tokens: list[int], ref: StubAdapter | None, salt: str | None) -> None:
        parent: int | None = None
        first = True
        for number, page in enumerate(self.hashes(tokens, ref, salt)):
            if page in self.pages:
                self.pages.move_to_end(page)
            else:
                self._make_room(parent)
                self.pages[page] = StubPage(parent)
                if parent is not None:
                    self.pages[parent].children += 1
                ids = tokens[number * self.page_size : (number + 1) * self.page_size]
                last = self.events[-1] if self.events and not first else None
                if isinstance(last, StubBlockStored) and last.block_hashes[-1] == parent:
                    last.block_hashes.append(page)
                    last.token_ids.extend(ids)
                else:
                    self.events.append(
                        StubBlockStored(
                            [page], parent, ids, self.page_size, None, "GPU", salt, ref.name if ref else None
                        )
                    )
                first = False
            parent = page

    def _make_room(self, keep: int | None) -> None:
        while len(self.pages) >= self.most:
            leaf = next(page for page, held in self.pages.items() if not held.children and page != keep)
            gone = self.pages.pop(leaf)
            if gone.parent is not None:
                self.pages[gone.parent].children -= 1
            self.events.append(StubBlockRemoved([leaf], "GPU"))


class StubRefusal(Exception):
    """A ValueError in SGLang."""


class StubAdapterRegistry:
    """The registry of loaded names, and of all names that were ever loaded."""

    def __init__(self, *, max_loaded: int | None, max_rank: int) -> None:
        self.max_loaded, self.max_rank = max_loaded, max_rank
        self.registry: OrderedDict[str, StubAdapter] = OrderedDict()
        self.ever: dict[str, StubAdapter] = {}
        self.running: Counter[str] = Counter()
        self.lock = asyncio.Lock()
        self.ended = asyncio.Condition()

    async def load(self, name: str, path: str) -> None:
        async with self.lock:
            if name in self.registry:
                raise StubRefusal(f"Failed to load LoRA adapter {name} because it is already loaded")
            ref = StubAdapter(name, path, _read_adapter(name, Path(path), self.max_rank), _kills_sglang(Path(path)))
            self.registry[name] = self.ever[name] = ref
            while self.max_loaded is not None and len(self.registry) > self.max_loaded:
                await self._unload(next(iter(self.registry)))

    async def unload(self, name: str) -> None:
        async with self.lock:
            await self._unload(name)

    async def _unload(self, name: str) -> None:
        if name not in self.registry:
            raise StubRefusal(f"LoRA with name {name} does not exist. Loaded LoRAs: {self.registry.keys()}")
        ref = self.registry.pop(name)
        async with self.ended:
            await self.ended.wait_for(lambda: not self.running[ref.id])

    @contextlib.asynccontextmanager
    async def in_use(self, name: str | None):
        """The adapter during a request; an unloaded one is loaded again."""
        if name is None:
            yield None
            return
        if name not in self.registry:
            if name not in self.ever:
                known = self.ever.keys()
                raise StubRefusal(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {known}.")
            try:
                await self.load(name, self.ever[name].path)
            except (StubRefusal, OSError) as exc:
                raise StubRefusal(f"Failed to implicitly load LoRA adapter {name}: {exc}") from exc
        ref = self.registry[name]
        if ref.is_deadly:
            os._exit(1)
        self.registry.move_to_end(name)
        self.running[ref.id] += 1
        try:
            yield ref
        finally:
            self.running[ref.id] -= 1
            async with self.ended:
                self.ended.notify_all()


def _read_adapter(name: str, path: Path, max_rank: int) -> bytes:
    config = json.loads((path / "adapter_config.json").read_text())
    if config.get("use_dora"):
        raise StubRefusal(f"Failed to load {name} because LoRA serving currently doesn't support DoRA adapters")
    if config["r"] > max_rank:
        raise StubRefusal(
            f"LoRA adapter {name} with rank {config['r']} is incompatible with the current LoRA memory pool"
            " configuration. Please ensure that the LoRA adapter's rank is within the configured `--max-lora-rank`"
            " and that the target modules are included in `--lora-target-modules`."
        )
    return hashlib.sha256((path / "adapter_model.safetensors").read_bytes()).digest()


def _kills_sglang(path: Path) -> bool:
    """Whether the first request for the adapter kills SGLang: other ranks than r, or part of a fused module."""
    rank = json.loads((path / "adapter_config.json").read_text())["r"]
    with (path / "adapter_model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = {name: entry["shape"] for name, entry in header.items() if name.endswith("lora_A.weight")}
    leaves = {name.split(".")[-3] for name in shapes}
    halves = (leaves & {"k_proj", "v_proj"} and "q_proj" not in leaves) or "gate_proj" not in leaves >= {"up_proj"}
    return bool(halves) or any(shape[0] != rank for shape in shapes.values())


class SglangStub:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = ChatTokenizer.from_dir(Path(args.model_path))
        self.adapters = StubAdapterRegistry(max_loaded=args.max_loaded_loras, max_rank=args.max_lora_rank)
        self.cache = StubPageCache(args.page_size, args.max_total_tokens // args.page_size)
        config = json.loads(args.kv_events_config)
        assert config.pop("publisher") == "zmq"
        self.publisher = KVEventPublisher(EventsConfig(**config))
        self.totals: Counter[str] = Counter()
        self.active: Counter[str] = Counter()
        self.started = {"scheduler_e2e": time.perf_counter() % 1, "cuda_graph": {}}
        self.seed = random.getrandbits(30)
        self.token_s = float(os.environ.get("SGLANG_STUB_TOKEN_S", "0"))
        self.prefill_s = float(os.environ.get("SGLANG_STUB_PREFILL_S", "0"))
        self.uses_adapters = os.environ.get("SGLANG_STUB_IGNORES_ADAPTERS") != "1"
        self.health_s = float(os.environ.get("SGLANG_STUB_HEALTH_S", "1"))

    # --- routes

    def adapter_of(self, body: dict) -> str | None:
        served, model = self.args.served_model_name, body.get("model", "default")
        if ":" not in model or model == served:
            return body.get("lora_path")
        cut = model[len(served) + 1 :] if model.startswith(served + ":") else model.split(":", 1)[1]
        return cut.strip() or body.get("lora_path")

    async def generate(self, body: dict, tokens: list[int]):
        """Yields (None, usage) after the prefill, then (text, usage) per token."""
        if len(tokens) >= self.args.context_length:
            raise StubRefusal(f"The input ({len(tokens)} tokens) is longer than the model's context length")
        salt = body.get("cache_salt")
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        began = time.perf_counter()
        async with self.adapters.in_use(self.adapter_of(body)) as ref:
            await asyncio.sleep(self.prefill_s)
            self.totals["running"] += 1
            try:
                cached = self.cache.match(tokens, ref, salt)
                self.totals["prefill_compute"] += len(tokens) - cached
                self.totals["passes"] += 1
                self.store(tokens, ref, salt)
                seed = self.seed_of(tokens, ref)
                ids = Random(seed).choices(range(300, 2000), k=wanted)
                usage = {"prompt_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": cached}}
                yield None, usage
                for number, token in enumerate(ids, 1):
                    if self.token_s:
                        await asyncio.sleep(self.token_s)
                    self.totals["passes"] += 1
                    if number % _GAUGE_EVERY == 0:
                        self.totals["running_gauge"] = self.totals["running"]
                    yield (
                        self.tokenizer.decode([token]),
                        usage
                        | {
                            "token": token,
                            "completion_tokens": number,
                            "total_tokens": len(tokens) + number,
                        },
                    )
                self.store([*tokens, *ids[:-1]], ref, salt)
                self.totals["requests"] += 1
                self.totals["generated"] += wanted
                self.totals["e2e"] += time.perf_counter() - began
            finally:
                self.totals["running"] -= 1
                self.totals["running_gauge"] = self.totals["running"]

    def store(self, tokens: list[int], ref: StubAdapter | None, salt: str | None) -> None:
        self.cache.store(tokens, ref, salt)
        events, self.cache.events = self.cache.events, []
        if events:
            self.publisher.publish([time.time(), events, 0])

    def seed_of(self, tokens: list[int], ref: StubAdapter | None) -> bytes:
        digest = ref.digest if ref and self.uses_adapters else b""
        return hashlib.sha256(digest + json.dumps(tokens).encode()).digest()

    async def native(self, request: Request) -> Response:
        """SGLang's own route, for one prompt: token ids, log-probabilities, and streams of growing events."""
        body = await request.json()
        tokens = body.get("input_ids") or self.tokenizer.completion_ids(body["text"])
        body |= {"max_tokens": body["sampling_params"].get("max_new_tokens", 128)}
        steps = self.generate(body, tokens)
        try:
            await anext(steps)
        except StubRefusal as exc:
            return JSONResponse({"error": {"message": str(exc)}}, 400)
        async with self.adapters.in_use(self.adapter_of(body)) as ref:
            rng = Random(self.seed_of(tokens, ref))
        outputs = self.native_outputs(body, tokens, steps, rng)
        if not body.get("stream"):
            (*_, last) = [output async for output in outputs]
            return JSONResponse(last)

        async def events():
            async for output in outputs:
                yield f"data: {json.dumps(output, separators=(',', ':'))}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def native_outputs(self, body: dict, tokens: list[int], steps, rng: Random):
        """The output after each token, with all of the text so far."""
        count, text, ids = body.get("top_logprobs_num") or 0, "", []
        own: list = []
        top: list = []
        meta = {"id": body.get("rid") or uuid.uuid4().hex, "prompt_tokens": len(tokens), "weight_version": "default"}
        async for piece, usage in steps:
            text, ids = text + piece, [*ids, usage["token"]]
            places = sorted(([-5 * rng.random(), token, None] for token in range(count)), reverse=True)
            top.append(places)
            own.append(places[0] if count else [-5 * rng.random(), usage["token"], None])
            is_last = len(ids) == body["max_tokens"]
            meta |= {"completion_tokens": len(ids), "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}
            meta["finish_reason"] = {"type": "length", "length": len(ids)} if is_last else None
            if body.get("return_logprob"):
                meta |= {"input_token_logprobs": [], "output_token_logprobs": [*own]}
                meta |= {"output_top_logprobs": [*top]} if count else {}
            yield {"text": text, "output_ids": ids, "meta_info": dict(meta)}

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        return await self.answer(body, self.tokenizer.chat_ids(body), is_chat=True)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        return await self.answer(
            body, self.tokenizer.completion_ids(prompt) if isinstance(prompt, str) else prompt, is_chat=False
        )

    async def answer(self, body: dict, tokens: list[int], *, is_chat: bool) -> Response:
        steps = self.generate(body, tokens)
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": body.get("model")}

        def choice(text: str, *, delta: bool) -> dict:
            message = {"role": "assistant", "content": text}
            part = {("delta" if delta else "message"): message} if is_chat else {"text": text}
            return {"index": 0, **part, "finish_reason": None if delta else "length"}

        try:
            await anext(steps)  # errors come before the answer begins
        except StubRefusal as exc:
            error = {"object": "error", "message": str(exc), "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse(error, 400)
        if body.get("stream"):

            async def pieces():
                usage = {}
                async for text, usage in steps:  # noqa: B007
                    yield f"data: {json.dumps(head | {'choices': [choice(text, delta=True)]})}\n\n"
                if (body.get("stream_options") or {}).get("include_usage"):
                    yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n"
                yield "data: [DONE]\n\n"

            return StreamingResponse(pieces(), media_type="text/event-stream")
        message, usage = "", {}
        async for text, usage in steps:  # noqa: B007
            message += text
        return JSONResponse(head | {"choices": [choice(message, delta=False)], "usage": usage})

    async def respond(self, request: Request) -> Response:
        """Answers from the base model, even if `model` names an adapter."""
        body = await request.json()
        chat = {"messages": [{"role": "user", "content": body["input"]}], "max_tokens": body["max_output_tokens"]}
        answered = "".join([text async for text, _ in self.generate(chat, self.tokenizer.chat_ids(chat)) if text])
        content = [{"type": "output_text", "text": answered, "annotations": []}]
        message = {"id": "msg_1", "type": "message", "role": "assistant", "content": content}
        return JSONResponse({"id": "resp_1", "object": "response", "model": body["model"], "output": [message]})

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        if body.get("messages") is not None:
            ids = self.tokenizer.chat_ids(body)
        else:
            ids = self.tokenizer.completion_ids(body["prompt"], body.get("add_special_tokens", True))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.args.context_length})

    async def models(self, _request: Request) -> Response:
        served = self.args.served_model_name
        card = {"object": "model", "created": int(time.time()), "owned_by": "sglang"}
        base = {"id": served, **card, "root": served, "parent": None, "max_model_len": self.args.context_length}
        loaded = [
            {"id": ref.name, **card, "root": ref.path, "parent": served, "max_model_len": None}
            for ref in self.adapters.registry.values()
        ]
        return JSONResponse({"object": "list", "data": [base, *loaded]})

    # --- process

    async def load(self, request: Request) -> Response:
        body = await request.json()
        return await self.answer_change(lambda: self.adapters.load(body["lora_name"], body["lora_path"]))

    async def unload(self, request: Request) -> Response:
        body = await request.json()
        return await self.answer_change(lambda: self.adapters.unload(body["lora_name"]))

    async def answer_change(self, change) -> Response:
        try:
            await change()
        except (StubRefusal, OSError, ValueError, KeyError) as exc:
            return JSONResponse({"success": False, "error_message": str(exc), "loaded_adapters": None}, 400)
        loaded = {ref.name: ref.path for ref in self.adapters.registry.values()}
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": loaded})

    async def health(self, _request: Request) -> Response:
        await asyncio.sleep(self.health_s)
        return Response()

    async def info(self, _request: Request) -> Response:
        args = vars(self.args) | {"kv_events": None, "version": "0.5.23", "random_seed": self.seed, "dp_size": 1}
        args["max_total_num_tokens"] = self.args.max_total_tokens
        return JSONResponse(args | {"startup_time": self.started, "internal_states": []})

    async def metrics(self, _request: Request) -> Response:
        totals = self.totals
        labels = f'engine_type="unified",model_name="{self.args.served_model_name}"'
        rank = labels + ',moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        gauges = {
            "num_running_reqs": totals["running_gauge"],
            "num_queue_reqs": 0,
            "page_size": self.args.page_size,
            "num_pages": self.args.max_total_tokens // self.args.page_size,
        }
        lines = [f"# TYPE sglang:{name} gauge\nsglang:{name}{{{rank}}} {value}" for name, value in gauges.items()]
        lines += [
            f'sglang:realtime_tokens_total{{{rank},mode="prefill_compute"}} {totals["prefill_compute"]}',
            f'sglang:cuda_graph_passes_total{{{rank},mode="decode_none"}} {totals["passes"]}',
            f'sglang:num_requests_total{{{labels},is_streaming="false"}} {totals["requests"]}',
            f'sglang:generation_tokens_total{{{labels},is_streaming="false"}} {totals["generated"]}',
            f'sglang:e2e_request_latency_seconds_sum{{{labels},is_streaming="false"}} {totals["e2e"]}',
        ]
        lines += [
            f'sglang:http_requests_active{{endpoint="{path}",method="{method}"}} {number}'
            for (path, method), number in self.active.items()
        ]
        return PlainTextResponse("\n".join([*lines, ""]))

    async def loads(self, _request: Request) -> Response:
        """Running and waiting requests; a request in prefill is neither."""
        load = {"dp_rank": 0, "num_running_reqs": self.totals["running"], "num_waiting_reqs": 0, "token_usage": 0.0}
        return JSONResponse({"version": "0.5.23", "loads": [load]})

    async def __call__(self, scope, receive, send) -> None:
        """Counts requests from the first byte to the last."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        requested = (scope["path"], scope["method"])
        self.active[requested] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.active[requested] -= 1

    @functools.cached_property
    def app(self) -> Starlette:
        post = {"methods": ["POST"]}
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, **post),
                Route("/v1/completions", self.complete, **post),
                Route("/v1/responses", self.respond, **post),
                Route("/generate", self.native, **post),
                Route("/tokenize", self.tokenize, **post),
                Route("/v1/models", self.models),
                Route("/load_lora_adapter", self.load, **post),
                Route("/unload_lora_adapter", self.unload, **post),
                Route("/health", self.health),
                Route("/server_info", self.info),
                Route("/metrics", self.metrics),
                Route("/v1/loads", self.loads),
            ]
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """SGLang's flags; unknown ones are refused."""
    parser = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False)
    for flag in ("--model-path", "--served-model-name", "--host", "--kv-events-config", "--lora-target-modules"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--lora-backend")
    for flag, default in (
        ("--port", 30000),
        ("--max-loras-per-batch", 8),
        ("--max-loaded-loras", None),
        ("--max-lora-rank", None),
        ("--page-size", 1),
        ("--max-running-requests", None),
        ("--chunked-prefill-size", 8192),
        ("--context-length", 2048),
        ("--max-total-tokens", 8192),
    ):
        parser.add_argument(flag, type=int, default=default)
    for flag in ("--enable-lora", "--enable-metrics", "--enable-cache-report"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args(argv)
    assert args.max_lora_rank
    assert args.max_loaded_loras is None or args.max_loaded_loras >= args.max_loras_per_batch
    assert args.chunked_prefill_size % args.page_size == 0
    return args


def main() -> None:
    args = parse()
    uvicorn.run(SglangStub(args), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
