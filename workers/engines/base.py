"""The interface between the agent and any kind of engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from lorafleet.engine.acceptance import Logprobs
from lorafleet.engine.canary import Fingerprint
from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.kv.connectors import ConnectorVerdict
from lorafleet.kv.sources import KvEventEndpoints
from workers.wire import UNKNOWN_RUNTIME, RuntimeConfig


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """How a kind of engine behaves."""

    dialect: str
    keeps_ghosts: bool
    """Unloaded weights stay in memory until an LRU drops them."""
    takes_adapters: Literal["while running", "with a request", "at its start"] = "while running"
    loads_at_once: int = 1
    """Concurrent loads while the engine serves no requests; more than one only if measured to be faster."""
    publishes_kv_events: bool = True


# Engines that no agent can drive (docs/engines.md).
UNSUPPORTED_ENGINES: Mapping[str, EngineTraits] = {
    "llama.cpp": EngineTraits("llama.cpp", keeps_ghosts=False, takes_adapters="at its start"),
    "tgi": EngineTraits("tgi", keeps_ghosts=False, takes_adapters="at its start"),
    "lorax": EngineTraits("lorax", keeps_ghosts=False, takes_adapters="with a request"),
    "tensorrt-llm": EngineTraits("tensorrt-llm", keeps_ghosts=False, takes_adapters="with a request"),
}


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Figures that a running engine reports about itself; 0 and "" if it does not.

    boot_mark   as of `EngineClient.boot_mark`, if it was read with the rest
    model_path  where it read the base model from, as it hashes it into the ids of pictures
    """

    runtime: RuntimeConfig = UNKNOWN_RUNTIME
    model_name: str = ""
    model_path: str = ""
    boot_mark: str = ""


class EngineClient(Protocol):
    """The client of one running engine. Every method raises EngineError: unreachable, timeout, or refused."""

    @property
    def url(self) -> str:
        """The engine's base URL."""

    @property
    def traits(self) -> EngineTraits:
        """How this kind of engine behaves."""

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """Load an adapter; returns when the engine confirms that it is loaded."""

    async def unload(self, name: str, *, timeout_s: float) -> None:
        """Unload an adapter; no error if it is not loaded. Requests that use it finish; an engine may wait for them."""

    async def list_adapters(self) -> Mapping[str, str]:
        """Ask the engine for its loaded adapters: engine name -> path."""

    async def read_shape(self) -> EngineShape:
        """Ask the engine for block size, block count, context length and name of the base model."""

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """Whether the health route answers with success in time. Never raises."""

    async def can_generate(self, model: str, *, timeout_s: float) -> bool:
        """Whether the base model returns one token in time, or pools one. Never raises."""

    async def fingerprint(self, adapter: str | None, prompt: Sequence[int], *, base_model: str) -> Fingerprint | None:
        """Numbers that the whole model determines, of one answer to a prompt of token ids; None without such numbers.

        Raises EngineSilent in place of EngineError. `adapter` is an engine name; None: the base model.
        """

    async def prompt_logprobs(
        self, adapter: str | None, prompts: Sequence[Sequence[int]], *, base_model: str
    ) -> Sequence[Logprobs] | None:
        """The log-probability of each token but the first of these prompts, in one request; None if it gives none.

        Raises EngineSilent in place of EngineError. `adapter` is an engine name; None: the base model.
        """

    async def scrape(self) -> EngineMetrics:
        """Read the engine's metrics."""

    async def kv_event_endpoints(self) -> KvEventEndpoints:
        """Ask an engine that we did not start for its KV event endpoints; empty if it does not report them."""

    async def kv_connector(self) -> ConnectorVerdict:
        """Ask the engine for its KV connector; returns the verdict on it. For an engine whose command names none."""

    async def takes_loads(self) -> bool:
        """Whether the engine loads and unloads adapters while it runs."""

    async def version(self) -> str:
        """Ask the engine for its version, such as `0.32.0`; "" if it does not say. Never raises."""

    async def boot_mark(self) -> str:
        """Ask the engine for a text that changes with every start, which serves as the boot id of a running engine."""

    async def aclose(self) -> None:
        """Close the client's connections."""
