"""What is stored and what was reported, as the wire shows it."""

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.core.errors import NotFound
from orchestrator.core.plan import Action
from orchestrator.core.state import OCCUPYING, Adapter
from orchestrator.fleet import state_of
from orchestrator.metrics import Counts
from orchestrator.reconcile import Reconciler
from orchestrator.registry import policy_of
from orchestrator.wire import ActionItem, AdapterItem, EnsureAnswer, PlacementItem, Plan, Replicas, WorkerItem


class Views:
    """What is stored and what was reported, as the wire shows it."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._it = reconciler

    def adapter(self, adapter: Adapter, *, ready: Mapping[str, Sequence[str]] | None = None) -> AdapterItem:
        """`ready`: lora_id -> workers, made once by whoever shows many adapters."""
        if ready is None:
            ready = {adapter.lora_id: self._it.ready_on(adapter.lora_id)}
        workers = ready.get(adapter.lora_id, ())
        return AdapterItem.model_validate(
            {
                "lora_id": adapter.lora_id,
                "digest": adapter.digest,
                "base_model": adapter.base_model,
                "rank": adapter.rank,
                "size_bytes": adapter.size_bytes,
                "source": adapter.source,
                "state": self._it.state_of(adapter, ready),
                "replicas": Replicas(desired=self.desired(adapter.lora_id), ready=len(workers)),
                "workers": workers,
                "policy": policy_of(adapter),
                "tenants": adapter.tenants,
                "error": self._it.last_error(adapter.lora_id),
            }
        )

    def desired(self, lora_id: str) -> int:
        desired = self._it.view.desired
        return max(desired.targets.get(lora_id, 0), len(desired.replicas.get(lora_id, ())))

    def worker(self, worker_id: str) -> WorkerItem:
        entry = self._it.fleet.entries.get(worker_id)
        if entry is None:
            raise NotFound(f"worker {worker_id!r} has not registered", code="worker_not_found")
        report, store = entry.report, self._it.store
        held = [lora for lora in report.lora.loaded_loras if lora.state in OCCUPYING]
        orphans = [
            lora.lora_id
            for lora in held
            if (known := store.adapters.get(lora.lora_id)) is None
            or (known.digest is not None and known.digest != lora.digest)
        ]
        return WorkerItem.model_validate(
            {
                "id": worker_id,
                "agent_url": report.agent_url,
                "engine_url": report.transport.engine_url,
                "base_model": report.model.base_model,
                "state": state_of(entry, store.workers.get(worker_id)),
                "zone": report.zone,
                "node": report.node,
                "capacity": report.lora.capacity.model_dump() | {"max_lora_rank": report.lora.max_lora_rank},
                "adapters": sorted(lora.lora_id for lora in held),
                "orphans": sorted(orphans),
            }
        )

    def placements(self) -> list[PlacementItem]:
        """What is there and what should be, by lora_id and worker."""
        desired = {(lora_id, w) for lora_id, workers in self._it.view.desired.replicas.items() for w in workers}
        rows: dict[tuple[str, str], PlacementItem] = {}
        for worker in self._it.observe().workers.values():
            for held in worker.held.values():
                pair = (held.lora_id, worker.id)
                rows[pair] = PlacementItem(
                    lora_id=held.lora_id,
                    digest=held.digest,
                    worker_id=worker.id,
                    state=held.state,
                    location=held.location,
                    desired=pair in desired,
                )
        for pair in desired - rows.keys():
            adapter = self._it.store.adapters.get(pair[0])
            digest = None if adapter is None else adapter.digest
            rows[pair] = PlacementItem(
                lora_id=pair[0], digest=digest, worker_id=pair[1], state="remote", location="remote", desired=True
            )
        return [rows[pair] for pair in sorted(rows)]

    def plan(self, actions: Iterable[Action], unplaced: Iterable[str]) -> Plan:
        items = [
            ActionItem(
                operation=action.operation,
                lora_id=action.lora_id,
                worker_id=action.worker_id,
                reason=action.reason,
                evict=action.evict or action.evict_after,
            )
            for action in actions
        ]
        return Plan(actions=tuple(items), unplaced=tuple(sorted(unplaced)))

    def ensured(self, adapter: Adapter, replicas: int) -> EnsureAnswer:
        ready = tuple(self._it.ready_on(adapter.lora_id))
        expected_s = 0.0 if len(ready) >= replicas else self._it.expected_s(adapter.lora_id)
        return EnsureAnswer.model_validate(
            {
                "lora_id": adapter.lora_id,
                "digest": adapter.digest,
                "state": self._it.state_of(adapter, {adapter.lora_id: ready}),
                "ready": ready,
                "loading": self._it.loading_on(adapter.lora_id),
                "expected_s": expected_s,
                "error": None if len(ready) >= replicas else self._it.last_error(adapter.lora_id),
            }
        )

    def counts(self) -> Counts:
        """lora_id -> (ready, wanted), of every adapter that is somewhere or should be."""
        desired = self._it.view.desired
        ready = self._it.ready_table()
        ids = desired.replicas.keys() | desired.targets.keys()
        return {lora_id: (len(ready.get(lora_id, ())), self.desired(lora_id)) for lora_id in ids}

    def workers_by_state(self) -> dict[str, int]:
        counts = dict.fromkeys(("starting", "ready", "cordoned", "draining", "unmanaged", "lost"), 0)
        for worker_id, entry in self._it.fleet.entries.items():
            counts[state_of(entry, self._it.store.workers.get(worker_id))] += 1
        return counts
