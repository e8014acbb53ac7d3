"""What the parts of the reconcile loop share: settings, stored intent, reports, and operations in progress.

Operations in progress are kept in memory only. After a restart the agents' reports show what became of them.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from lorafleet.service.tasks import BackgroundTasks
from orchestrator.config import OrchestratorSettings
from orchestrator.core.demand import DemandBook
from orchestrator.core.failures import FailureBook
from orchestrator.core.plan import AdapterDrain
from orchestrator.leadership.leadership import Leadership
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.model.snapshot import OngoingFetch, Pair
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.agent_view import HeldFilesBook
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.worker_reports import WorkerReports
from orchestrator.store.store import IntentStore


@dataclass(slots=True)
class FleetOperations:
    """One writer: the event loop.

    busy              worker_id -> number of loads and unloads in progress there
    loading           (lora_id, worker_id) -> digest; `load_began`: since when
    fetching          (lora_id, worker_id) -> digest of fetches ahead of a load
    copying           (digest, worker_id) of kept copies that are being made, by a call of their own or with a load
    fetch_moved       (lora_id, worker_id) whose files are fetched -> (bytes so far, since when)
    inspecting        lora_id -> worker_id that fetches and verifies it
    checking          worker_id -> lora_id that it compares with its acceptance file
    draining_workers  workers that were told to drain
    resuming          workers that are being told to serve again
    unloading         (lora_id, worker_id) of unloads: no second call is sent, it could hit a later load of the adapter
    loading_victims   (lora_id, worker_id) that a load in progress evicts: no other load may name it
    drains            (lora_id, worker_id) -> drain of an adapter that takes no new requests there
    reserve_victims   (lora_id, worker_id) that leaves once drained -> adapter whose load took a reserve slot
    failures          failures that block loads
    measured_loads    duration and bytes of the last hundred loads; 0 bytes where the size is not known
    """

    busy: Counter[str] = field(default_factory=Counter)
    loading: dict[Pair, str] = field(default_factory=dict)
    load_began: dict[Pair, float] = field(default_factory=dict)
    fetching: dict[Pair, str] = field(default_factory=dict)
    copying: set[tuple[str, str]] = field(default_factory=set)
    fetch_moved: dict[Pair, tuple[int | None, float]] = field(default_factory=dict)
    inspecting: dict[str, str] = field(default_factory=dict)
    checking: dict[str, str] = field(default_factory=dict)
    draining_workers: set[str] = field(default_factory=set)
    resuming: set[str] = field(default_factory=set)
    unloading: set[Pair] = field(default_factory=set)
    loading_victims: set[Pair] = field(default_factory=set)
    drains: dict[Pair, AdapterDrain] = field(default_factory=dict)
    reserve_victims: dict[Pair, str] = field(default_factory=dict)
    failures: FailureBook = field(default_factory=FailureBook)
    measured_loads: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=100))

    def note_fetched_bytes(self, pair: Pair, size_bytes: int | None, now: float) -> None:
        """Record how far the download of a load, or ahead of one, is; None: its agent does not say: it is moving."""
        if pair in self.loading or pair in self.fetching:
            before = self.fetch_moved.get(pair)
            if before is None or size_bytes is None or before[0] != size_bytes:
                self.fetch_moved[pair] = size_bytes, now

    def fetches(self, files: HeldFilesBook) -> dict[str, list[OngoingFetch]]:
        """digest -> loads in progress, and fetches ahead of loads, on workers that lack its files."""
        found: dict[str, list[OngoingFetch]] = {}
        for pair, digest in (*self.loading.items(), *self.fetching.items()):
            if pair[1] in files.disks and pair[1] not in files.holders.get(digest, ()):
                _, moved_at = self.fetch_moved.get(pair, (None, self.load_began.get(pair, 0.0)))
                found.setdefault(digest, []).append(OngoingFetch(worker_id=pair[1], moved_at=moved_at))
        return found

    def clear(self) -> None:
        """Forget drains and reserve victims at the end of a term. Cancelled actions remove their own entries."""
        self.draining_workers.clear()
        self.drains.clear()
        self.reserve_victims.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What the parts of the loop share. The mutable ones have one writer: the event loop.

    files     what is on the workers' disks
    tasks     calls to agents in progress
    due       set: a pass is requested and has not begun
    held_due  set: a router has reported requests that it holds for a pool's first worker
    clock     seconds of the monotonic clock; `wall`: Unix time
    """

    settings: OrchestratorSettings
    store: IntentStore
    reports: WorkerReports
    demand: DemandBook
    catalog: CatalogBook
    agents: AgentClient
    metrics: OrchestratorMetrics
    leadership: Leadership
    operations: FleetOperations = field(default_factory=FleetOperations)
    files: HeldFilesBook = field(default_factory=HeldFilesBook)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    due: asyncio.Event = field(default_factory=asyncio.Event)
    held_due: asyncio.Event = field(default_factory=asyncio.Event)
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    rng: Random = field(default_factory=Random)

    def request_pass(self) -> None:
        """Make the loop run a pass now rather than at the next interval. Returns at once."""
        self.due.set()
