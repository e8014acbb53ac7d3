"""The kinds of engines: which an agent can drive, and why not the others."""

from collections.abc import Mapping

from workers.engines.base import EngineClient
from workers.engines.sglang import SglangClient
from workers.engines.vllm import VllmClient

# A kind's dialect. The sim speaks vLLM's.
_CLIENTS: Mapping[str, type[VllmClient] | type[SglangClient]] = {
    "vllm": VllmClient,
    "sim": VllmClient,
    "sglang": SglangClient,
}


def connect(kind: str, url: str) -> EngineClient:
    """A client that speaks to this kind of engine. Close it."""
    return _CLIENTS[kind](url)
