"""Starts the sim and serves until a signal; the exit status is always 0, as in vLLM."""

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lorafleet.http_server.tls_handshake import TlsListener
from lorafleet.service.network.tls import Tls
from lorafleet.sim.app import VERSION, SimHandlers, make_app
from lorafleet.sim.engine import SimEngine
from lorafleet.sim.events import KVEventPublisher
from lorafleet.sim.generation import GenerationHandlers
from lorafleet.sim.metrics import SimMetrics
from lorafleet.sim.pooling import PoolingHandlers
from lorafleet.sim.prompts import PromptReader
from lorafleet.sim.settings import SimSettings, parse_settings
from lorafleet.sim.text import TextGenerator
from lorafleet.tokenizer.chat import ChatTokenizer


class SimServer(uvicorn.Server):
    """uvicorn without its own signal handling: a draining engine still answers /health, and 500 to new requests."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing; `serve` installs the signal handlers."""
        yield


async def serve(settings: SimSettings) -> None:
    """Serve until SIGTERM or SIGINT, then finish requests in flight for at most `shutdown_timeout`.

    The engine's death ends it, too. Raises OSError for unreadable model files and TLS files.
    """
    publisher = KVEventPublisher(settings.kv_events) if settings.kv_events.is_on else None
    stop = asyncio.Event()
    engine = SimEngine(settings, publisher, SimMetrics(settings), on_death=stop.set)
    app = make_app(handlers_of(settings, engine), engine.run)
    tls = Tls.of_service(settings.tls, clients=settings.ssl_cert_reqs)
    config = uvicorn.Config(
        app,
        http="auto" if tls is None else TlsListener(HttpToolsProtocol, tls),  # type: ignore[arg-type]
        host=settings.host,
        port=settings.port,
        ws="none",
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = SimServer(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ending = asyncio.ensure_future(_drain_and_stop(server, engine, stop))
    try:
        await server.serve()
    finally:
        ending.cancel()
        if publisher is not None:
            await asyncio.to_thread(publisher.close)


async def _drain_and_stop(server: uvicorn.Server, engine: SimEngine, stop: asyncio.Event) -> None:
    """Wait for `stop`, drain the engine for at most `shutdown_timeout`, and end the server."""
    await stop.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(engine.settings.shutdown_timeout):
            await engine.drain()
    server.should_exit = True


def handlers_of(settings: SimSettings, engine: SimEngine) -> SimHandlers:
    """The handlers with the model's tokenizer and text generator. Raises OSError if a file of the model is missing."""
    tokenizer = ChatTokenizer.from_dir(settings.model)
    config = _model_config(settings.model)
    vocabulary = int(config["vocab_size"])
    eos = config.get("eos_token_id", 0)
    text_generator = TextGenerator(
        tokenizer,
        vocabulary=vocabulary,
        eos=eos[0] if isinstance(eos, list) else eos,
        seed=settings.sim_seed,
        natural_tokens=settings.sim_response_tokens,
    )
    fingerprint = f"vllm-{VERSION}-{hashlib.sha256(repr(settings).encode()).hexdigest()[:8]}"
    prompts = PromptReader(settings, engine, tokenizer, vocabulary)
    generation = GenerationHandlers(settings, engine, prompts, text_generator, fingerprint)
    pooling = PoolingHandlers(settings, engine, prompts, _labels(config))
    return SimHandlers(settings, engine, prompts, generation, pooling)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the model's classes: of its config, else two."""
    named = config.get("id2label") or {number: f"LABEL_{number}" for number in range(int(config.get("num_labels", 2)))}
    return tuple(str(named[number]) for number in sorted(named, key=int))


def _model_config(model: Path) -> dict[str, Any]:
    """The model's config.json, overridden by its generation_config.json, as vLLM reads them."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    generation = model / "generation_config.json"
    return config | (json.loads(generation.read_text()) if generation.is_file() else {})


if __name__ == "__main__":
    asyncio.run(serve(parse_settings(sys.argv[1:])))
