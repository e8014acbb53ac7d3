"""vLLM's HTTP API for chats and completions, tokens and adapters; no other route that takes a prompt."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lorafleet.tokenizer.chat import ChatTokenizer
from lorafleet.tokenizer.messages import Untokenizable
from workers.engines.sim import answers, bodies
from workers.engines.sim.adapters import AdapterRefused, NoAdapterFound, SimAdapter
from workers.engines.sim.bodies import ErrorAnswer
from workers.engines.sim.engine import EngineDeadError, EngineDraining, SimEngine, StreamedJob
from workers.engines.sim.settings import SimSettings
from workers.engines.sim.text import TextGenerator
from workers.engines.sim.timing import FinishReason

VERSION = "0.32.0"
_LONG_TEXT = 2**14  # characters: 7 ms of work


@dataclass(slots=True)
class GenerationRequest:
    """A request for text, read and checked."""

    head: answers.AnswerHead
    body: bodies.GenerationBody
    adapter: SimAdapter | None
    prompts: list[list[int]]
    limits: list[int]
    echoes: list[str]


@dataclass(slots=True)
class SimHandlers:
    """The handlers. One method a route."""

    settings: SimSettings
    engine: SimEngine
    tokenizer: ChatTokenizer
    words: TextGenerator
    vocabulary: int
    fingerprint: str

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body = bodies.parse(bodies.ChatBody, await _json(request))
        bodies.check_generate(body)
        adapter = self._adapter(body.model)
        if body.logprobs:
            raise ErrorAnswer("the sim engine computes no logprobs; ask without `logprobs`", param="logprobs")
        if not body.messages:
            raise ErrorAnswer("Cannot apply chat template to an empty conversation. Provide at least one message.")
        prompt = body.given_ids
        if prompt is None:
            text, special = self._rendered(body)
            prompt = await self._ids(text, special=special)
        self._check_vocabulary(body.given_ids or ())
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        bodies.check_length(len(prompt), self.settings.max_model_len, from_text=True)
        return await self._generate(request, body, adapter, [prompt], wanted, [""])

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body = bodies.parse(bodies.CompletionBody, await _json(request))
        bodies.check_generate(body)
        asked = bodies.prompts_of(body)
        adapter = self._adapter(body.model)
        if body.logprobs is not None:
            raise ErrorAnswer("the sim engine computes no logprobs; ask without `logprobs`", param="logprobs")
        prompts: list[list[int]] = []
        for prompt in asked:
            if isinstance(prompt, str):
                ids = await self._ids(prompt, special=body.add_special_tokens)
            else:
                ids = prompt
            bodies.check_length(len(ids), self.settings.max_model_len, from_text=isinstance(prompt, str))
            self._check_vocabulary(ids)
            prompts.append(ids)
        echoes = [(p if isinstance(p, str) else self.tokenizer.decode(p)) if body.echo else "" for p in asked]
        return await self._generate(request, body, adapter, prompts, body.max_tokens, echoes)

    async def _generate(
        self,
        request: Request,
        body: bodies.GenerationBody,
        adapter: SimAdapter | None,
        prompts: list[list[int]],
        wanted: int | None,
        echoes: list[str],
    ) -> Response:
        limit = self.settings.max_model_len
        bodies.check_sampling(body, wanted, limit)
        limits = [bodies.output_limit(wanted, len(prompt), limit) for prompt in prompts]
        is_chat = isinstance(body, bodies.ChatBody)
        name = request.headers.get("x-request-id") or body.request_id or answers.random_id()
        head = answers.AnswerHead(
            is_chat=is_chat,
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            created=int(time.time()),
            model=adapter.name if adapter else self.settings.served_model_name[0],
            fingerprint=self.fingerprint,
            show_cached=self.settings.enable_prompt_tokens_details,
            token_ids=bool(body.return_token_ids),
            choices_per_prompt=body.n,
            block_size=self.settings.block_size,
        )
        self.engine.check_alive()
        if adapter is not None and any(adapter.fails(prompt) for prompt in prompts):
            raise ErrorAnswer(
                f"adapter {adapter.name} fails this prompt, as its config says", "InternalServerError", 500
            )
        if adapter is not None and adapter.delay_s:
            await asyncio.sleep(adapter.delay_s)
        asked = GenerationRequest(
            head, body, adapter, prompts, limits, [echo for echo in echoes for _ in range(body.n)]
        )
        if body.stream:
            return StreamingResponse(self._stream(asked), media_type="text/event-stream")
        return await self._answer(request, asked)

    @asynccontextmanager
    async def _running(
        self, asked: GenerationRequest
    ) -> "AsyncIterator[tuple[list[StreamedJob], asyncio.Queue[StreamedJob]]]":
        """The jobs of one request and what they tell; aborted if the reader leaves early."""
        told: asyncio.Queue[StreamedJob] = asyncio.Queue()
        jobs: list[StreamedJob] = []
        body = asked.body
        digest = asked.adapter.digest if asked.adapter else b""
        try:
            for prompt, limit in zip(asked.prompts, asked.limits, strict=True):
                for choice in range(body.n):
                    reply = self.words.reply(
                        digest, prompt, choice=choice, max_tokens=limit, ignore_eos=body.ignore_eos, stops=body.stops
                    )
                    jobs.append(
                        self.engine.submit(
                            prompt,
                            reply,
                            adapter=asked.adapter,
                            cache_salt=body.cache_salt,
                            report_reused=body.reports_reused,
                            told=told.put_nowait,
                        )
                    )
            yield jobs, told
        finally:
            for job in jobs:
                self.engine.abort(job)

    async def _answer(self, request: Request, asked: GenerationRequest) -> Response:
        async with self._running(asked) as (jobs, told):
            finished = asyncio.ensure_future(_all_ended(jobs, told))
            gone = asyncio.ensure_future(_disconnected(request))
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not finished.done():
                finished.cancel()
                return Response(status_code=499)  # nobody is left to read it
            finished.result()
            return JSONResponse(answers.complete(asked.head, jobs, asked.echoes))

    async def _stream(self, asked: GenerationRequest) -> AsyncIterator[str]:
        head, options = asked.head, asked.body.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats and with_usage)
        try:
            async with self._running(asked) as (jobs, told):
                places = {job: index for index, job in enumerate(jobs)}
                seen = dict.fromkeys(jobs, 0)
                while any(seen[job] < len(job.reply) for job in jobs):
                    job = _alive(await told.get())
                    if head.is_chat and not any(seen.values()):
                        for index, other in enumerate(jobs):
                            yield _event(answers.role_chunk(head, index, other, continuous=continuous))
                    first, seen[job] = seen[job], job.produced  # several tokens at once for a slow reader, as vLLM
                    if first == job.produced:
                        continue
                    index = places[job]
                    text = "" if first else asked.echoes[index]
                    text += "".join(job.reply_text.pieces[first : job.produced])
                    yield _event(
                        answers.text_chunk(
                            head, index, job, first, job.produced, text, continuous=continuous, sign=not with_usage
                        )
                    )
                if with_usage:
                    yield _event(answers.usage_chunk(head, jobs))
        except (EngineDeadError, EngineDraining) as exc:  # the 200 is out: in-band, as vLLM
            error = ErrorAnswer(str(exc), "InternalServerError", 500).body()
            yield f"data: {json.dumps(error)}\n\n"  # with spaces, unlike every other event
        yield "data: [DONE]\n\n"

    async def models(self, _request: Request) -> Response:
        """GET /v1/models"""
        given = self.settings
        adapters = list(self.engine.adapters.values())
        listed = answers.model_list(given.served_model_name, str(given.model), given.max_model_len, adapters)
        return JSONResponse(listed)

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter"""
        body = bodies.parse(bodies.LoadAdapterBody, await _json(request))
        name = body.lora_name
        if not name or not body.lora_path:
            raise ErrorAnswer("Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name in self.settings.served_model_name:
            raise ErrorAnswer(f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
        if body.load_inplace:
            raise ErrorAnswer(
                "the sim engine does not load in place; unload first, or use a new name", "InvalidUserInput"
            )
        if name in self.engine.adapters:
            raise ErrorAnswer(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                "InvalidUserInput",
            )
        try:
            await self.engine.load(name, body.lora_path)
        except NoAdapterFound as exc:
            raise ErrorAnswer(str(exc), "NotFoundError", 404) from exc
        except AdapterRefused as exc:
            raise ErrorAnswer(
                f"Call to add_lora method failed: Worker failed with error '{exc}', please check the stack trace above "
                "for the root cause",
                "InternalServerError",
                500,
            ) from exc
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter"""
        name = bodies.parse(bodies.UnloadAdapterBody, await _json(request)).lora_name
        if not name:
            raise ErrorAnswer("'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
        if name not in self.engine.adapters:
            raise ErrorAnswer(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        self.engine.unload(name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        body = bodies.parse_tokenize(await _json(request))
        self._adapter(body.model)
        if isinstance(body, bodies.TokenizeChatBody):
            text, special = self._rendered(body)
        else:
            text, special = body.prompt, body.add_special_tokens
        tokens = await self._ids(text, special=special, bounded=False)
        if body.return_token_strs:
            raise ErrorAnswer("the sim engine returns no token strings; ask without `return_token_strs`")
        answer = {"count": len(tokens), "max_model_len": self.settings.max_model_len, "tokens": tokens}
        return JSONResponse(answer | {"token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        body = bodies.parse(bodies.DetokenizeBody, await _json(request))
        self._adapter(body.model)
        return JSONResponse({"prompt": self.tokenizer.decode(body.tokens)})

    async def health(self, _request: Request) -> Response:
        """GET /health and /ping: 503 once the engine has died."""
        return Response(status_code=503 if self.engine.is_dead else 200)

    async def version(self, _request: Request) -> Response:
        """GET /version"""
        return JSONResponse({"version": VERSION})

    async def load(self, _request: Request) -> Response:
        """GET /load: 0 without --enable-server-load-tracking, which is vLLM's default."""
        return JSONResponse({"server_load": 0})

    async def kv_event_sources(self, _request: Request) -> Response:
        """GET /kv_event_sources"""
        events = self.settings.kv_events
        return JSONResponse({"0": asdict(events) | {"publisher": "zmq"}} if events.is_on else {})

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics"""
        page = self.engine.metrics.page()
        return Response(page, headers={"content-type": "text/plain; version=1.0.0; charset=utf-8"})

    async def reset_prefix_cache(self, _request: Request) -> Response:
        """POST /reset_prefix_cache, with VLLM_SERVER_DEV_MODE=1 only. The event goes out with the next step."""
        self.engine.batch.pool.clear()
        return Response(status_code=200)

    def _rendered(self, body: bodies.MessagesBody | bodies.TokenizeChatBody) -> tuple[str, bool]:
        """A chat's prompt, and whether special tokens go around it. Raises `ErrorAnswer`."""
        try:
            return self.tokenizer.prompt_text(body.model_dump(exclude_unset=True))
        except Untokenizable as exc:
            raise ErrorAnswer(str(exc)) from exc

    async def _ids(self, text: str, *, special: bool, bounded: bool = True) -> list[int]:
        """Token ids. Raises `ErrorAnswer`, of a prompt (`bounded`) that no context holds before it is tokenized.

        Those of a long text are made beside the loop, as vLLM makes all: an engine that does not answer for the ten
        seconds that 30 MB take is taken for one that hangs.
        """
        if bounded:
            bodies.check_characters(text, self.settings.max_model_len, self.tokenizer.max_chars_per_token)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=special)
        try:
            return encode() if len(text) < _LONG_TEXT else await asyncio.to_thread(encode)
        except Untokenizable as exc:
            raise ErrorAnswer(str(exc)) from exc

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        if unknown := [token for token in ids if token >= self.vocabulary]:
            raise ErrorAnswer(f"Token id {max(unknown)} is out of vocabulary")

    def _adapter(self, model: str | None) -> SimAdapter | None:
        """What `model` names; None is the base model. Raises `ErrorAnswer` with vLLM's 404."""
        if not model or model in self.settings.served_model_name:
            return None
        if model in self.engine.adapters:
            return self.engine.adapters[model]
        if self.settings.runtime_loras:
            self.engine.next_int_id()
        aliases = ", ".join(self.settings.served_model_name)
        message = f"The model `{model}` does not exist. Valid aliases: {aliases}."
        raise ErrorAnswer(message, "NotFoundError", 404, param="model")


def make_app(service: SimHandlers, background: Callable[[], Awaitable[None]]) -> Starlette:
    """The routes. `background` runs for as long as the app does."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        task = asyncio.ensure_future(background())
        try:
            yield
        finally:
            task.cancel()

    return Starlette(
        routes=_routes(service),
        middleware=[Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])],
        exception_handlers={
            ErrorAnswer: _refused,
            HTTPException: _not_served,
            EngineDraining: _broken,
            EngineDeadError: _broken,
        },
        lifespan=lifespan,
    )


def _routes(service: SimHandlers) -> list[Route]:
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
    ]
    if service.settings.enable_lora and service.settings.runtime_loras:
        routes += [
            Route("/v1/load_lora_adapter", service.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", service.unload_adapter, methods=["POST"]),
        ]
    if service.settings.dev_mode:
        routes.append(Route("/reset_prefix_cache", service.reset_prefix_cache, methods=["POST"]))
    for path, handler in {
        "/v1/models": service.models,
        "/health": service.health,
        "/version": service.version,
        "/load": service.load,
        "/kv_event_sources": service.kv_event_sources,
        "/metrics": service.metrics,
    }.items():
        routes.append(Route(path, handler, methods=["GET"]))
    routes.append(Route("/ping", service.health, methods=["GET", "POST"]))
    for route in routes:
        (route.methods or set()).discard("HEAD")  # Starlette adds it to GET; FastAPI, and so vLLM, does not
    return routes


async def _json(request: Request) -> Any:
    return bodies.read_json(await request.body(), request.headers.get("content-type", ""))


async def _all_ended(jobs: Sequence[StreamedJob], told: "asyncio.Queue[StreamedJob]") -> None:
    while any(job.ended is None for job in jobs):
        await told.get()
    for job in jobs:
        _alive(job)


def _alive(job: StreamedJob) -> StreamedJob:
    if job.ended is FinishReason.ERROR:
        raise EngineDeadError
    return job


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _refused(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ErrorAnswer)
    return JSONResponse(exc.body(), status_code=exc.status)


async def _broken(_request: Request, exc: Exception) -> Response:
    return JSONResponse(ErrorAnswer(str(exc), "InternalServerError", 500).body(), status_code=500)


async def _not_served(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return JSONResponse({"detail": exc.detail}, status_code=exc.status_code, headers=exc.headers)
