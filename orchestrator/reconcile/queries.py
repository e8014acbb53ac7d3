"""What reads see: where adapters are, what state they are in, and the catalog that routers follow."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.agentless.transport import agent_url_of
from orchestrator.core.state import DesiredPlacement, ObservedFleet, PlannedLoad, RegisteredAdapter
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.in_flight import OperationsInProgress
from orchestrator.reconcile.worker_reports import KnownWorker, WorkerReports, answering, state_of
from orchestrator.store.store import IntentStore
from orchestrator.wire import CatalogWorker, Draining
from workers.wire import LoadedLora


@dataclass(frozen=True, slots=True)
class LastPass:
    """What the last pass saw and decided. `warming`: what each worker that is not ready yet lacks of its share."""

    observed: ObservedFleet
    desired: DesiredPlacement
    warming: Mapping[str, Sequence[PlannedLoad]] = field(default_factory=dict)


class FleetQueries:
    """Answers from what is stored, reported and under way; changes nothing but the catalog."""

    def __init__(
        self,
        *,
        store: IntentStore,
        fleet: WorkerReports,
        catalog: CatalogBook,
        underway: OperationsInProgress,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._catalog = catalog
        self._underway = underway
        self._clock = clock
        self.view = LastPass(ObservedFleet(), DesiredPlacement())

    def observe(self) -> ObservedFleet:
        """The fleet now, with what we have under way in it."""
        it = self._underway
        seen = self._fleet.snapshot(
            self._store.workers,
            failures=it.failures.by_pair,
            busy=it.busy,
            loading=it.loading,
            draining=it.drains,
            inspecting=it.inspecting,
            reserve_victims=it.reserve_victims,
            loading_victims=it.loading_victims,
            digests=self.digest,
        )
        return replace(seen, memory=self.view.desired.memory)

    def digest(self, lora_id: str) -> str | None:
        """As registered or inspected."""
        adapter = self._store.adapters.get(lora_id)
        return None if adapter is None else adapter.digest

    def ready_on(self, lora_id: str) -> list[str]:
        """Workers where the adapter answers requests now: the right bytes and base model, not draining."""
        return sorted(
            worker_id
            for worker_id, entry in self._fleet.entries.items()
            if any(lora.lora_id == lora_id and self._is_ready(lora, worker_id) for lora in answering(entry))
        )

    def ready_table(self) -> dict[str, list[str]]:
        """`ready_on` of every adapter that is ready anywhere, in one walk over the fleet."""
        table: dict[str, list[str]] = {}
        for worker_id, entry in sorted(self._fleet.entries.items()):
            for lora in answering(entry):
                if self._is_ready(lora, worker_id):
                    table.setdefault(lora.lora_id, []).append(worker_id)
        return table

    def _is_ready(self, lora: LoadedLora, worker_id: str) -> bool:
        if lora.state != "ready" or (lora.lora_id, worker_id) in self._underway.drains:
            return False
        adapter = self._store.adapters.get(lora.lora_id)
        if adapter is None or lora.digest == "" or lora.digest != adapter.digest:
            return False
        return adapter.base_model in (None, self._fleet.entries[worker_id].report.model.base_model)

    def loading_on(self, lora_id: str) -> list[str]:
        return sorted(worker_id for name, worker_id in self._underway.loading if name == lora_id)

    def expected_s(self, lora_id: str) -> float | None:
        """Seconds until it should be there, by the median of the last hundred loads; None when none was measured."""
        it = self._underway
        if not it.load_seconds:
            return None
        median = statistics.median(it.load_seconds)
        began = [at for (name, _), at in it.load_began.items() if name == lora_id]
        return round(max(0.0, median - (self._clock() - min(began))) if began else median, 3)

    def quarantine(self, lora_id: str) -> str | None:
        """Why the adapter cannot be loaded anywhere: engines refuse its bytes, or nobody finds good ones."""
        adapter = self._store.adapters.get(lora_id)
        if adapter is None or adapter.quarantine is not None:
            return None if adapter is None else adapter.quarantine
        failure = self._underway.failures.fleet_failure(lora_id, self._clock())
        if failure is None or self.ready_on(lora_id):
            return None
        return f"{failure.code}: {failure.message}"

    def last_error(self, lora_id: str) -> str | None:
        """Why the adapter is not, or not often enough, where it should be."""
        quarantine = self.quarantine(lora_id)
        if quarantine is not None:
            return quarantine
        newest = self._underway.failures.newest_failure(lora_id, self._clock())
        return f"{newest.code}: {newest.message}" if newest is not None else self.view.desired.unplaced.get(lora_id)

    def states(self) -> dict[str, tuple[str, str | None]]:
        """lora_id -> (adapter state, error), for all registered adapters at once."""
        it, ready = self._underway, self.ready_table()
        loading = {lora_id for lora_id, _ in it.loading}
        troubled = it.failures.failed_ids | self.view.desired.unplaced.keys()
        found: dict[str, tuple[str, str | None]] = {}
        for lora_id, adapter in self._store.adapters.items():
            has_error = adapter.quarantine is not None or lora_id in troubled
            is_failed = has_error and self.quarantine(lora_id) is not None
            state = _state(adapter, lora_id in ready, lora_id in loading, lora_id in it.inspecting, is_failed)
            found[lora_id] = (state, self.last_error(lora_id) if has_error else None)
        return found

    def failed(self) -> dict[str, str]:
        """lora_id -> "code: message" of the adapters that can be used nowhere, whoever is asked."""
        found = {lora_id: why for lora_id in self._underway.failures.failed_ids if (why := self.quarantine(lora_id))}
        found |= {name: it.quarantine for name, it in self._store.adapters.items() if it.quarantine is not None}
        desired = self.view.desired
        found |= {name: f"{code}: {desired.unplaced.get(name, '')}" for name, code in desired.fits_nowhere.items()}
        return found

    def failed_count(self) -> int:
        """Adapters in state `failed`."""
        it, store = self._underway, self._store
        shared = sum(self.quarantine(lora_id) is not None for lora_id in it.failures.failed_ids)
        return shared + sum(
            adapter.quarantine is not None and lora_id not in it.failures.failed_ids
            for lora_id, adapter in store.adapters.items()
        )

    def state_of(self, adapter: RegisteredAdapter, ready: Mapping[str, Sequence[str]]) -> str:
        """One word for an adapter. `ready`: where it is ready, as `ready_table` says."""
        it, lora_id = self._underway, adapter.lora_id
        is_loading = any(name == lora_id for name, _ in it.loading)
        is_failed = self.quarantine(lora_id) is not None
        return _state(adapter, bool(ready.get(lora_id)), is_loading, lora_id in it.inspecting, is_failed)

    def refresh_catalog(self) -> None:
        """Make what routers follow agree with what is known now."""
        workers = {
            name: CatalogWorker.model_validate(
                {
                    "id": name,
                    "agent_url": agent_url_of(entry.report),
                    "engine_url": "" if agent_url_of(entry.report) else entry.report.transport.engine_url,
                    "state": self._told_of(name, entry),
                    "agent_boot_id": entry.report.agent_boot_id if agent_url_of(entry.report) else "",
                }
            )
            for name, entry in self._fleet.entries.items()
        }
        draining = tuple(
            Draining(worker_id=worker_id, lora_id=lora_id, digest=self._digest_on(lora_id, worker_id))
            for lora_id, worker_id in sorted(self._underway.drains)
        )
        self._catalog.refresh(self.states(), workers, draining)

    def _told_of(self, worker_id: str, entry: KnownWorker) -> str:
        """A worker's state for routers: one that is asked to drain serves on until what it has is elsewhere."""
        state = state_of(entry, self._store.workers.get(worker_id))
        is_going = worker_id in self._underway.leaving or entry.report.state == "draining" or entry.is_terminating
        return state if state != "draining" or is_going else "cordoned"

    def _digest_on(self, lora_id: str, worker_id: str) -> str:
        entry = self._fleet.entries.get(worker_id)
        loras = entry.report.lora.loaded_loras if entry is not None else ()
        return next((lora.digest for lora in loras if lora.lora_id == lora_id), "")


def _state(adapter: RegisteredAdapter, is_ready: bool, is_loading: bool, is_inspecting: bool, is_failed: bool) -> str:
    if adapter.is_deleting:
        return "deleting"
    if is_failed:
        return "failed"
    if not adapter.is_inspected:
        return "inspecting" if is_inspecting else "registered"
    if is_ready:
        return "ready"
    return "loading" if is_loading else "registered"
