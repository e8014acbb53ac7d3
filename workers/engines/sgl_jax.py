"""The client of sgl-jax (read in its source of August 2026, between 0.0.2 and 0.0.3).

How sgl-jax differs from SGLang:
- It takes adapters at its start alone (`--lora-paths`); no route loads, unloads or lists them. Its own arguments at
  `/get_server_info` name them, with their paths (srt/lora/lora_manager.py, entrypoints/http_server.py).
- A completion chooses an adapter by `lora_path`, and a wrong name is an error. Every other OpenAI route ignores the
  field: the base model answers (entrypoints/openai/serving_chat.py). So routers send adapters' requests to
  `/v1/completions` only (`router/request/engine_body.py`).
- It publishes no KV events, although it takes `--kv-events-config`; its /metrics has nothing about requests.
- `/health` answers while the scheduler hangs. Only a token proves that it works.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.kv.connectors import NO_CONNECTOR, ConnectorVerdict
from lorafleet.kv.sources import KvEventEndpoints
from workers.core.errors import EngineError
from workers.engines.base import EngineShape, EngineTraits
from workers.engines.client import HttpEngineClient
from workers.engines.sglang import int_or_zero, shape_of

_INFO_TIMEOUT_S = 10.0
_ITS_OWN_ARGUMENT = "precompile_token_paddings"  # SGLang's answer at this route has no such argument


class SglJaxClient(HttpEngineClient):
    """The client of one sgl-jax."""

    traits = EngineTraits(
        dialect="sgl-jax", keeps_ghosts=False, takes_adapters="at its start", publishes_kv_events=False
    )

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:  # noqa: ARG002  (nothing to wait for)
        """Confirm an adapter that the engine has had since its start.

        raises  EngineError `adapters_refused` for any other, `engine_timeout`, `engine_unreachable`
        """
        if not await self._has_loaded(name, path):
            _refuse_change()

    async def unload(self, name: str, *, timeout_s: float) -> None:  # noqa: ARG002  (nothing to wait for)
        """Confirm that the engine lacks an adapter; raises EngineError `adapters_refused` if it has it."""
        if name in await self.list_adapters():
            _refuse_change()

    async def list_adapters(self) -> Mapping[str, str]:
        """engine name -> path of the adapters that the engine was started with. Raises EngineError."""
        return {str(ref["lora_name"]): str(ref.get("lora_path") or "") for ref in _adapter_refs(await self._info())}

    async def read_shape(self) -> EngineShape:
        """The engine's shape from /get_server_info and /v1/models. Raises EngineError."""
        info = await self._info()
        return replace(shape_of(info, await self._base_model_entry()), boot_mark=_boot_mark(info))

    async def boot_mark(self) -> str:
        """A digest of the ids that the engine gave its adapters at its start. Raises EngineError.

        An engine without adapters has the same mark after a restart; it has lost nothing that the fleet counts on.
        """
        return _boot_mark(await self._info())

    async def scrape(self) -> EngineMetrics:
        """The scheduler's running and waiting requests, over all data-parallel ranks; it has no other metrics.

        Raises EngineError.
        """
        info = await self._info()
        states = [state for state in info.get("internal_states") or () if isinstance(state, dict)]
        shape = shape_of(info, {})
        return EngineMetrics(
            running=sum(int_or_zero(state.get("running_batch_size")) for state in states),
            waiting=sum(int_or_zero(state.get("waiting_queue_size")) for state in states),
            block_size=shape.runtime.block_size,
            total_kv_blocks=shape.runtime.total_kv_blocks,
        )

    async def kv_event_endpoints(self) -> KvEventEndpoints:
        """None: sgl-jax publishes no KV events."""
        return KvEventEndpoints()

    async def kv_connector(self) -> ConnectorVerdict:
        """None: its own cache keeps adapters apart by an id of each adapter (srt/managers/schedule_batch.py)."""
        return NO_CONNECTOR

    async def _info(self) -> Mapping[str, Any]:
        """Ask the engine for its arguments and state. Raises EngineError."""
        answer = await self._request("GET", "/get_server_info", timeout_s=_INFO_TIMEOUT_S)
        try:
            info = answer.json()
        except ValueError:
            info = None
        if not answer.is_success or not isinstance(info, dict) or _ITS_OWN_ARGUMENT not in info:
            message = (
                f"engine {self.url}: /get_server_info is not sgl-jax's (HTTP {answer.status_code});"
                " say with --engine what runs there"
            )
            raise EngineError("engine_unreachable", message, retry_after_s=2)
        return info


def _refuse_change() -> NoReturn:
    """Raises EngineError `adapters_refused`: the engine's adapters cannot change."""
    raise EngineError(
        "adapters_refused",
        "sgl-jax takes adapters at its start alone: change `preload_loras` and restart this worker, or use another one",
    )


def _adapter_refs(info: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The adapters in the engine's arguments; empty if adapters are not enabled there, so that it ignores them."""
    refs = info.get("lora_paths") if info.get("enable_lora") else None
    return [ref for ref in refs or () if isinstance(ref, dict) and ref.get("lora_name")]


def _boot_mark(info: Mapping[str, Any]) -> str:
    """A digest of the adapters' ids, which are drawn at each start."""
    ids = sorted(str(ref.get("lora_id")) for ref in _adapter_refs(info))
    return hashlib.sha256(" ".join(ids).encode()).hexdigest()[:32]
