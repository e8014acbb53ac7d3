"""The kinds of engines: which an agent can drive, and why not the others."""

from collections.abc import Mapping

from workers.engines.base import Engine
from workers.engines.sglang import SglangEngine
from workers.engines.vllm import VllmEngine

# A kind's dialect. The sim speaks vLLM's.
_CLIENTS: Mapping[str, type[VllmEngine] | type[SglangEngine]] = {
    "vllm": VllmEngine,
    "sim": VllmEngine,
    "sglang": SglangEngine,
}


def connect(kind: str, url: str) -> Engine:
    """A client that speaks to this kind of engine. Close it."""
    return _CLIENTS[kind](url)
