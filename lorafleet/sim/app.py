"""vLLM's HTTP routes: chats, completions, tokens, adapters, health and metrics."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorafleet.sim import answers, bodies
from lorafleet.sim.adapters import AdapterRefused, NoAdapterFound
from lorafleet.sim.bodies import ErrorAnswer
from lorafleet.sim.engine import EngineDeadError, EngineDraining, SimEngine
from lorafleet.sim.generation import GenerationHandlers
from lorafleet.sim.pooling import PoolingHandlers
from lorafleet.sim.prompts import PromptReader, read_json
from lorafleet.sim.settings import SimSettings
from lorafleet.tokenizer.chat import read_files

VERSION = "0.32.0"


@dataclass(slots=True)
class SimHandlers:
    """The handlers of all routes; those that generate text are in `generation`, those that pool in `pooling`."""

    settings: SimSettings
    engine: SimEngine
    prompts: PromptReader
    generation: GenerationHandlers
    pooling: PoolingHandlers

    async def models(self, _request: Request) -> Response:
        """GET /v1/models: the base model and the loaded adapters."""
        settings = self.settings
        adapters = list(self.engine.adapters.values())
        listed = answers.model_list(settings.served_model_name, str(settings.model), settings.max_model_len, adapters)
        return JSONResponse(listed)

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: load an adapter into the engine. Raises `ErrorAnswer` with vLLM's messages."""
        body = bodies.parse_body(bodies.LoadAdapterBody, await read_json(request))
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
            raise ErrorAnswer(f"Call to add_lora method failed: {exc}", "InternalServerError", 500) from exc
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: remove an adapter's name from the engine. Raises `ErrorAnswer`."""
        name = bodies.parse_body(bodies.UnloadAdapterBody, await read_json(request)).lora_name
        if not name:
            raise ErrorAnswer("'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
        if not await self.engine.unload(name):
            raise ErrorAnswer(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: token ids of a prompt or chat. Raises `ErrorAnswer`."""
        body = bodies.parse_tokenize(await read_json(request))
        await self.prompts.adapter_named(body.model)
        if isinstance(body, bodies.TokenizeChatBody):
            text, special = self.prompts.render_chat(body)
        else:
            text, special = body.prompt, body.add_special_tokens
        tokens = await self.prompts.token_ids(text, special=special, bounded=False)
        if body.return_token_strs:
            raise ErrorAnswer("the sim engine returns no token strings; ask without `return_token_strs`")
        answer = {"count": len(tokens), "max_model_len": self.settings.max_model_len, "tokens": tokens}
        return JSONResponse(answer | {"token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids. Raises `ErrorAnswer`."""
        body = bodies.parse_body(bodies.DetokenizeBody, await read_json(request))
        await self.prompts.adapter_named(body.model)
        return JSONResponse({"prompt": self.prompts.tokenizer.decode(body.tokens)})

    async def tokenizer_info(self, _request: Request) -> Response:
        """GET /tokenizer_info: the model's tokenizer_config.json, its tokens as texts, with the chat template."""
        files = read_files(self.settings.model)
        config = {
            name: value["content"] if isinstance(value, dict) and "content" in value else value
            for name, value in json.loads(files.get("tokenizer_config.json", "{}")).items()
        }
        template = files.get("chat_template.jinja")
        return JSONResponse(config | ({} if template is None else {"chat_template": template}))

    async def health(self, _request: Request) -> Response:
        """GET /health and /ping: 503 once the engine has died."""
        return Response(status_code=503 if self.engine.is_dead else 200)

    async def version(self, _request: Request) -> Response:
        """GET /version: the vLLM version that is simulated."""
        return JSONResponse({"version": VERSION})

    async def load(self, _request: Request) -> Response:
        """GET /load: always 0, as in a vLLM without --enable-server-load-tracking (the default)."""
        return JSONResponse({"server_load": 0})

    async def kv_event_sources(self, _request: Request) -> Response:
        """GET /kv_event_sources: the KV event settings of rank 0; empty if no events are published."""
        events = self.settings.kv_events
        return JSONResponse({"0": asdict(events) | {"publisher": "zmq"}} if events.is_on else {})

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics: the engine's metrics for Prometheus."""
        page = self.engine.metrics.page()
        return Response(page, headers={"content-type": "text/plain; version=1.0.0; charset=utf-8"})

    async def reset_prefix_cache(self, _request: Request) -> Response:
        """POST /reset_prefix_cache: clear the KV cache unless requests use it; the next step publishes the event.

        The route exists only with VLLM_SERVER_DEV_MODE=1.
        """
        self.engine.batch.pool.clear()
        return Response(status_code=200)


def make_app(handlers: SimHandlers, background: Callable[[], Awaitable[None]]) -> Starlette:
    """The app with all routes; `background` runs as a task from its start to its end."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        """Run `background` as a task while the app runs, then cancel it."""
        task = asyncio.ensure_future(background())
        try:
            yield
        finally:
            task.cancel()

    return Starlette(
        routes=_routes(handlers),
        middleware=[Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])],
        exception_handlers={
            ErrorAnswer: _answer_error,
            HTTPException: _answer_http_exception,
            EngineDraining: _answer_engine_error,
            EngineDeadError: _answer_engine_error,
        },
        lifespan=lifespan,
    )


def _routes(handlers: SimHandlers) -> list[Route]:
    """All routes; those for prompts, adapters and cache resets depend on the settings, as in vLLM."""
    routes = [
        *(_pooling_routes(handlers.pooling) if handlers.settings.pools else _text_routes(handlers.generation)),
        Route("/tokenize", handlers.tokenize, methods=["POST"]),
        Route("/detokenize", handlers.detokenize, methods=["POST"]),
    ]
    if handlers.settings.tells_tokenizer:
        routes.append(Route("/tokenizer_info", handlers.tokenizer_info, methods=["GET"]))
    if handlers.settings.enable_lora and handlers.settings.runtime_loras:
        routes += [
            Route("/v1/load_lora_adapter", handlers.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", handlers.unload_adapter, methods=["POST"]),
        ]
    if handlers.settings.dev_mode:
        routes.append(Route("/reset_prefix_cache", handlers.reset_prefix_cache, methods=["POST"]))
    for path, handler in {
        "/v1/models": handlers.models,
        "/health": handlers.health,
        "/version": handlers.version,
        "/load": handlers.load,
        "/kv_event_sources": handlers.kv_event_sources,
        "/metrics": handlers.metrics,
    }.items():
        routes.append(Route(path, handler, methods=["GET"]))
    routes.append(Route("/ping", handlers.health, methods=["GET", "POST"]))
    for route in routes:
        (route.methods or set()).discard("HEAD")  # Starlette adds it to GET; FastAPI, and so vLLM, does not
    return routes


def _text_routes(handlers: GenerationHandlers) -> list[Route]:
    """The routes of a model that generates text."""
    return [
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        Route("/v1/completions", handlers.completions, methods=["POST"]),
        Route("/inference/v1/generate", handlers.tokens, methods=["POST"]),
    ]


def _pooling_routes(handlers: PoolingHandlers) -> list[Route]:
    """The routes of a model that pools; vLLM has those of its task alone, the sim has all."""
    by_path = {"/v1/embeddings": handlers.embeddings, "/pooling": handlers.pooling, "/classify": handlers.classify}
    by_path |= dict.fromkeys(("/score", "/v1/score"), handlers.score)
    by_path |= dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), handlers.rerank)
    return [Route(path, handler, methods=["POST"]) for path, handler in by_path.items()]


async def _answer_error(_request: Request, exc: Exception) -> Response:
    """The answer to an `ErrorAnswer`, with its status."""
    assert isinstance(exc, ErrorAnswer)
    return JSONResponse(exc.body(), status_code=exc.status)


async def _answer_engine_error(_request: Request, exc: Exception) -> Response:
    """The 500 answer to an engine that has died or drains, with vLLM's envelope."""
    return JSONResponse(ErrorAnswer(str(exc), "InternalServerError", 500).body(), status_code=500)


async def _answer_http_exception(_request: Request, exc: Exception) -> Response:
    """The answer to Starlette's own errors, such as 404, as FastAPI gives it."""
    assert isinstance(exc, HTTPException)
    return JSONResponse({"detail": exc.detail}, status_code=exc.status_code, headers=exc.headers)
