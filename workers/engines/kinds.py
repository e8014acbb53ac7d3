"""The engine client of each kind of engine."""

from collections.abc import Mapping

from workers.engines.base import EngineClient
from workers.engines.sglang import SglangClient
from workers.engines.vllm import VllmClient

# The sim has vLLM's API.
_CLIENTS: Mapping[str, type[VllmClient] | type[SglangClient]] = {
    "vllm": VllmClient,
    "sim": VllmClient,
    "sglang": SglangClient,
}


def engine_client(kind: str, url: str) -> EngineClient:
    """A new client for an engine of this kind; the caller closes it."""
    return _CLIENTS[kind](url)
