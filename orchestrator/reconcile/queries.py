"""Queries: where adapters are, in which state, and the catalog that routers follow."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.agentless.transport import agent_url_of
from orchestrator.core.failures import failure_everywhere
from orchestrator.core.placement.load_time import load_figures, load_s
from orchestrator.model.acceptance import AdapterAcceptance
from orchestrator.model.adapter_documents import AdapterState
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.cards import AdapterEffectState
from orchestrator.model.catalog import CatalogWorker, Draining, WorkerState
from orchestrator.model.pauses import PauseLease
from orchestrator.model.snapshot import (
    AdapterFailure,
    DesiredPlacement,
    FilesSnapshot,
    LoadFigures,
    ObservedFleet,
    PlannedLoad,
)
from orchestrator.reconcile.context import PassContext
from orchestrator.reconcile.worker_reports import KnownWorker, is_warming, serving_adapters, worker_state
from workers.wire import WorkerAdapter


@dataclass(frozen=True, slots=True)
class LastPass:
    """What the last pass observed and decided.

    warming     worker_id -> loads a warming worker still lacks
    configured  digests of the lists of configured adapters that it has looked at
    """

    observed: ObservedFleet
    desired: DesiredPlacement
    warming: Mapping[str, Sequence[PlannedLoad]] = field(default_factory=dict)
    configured: Collection[str] = ()


# A fetch without a byte for longer is said to be silent.
_SILENT_S = 2.0
_EFFECTS: tuple[AdapterEffectState, ...] = ("unknown", "zero", "", "seen", "applied")
"""From the least to the most that is known to show."""


class FleetQueries:
    """Answers from stored intent, reports and operations in progress; changes nothing but the catalog."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._refreshed_at = -math.inf
        self._unusable_ids: set[str] = set()
        """Adapters that no worker could use, by the catalog."""
        self.last_pass = LastPass(ObservedFleet(), DesiredPlacement())
        self.lost_files: Mapping[str, str] = {}
        """lora_id -> why no worker has its files, of adapters whose files only the fleet has"""

    def observe(self) -> ObservedFleet:
        """The fleet now: the last reports and stored intent of workers, our operations, and the last pass's memory."""
        operations = self._context.operations
        observed = self._context.reports.observed_fleet(
            self._context.store.workers,
            failures=operations.failures.by_pair,
            busy=operations.busy,
            loading=operations.loading,
            draining=operations.drains,
            inspecting=operations.inspecting,
            reserve_victims=operations.reserve_victims,
            loading_victims=operations.loading_victims,
            digests=self.digest,
        )
        files = FilesSnapshot(
            is_known=True,
            is_whole=self.has_all_files(),
            holders=self._context.files.holders,
            fetches=operations.fetches(self._context.files),
        )
        return replace(
            observed,
            memory=self.last_pass.desired.memory,
            load_figures=self.load_figures(),
            load_began=dict(operations.load_began),
            fetching=frozenset(operations.fetching),
            checking=dict(operations.checking),
            files=files,
        )

    def has_all_files(self) -> bool:
        """Whether every agent that answers has reported all of the files on its disk."""
        disks = self._context.files.disks
        return all(
            (disk := disks.get(worker_id)) is not None and disk.is_whole
            for worker_id, entry in self._context.reports.workers.items()
            if entry.reach == "heard" and agent_url_of(entry.report)
        )

    def load_figures(self) -> LoadFigures:
        """Duration of the last loads by their bytes: as measured here, else as agents report; else a guess."""
        measured = self._context.operations.measured_loads
        if measured:
            return load_figures(tuple(measured))
        reported = [entry.report.load.load_seconds for entry in self._context.reports.workers.values()]
        known = [seconds for seconds in reported if seconds > 0]
        return LoadFigures(seconds=statistics.median(known)) if known else LoadFigures()

    def forget_drain(self, worker_id: str) -> None:
        """Forget the worker's drain progress as of the last pass, because the order to drain has changed."""
        desired = self.last_pass.desired
        drains = {name: progress for name, progress in desired.drains.items() if name != worker_id}
        self.last_pass = replace(self.last_pass, desired=replace(desired, drains=drains))

    def digest(self, lora_id: str) -> str | None:
        """The registered or inspected digest; None while it is not known."""
        adapter = self._context.store.adapters.get(lora_id)
        return None if adapter is None else adapter.digest

    def ready_workers(self, lora_id: str) -> list[str]:
        """Workers that serve the adapter now: ready, right digest and base model, not draining."""
        return sorted(
            worker_id
            for worker_id, entry in self._context.reports.workers.items()
            if any(lora.lora_id == lora_id and self._is_ready(lora, worker_id) for lora in serving_adapters(entry))
        )

    def ready_workers_by_adapter(self) -> dict[str, list[str]]:
        """lora_id -> `ready_workers`, for every adapter that is ready anywhere, in one walk over the fleet."""
        table: dict[str, list[str]] = {}
        for worker_id, entry in self._context.reports.workers.items():
            for lora in serving_adapters(entry):
                if self._is_ready(lora, worker_id):
                    table.setdefault(lora.lora_id, []).append(worker_id)
        return table

    def copies_with_notes(self, lora_ids: Collection[str] | None = None) -> dict[str, tuple[str, WorkerAdapter]]:
        """lora_id -> the worker and its copy that shows least effect, of copies that are ready now.

        lora_ids  of these adapters alone; None: of all
        """
        copies: dict[str, tuple[str, WorkerAdapter]] = {}
        for worker_id, entry in self._context.reports.workers.items():
            for lora in serving_adapters(entry):
                if (lora_ids is not None and lora.lora_id not in lora_ids) or not self._is_ready(lora, worker_id):
                    continue
                least = copies.get(lora.lora_id)
                if least is None or _shown_effect(lora) < _shown_effect(least[1]):
                    copies[lora.lora_id] = worker_id, lora
        return copies

    def acceptance(self, lora_id: str) -> dict[str, AdapterAcceptance]:
        """worker -> how far its answers with the adapter are from the trainer's, of copies that were compared."""
        found = {}
        for worker_id in self.ready_workers(lora_id):
            for lora in self._context.reports.workers[worker_id].report.lora.loaded_loras:
                if lora.lora_id == lora_id and lora.acceptance is not None:
                    found[worker_id] = lora.acceptance
        return found

    def _is_ready(self, lora: WorkerAdapter, worker_id: str) -> bool:
        """Whether the adapter on the worker serves requests now: ready, not draining, right digest and base model."""
        if lora.state != "ready" or (lora.lora_id, worker_id) in self._context.operations.drains:
            return False
        adapter = self._context.store.adapters.get(lora.lora_id)
        if adapter is None or lora.digest == "" or lora.digest != adapter.digest:
            return False
        return adapter.base_model in (None, self._context.reports.workers[worker_id].report.model.base_model)

    def has_copy(self, worker_id: str, name: str) -> bool:
        """Whether an adapter with this lora_id or engine name is in a slot of the worker, or a load of ours puts it."""
        return (name, worker_id) in self._context.operations.loading or self._context.reports.has_copy(worker_id, name)

    def loading_workers(self, lora_id: str) -> list[str]:
        """Workers where a load of the adapter is in progress."""
        return sorted(worker_id for name, worker_id in self._context.operations.loading if name == lora_id)

    def expected_s(self, lora_id: str) -> float | None:
        """Seconds until a load of the adapter should end, by its bytes and the last hundred loads; None without any.

        lora_id  "" for a load that starts now
        """
        operations = self._context.operations
        if not operations.measured_loads:
            return None
        adapter = self._context.store.adapters.get(lora_id)
        whole_s = load_s(None if adapter is None else adapter.size_bytes, self.load_figures())
        began = [at for (name, _), at in operations.load_began.items() if name == lora_id]
        return round(max(0.0, whole_s - (self._context.clock() - min(began))) if began else whole_s, 3)

    def quarantine_reason(self, lora_id: str) -> str | None:
        """Why the adapter cannot be loaded anywhere now; None while it may be tried, or is ready on a worker."""
        adapter = self._context.store.adapters.get(lora_id)
        if adapter is None or adapter.quarantine is not None:
            return None if adapter is None else adapter.quarantine
        if (lost := self.lost_files.get(lora_id)) is not None and not self.ready_workers(lora_id):
            return lost
        failure = self._context.operations.failures.fleet_failure(lora_id, self._context.clock())
        if failure is None or self.ready_workers(lora_id):
            return None
        return f"{failure.code}: {failure.message}"

    def failure_everywhere(self, lora_id: str) -> AdapterFailure | None:
        """The failure that keeps the adapter from being loaded anywhere now; None also where it is ready."""
        adapter = self._context.store.adapters.get(lora_id)
        if (
            adapter is None
            or lora_id not in self._context.operations.failures.failed_ids
            or self.ready_workers(lora_id)
        ):
            return None
        return failure_everywhere(adapter, self.observe(), self._context.clock())

    def fetch_progress(self, lora_id: str) -> str | None:
        """How far the longest fetch of the adapter's files is, in words; None where no agent reports one."""
        operations, now = self._context.operations, self._context.clock()
        began = {pair: at for pair, at in operations.load_began.items() if pair[0] == lora_id}
        fetching = [pair for pair in began if pair in operations.fetch_moved]
        if not fetching:
            return None
        pair = min(fetching, key=lambda pair: began[pair])
        size_bytes, moved_at = operations.fetch_moved[pair]
        if size_bytes is None:
            return None
        silent = f", and none for {now - moved_at:.0f} s" if size_bytes and now - moved_at > _SILENT_S else ""
        return f"worker {pair[1]} has fetched {size_bytes} bytes from its source in {now - began[pair]:.0f} s{silent}"

    def last_error(self, lora_id: str) -> str | None:
        """Why the adapter has fewer replicas than it should have; None when no reason is known."""
        reason = self.quarantine_reason(lora_id)
        if reason is not None:
            return reason
        newest = self._context.operations.failures.newest_failure(lora_id, self._context.clock())
        return (
            f"{newest.code}: {newest.message}" if newest is not None else self.last_pass.desired.unplaced.get(lora_id)
        )

    def troubled_ids(self) -> set[str]:
        """lora_ids that may have a `last_error`; of the others only quarantined adapters have one."""
        failed = self._context.operations.failures.failed_ids
        return failed | self.last_pass.desired.unplaced.keys() | self.lost_files.keys()

    def _unusable_reasons(self) -> dict[str, str | None]:
        """lora_id -> why no worker can use the adapter, or None, of those that may have changed since the last refresh.

        That is one whose row was written, and one that has failed or lost its files, now or then.
        """
        store, troubled = self._context.store, self._context.operations.failures.failed_ids | self.lost_files.keys()
        due = (troubled | self._unusable_ids | store.changed_adapters) & store.adapters.keys()
        return {
            lora_id: None if store.adapters[lora_id].is_deleting else self.quarantine_reason(lora_id)
            for lora_id in sorted(due)
        }

    def unusable_adapters(self) -> dict[str, str]:
        """lora_id -> "code: message" of the adapters that no worker can use."""
        found = {
            lora_id: why
            for lora_id in self._context.operations.failures.failed_ids | self.lost_files.keys()
            if (why := self.quarantine_reason(lora_id))
        }
        adapters = self._context.store.adapters
        for name in self._context.store.intent.index.standing:
            if (why := adapters[name].quarantine) is not None:
                found[name] = why
        desired = self.last_pass.desired
        found |= {name: f"{code}: {desired.unplaced.get(name, '')}" for name, code in desired.fits_nowhere.items()}
        return found

    def fits_nowhere(self, lora_id: str) -> bool:
        """Whether no worker could hold the adapter, by the last pass; `last_error` says why."""
        return lora_id in self.last_pass.desired.fits_nowhere

    def is_warm(self, worker_id: str) -> bool:
        """Whether a warming worker has loaded its share, or is given none, and what its settings name is registered."""
        entry = self._context.reports.workers.get(worker_id)
        if entry is not None and not is_warming(entry, self._context.store.workers.get(worker_id)):
            return True
        has_list = entry is None or entry.report.lora.configured_digest in ("", *self.last_pass.configured)
        return has_list and self.last_pass.warming.get(worker_id) == ()  # None: no pass has seen the worker yet

    def failed_count(self) -> int:
        """Number of adapters in state `failed`."""
        operations, store = self._context.operations, self._context.store
        troubled = operations.failures.failed_ids | self.lost_files.keys()
        shared = sum(self.quarantine_reason(lora_id) is not None for lora_id in troubled)
        quarantined = (name for name in store.intent.index.standing if store.adapters[name].quarantine is not None)
        return shared + sum(name not in troubled for name in quarantined)

    def adapter_state(self, adapter: RegisteredAdapter, ready: Mapping[str, Sequence[str]]) -> AdapterState:
        """The adapter's state. `ready`: as `ready_workers_by_adapter`."""
        operations, lora_id = self._context.operations, adapter.lora_id
        is_loading = any(name == lora_id for name, _ in operations.loading)
        is_failed = self.quarantine_reason(lora_id) is not None
        return _adapter_state(
            adapter, bool(ready.get(lora_id)), is_loading, lora_id in operations.inspecting, is_failed
        )

    def refresh_catalog(self, *, unless_within_s: float = 0.0) -> None:
        """Bring the catalog that routers follow up to date, with one event for each difference.

        unless_within_s  does nothing where that was done so lately
        """
        now = self._context.clock()
        if now - self._refreshed_at < unless_within_s:
            return
        self._refreshed_at = now
        orders = self._context.store.workers
        workers = {
            name: CatalogWorker(
                id=name,
                agent_url=agent_url_of(entry.report),
                engine_url="" if agent_url_of(entry.report) else entry.report.transport.engine_url,
                state=self._catalog_state(name, entry),
                agent_boot_id=entry.report.agent_boot_id if agent_url_of(entry.report) else "",
                kept_out=() if (order := orders.get(name)) is None else order.kept_out,
            )
            for name, entry in self._context.reports.workers.items()
        }
        draining = tuple(
            Draining(worker_id=worker_id, lora_id=lora_id, digest=self._digest_on(lora_id, worker_id))
            for lora_id, worker_id in sorted(self._context.operations.drains)
        )
        reasons = self._unusable_reasons()
        self._unusable_ids |= {lora_id for lora_id, reason in reasons.items() if reason is not None}
        self._context.catalog.refresh(reasons, workers, draining, self._pauses_in_force())
        self._unusable_ids = {lora_id for lora_id, reason in reasons.items() if reason is not None}

    def _pauses_in_force(self) -> dict[str, PauseLease]:
        """The pauses that have not ended, by the key of their scope."""
        now = self._context.wall()
        return {key: lease for key, lease in self._context.store.pauses.items() if lease.expires_at > now}

    def _catalog_state(self, worker_id: str, entry: KnownWorker) -> WorkerState:
        """The worker's state for routers: one that is to drain counts as cordoned until its adapters are elsewhere."""
        state = worker_state(entry, self._context.store.workers.get(worker_id))
        is_going = (
            worker_id in self._context.operations.draining_workers
            or entry.report.state == "draining"
            or entry.is_terminating
        )
        return state if state != "draining" or is_going else "cordoned"

    def _digest_on(self, lora_id: str, worker_id: str) -> str:
        """The digest of the adapter on the worker; "" without it."""
        entry = self._context.reports.workers.get(worker_id)
        loras = entry.report.lora.loaded_loras if entry is not None else ()
        return next((lora.digest for lora in loras if lora.lora_id == lora_id), "")


def _adapter_state(
    adapter: RegisteredAdapter, is_ready: bool, is_loading: bool, is_inspecting: bool, is_failed: bool
) -> AdapterState:
    """The adapter's state from these facts, the first that applies."""
    if adapter.is_deleting:
        return "deleting"
    if is_failed:
        return "failed"
    if not adapter.is_inspected:
        return "inspecting" if is_inspecting else "registered"
    if is_ready:
        return "ready"
    return "loading" if is_loading else "registered"


def _shown_effect(lora: WorkerAdapter) -> tuple[int, int]:
    """A key that is smaller the less of an adapter shows: by what its agent proved, then by ignored modules."""
    ignored = 0 if lora.ignored_modules is None else lora.ignored_modules.count
    return _EFFECTS.index(lora.effect), -ignored
