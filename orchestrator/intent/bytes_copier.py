"""Copies the bytes of a publish: a worker's agent fetches, verifies and stores them by digest, once it sees them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lorafleet.identity import fleet_source, rendezvous_score
from orchestrator.core.errors import InvalidAdapter, OrchestratorUnavailable, PublishUnfinished, WorkerFailed
from orchestrator.core.published_names import may_become_visible
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.published import PublishSpec
from orchestrator.model.snapshot import ObservedWorker
from orchestrator.reconcile.reconciler import Reconciler

_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
"""Between two looks at bytes that are not visible yet: a network mount shows a new file within seconds."""


@dataclass(frozen=True, slots=True)
class PublishDeadline:
    """The end of a publish, on the orchestrator's clock."""

    began_at: float
    at: float
    clock: Callable[[], float]

    @property
    def left_s(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.at - self.clock())

    @property
    def since_s(self) -> float:
        """Seconds since the publish began."""
        return self.clock() - self.began_at


class BytesCopier:
    """Has agents copy bytes, the name's home first."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    async def copied(self, name: str, lora_id: str, spec: PublishSpec, deadline: PublishDeadline) -> RegisteredAdapter:
        """The adapter as a worker's agent has fetched, verified and stored it.

        Waits while no worker sees the bytes. Raises InvalidAdapter, PublishUnfinished, OrchestratorUnavailable.
        """
        source = spec.source or fleet_source(spec.digest or "")
        asked = RegisteredAdapter(
            spec=AdapterSpec(lora_id=lora_id, source=source, base_model=spec.base_model, digest=spec.digest)
        )
        pause_s = _PAUSE_S
        refusal: InvalidAdapter | WorkerFailed | None = None
        while True:
            for worker in self._copiers(name, spec.base_model):
                try:
                    async with asyncio.timeout(deadline.left_s):
                        return await self._reconciler.runner.inspect_unregistered(asked, worker.id)
                except InvalidAdapter as exc:
                    refusal = exc
                    if exc.code not in ("source_forbidden", "base_model_mismatch") and not may_become_visible(
                        exc.code, deadline.since_s
                    ):
                        raise
                except WorkerFailed as exc:
                    refusal = exc
                except TimeoutError:
                    break
            is_hopeless = refusal is not None and refusal.code in ("source_forbidden", "base_model_mismatch")
            if is_hopeless and isinstance(refusal, InvalidAdapter):
                raise refusal
            if deadline.left_s <= pause_s:
                why = str(refusal or "no worker has answered")
                message = (
                    f"the bytes could not be copied within {spec.timeout_s:g} s: {why}; {name!r} is as it was:"
                    " repeat the call once a worker sees them"
                )
                raise PublishUnfinished(message, code="bytes_not_visible")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _copiers(self, name: str, base_model: str | None) -> list[ObservedWorker]:
        """Workers with an agent that can copy the bytes, the name's home first. Raises OrchestratorUnavailable."""
        ready = [
            worker
            for worker in self._reconciler.queries.observe().workers.values()
            if worker.state == "ready" and worker.can_serve(base_model)
        ]
        able = [worker for worker in ready if worker.has_agent]
        if ready and not able:
            raise OrchestratorUnavailable(
                "publishing copies the bytes on workers, and no worker here has an agent: start `python -m workers`"
                " beside each engine, or register adapters whose files stay (POST /v1/adapters)",
                code="no_agent",
            )
        if not able:
            serving = f" for {base_model!r}" if base_model else ""
            message = (
                f"no worker is ready{serving}, so nothing can be published: see `lorafleet workers list`, and repeat"
            )
            raise OrchestratorUnavailable(message, code="no_worker")
        return sorted(able, key=lambda worker: (-rendezvous_score(name, worker.id), worker.id))
