"""What the agent needs of an engine; each engine's own words stay in its file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.kv.connectors import ConnectorVerdict
from lorafleet.kv.sources import KvEventEndpoints


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """How an engine differs from the next."""

    dialect: str
    keeps_ghosts: bool
    """Unloaded weights stay until an LRU drops them."""
    takes_adapters: Literal["while running", "with a request", "at its start"] = "while running"
    loads_at_once: int = 1
    """Loads it may be given at once while it serves nobody; more than one only where that was measured to help."""


# Engines that no agent can load adapters into (docs/engines.md).
STATIC: Mapping[str, EngineTraits] = {
    "llama.cpp": EngineTraits("llama.cpp", keeps_ghosts=False, takes_adapters="at its start"),
    "sgl-jax": EngineTraits("sgl-jax", keeps_ghosts=False, takes_adapters="at its start"),
    "tgi": EngineTraits("tgi", keeps_ghosts=False, takes_adapters="at its start"),
    "lorax": EngineTraits("lorax", keeps_ghosts=False, takes_adapters="with a request"),
    "tensorrt-llm": EngineTraits("tensorrt-llm", keeps_ghosts=False, takes_adapters="with a request"),
}


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What a running engine says of itself. 0 and "" where it does not say.

    mark  its `boot_mark`, where that was read with the rest
    """

    block_size: int = 0
    total_kv_blocks: int = 0
    max_model_len: int = 0
    model_name: str = ""
    mark: str = ""


class EngineClient(Protocol):
    """A running engine. Every method raises EngineError: unreachable, timeout, or refused."""

    @property
    def url(self) -> str: ...

    @property
    def traits(self) -> EngineTraits: ...

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """Load; when it returns, the engine has said that it has the adapter."""

    async def unload(self, name: str, *, timeout_s: float) -> None:
        """Take the name away; an unknown name is fine. Requests in flight go on."""

    async def adapters(self) -> Mapping[str, str]:
        """engine name -> path of every adapter that answers."""

    async def shape(self) -> EngineShape: ...

    async def is_healthy(self, *, timeout_s: float) -> bool: ...

    async def gives_tokens(self, model: str, *, timeout_s: float) -> bool:
        """Whether a request for one token of the base model is answered in time."""

    async def scrape(self) -> EngineMetrics: ...

    async def kv_sources(self) -> KvEventEndpoints:
        """Where its KV events are, of an engine that we did not start; nothing where it does not say."""

    async def connector(self) -> ConnectorVerdict:
        """What it tells of its KV connector, of an engine whose command does not say."""

    async def boot_mark(self) -> str:
        """What tells this start of the engine from any other, where nobody gave it a boot id."""

    async def aclose(self) -> None: ...
