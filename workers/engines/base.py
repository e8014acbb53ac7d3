"""What the agent needs of an engine; each engine's own words stay in its file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.wire import Dialect


@dataclass(frozen=True, slots=True)
class Traits:
    """How an engine differs from the next."""

    dialect: Dialect
    keeps_ghosts: bool
    """Unloaded weights stay until an LRU drops them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a running engine says of itself. 0 and "" where it does not say."""

    block_size: int = 0
    total_kv_blocks: int = 0
    max_model_len: int = 0
    model_name: str = ""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of the engine's metrics. Totals grow from the engine's start; None where it has no such counter."""

    running: int = 0
    waiting: int = 0
    waiting_for_slot: int = 0
    kv_usage: float = 0.0
    prefill_tokens: float | None = None
    prefill_seconds: float | None = None
    decode_tokens: float | None = None
    decode_seconds: float | None = None
    started_at: float = 0.0
    block_size: int = 0
    total_kv_blocks: int = 0


class Engine(Protocol):
    """A running engine. Every method raises EngineError: unreachable, timeout, or refused."""

    @property
    def url(self) -> str: ...

    @property
    def traits(self) -> Traits: ...

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """Load; when it returns, the engine has said that it has the adapter."""

    async def unload(self, name: str, *, timeout_s: float) -> None:
        """Take the name away; an unknown name is fine. Requests in flight go on."""

    async def adapters(self) -> Mapping[str, str]:
        """engine name -> path of every adapter that answers."""

    async def shape(self) -> Shape: ...

    async def is_healthy(self, *, timeout_s: float) -> bool: ...

    async def scrape(self) -> Scrape: ...
