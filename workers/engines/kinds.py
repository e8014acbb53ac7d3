"""The engine client of each kind of engine."""

from collections.abc import Mapping
from pathlib import Path

from lorafleet.service.network.tls import Tls
from workers.engines.base import EngineClient, EngineTraits
from workers.engines.sgl_jax import SglJaxClient
from workers.engines.sglang import SglangClient
from workers.engines.sglang_adapters import sgl_jax_refusal
from workers.engines.vllm import VllmClient

# The sim has vLLM's API.
_CLIENTS: Mapping[str, type[VllmClient] | type[SglangClient] | type[SglJaxClient]] = {
    "vllm": VllmClient,
    "sim": VllmClient,
    "sglang": SglangClient,
    "sgl-jax": SglJaxClient,
}


def engine_traits(kind: str) -> EngineTraits:
    """How engines of this kind behave."""
    return _CLIENTS[kind].traits


def refusal_at_start(kind: str, folder: Path) -> str:
    """Why an engine of this kind must not start with a verified adapter, or ""; reads its config and tensor header."""
    return sgl_jax_refusal(folder) if kind == "sgl-jax" else ""


def engine_client(kind: str, url: str, tls: Tls | None = None) -> EngineClient:
    """A new client for an engine of this kind; the caller closes it."""
    return _CLIENTS[kind](url, tls)
