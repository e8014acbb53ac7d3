"""Operations in progress and failures: what a pass knows besides the workers' reports.

Kept in memory only. After a restart the agents' reports show what became of the operations.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from orchestrator.core.failures import FailureBook
from orchestrator.core.plan import AdapterDrain
from orchestrator.core.state import Pair


@dataclass(slots=True)
class FleetOperations:
    """One writer: the event loop.

    busy              worker_id -> number of loads and unloads in progress there
    loading           (lora_id, worker_id) -> digest; `load_began`: since when
    inspecting        lora_id -> worker_id that fetches and verifies it
    draining_workers  workers that were told to drain
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
    inspecting: dict[str, str] = field(default_factory=dict)
    draining_workers: set[str] = field(default_factory=set)
    unloading: set[Pair] = field(default_factory=set)
    loading_victims: set[Pair] = field(default_factory=set)
    drains: dict[Pair, AdapterDrain] = field(default_factory=dict)
    reserve_victims: dict[Pair, str] = field(default_factory=dict)
    failures: FailureBook = field(default_factory=FailureBook)
    measured_loads: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=100))

    def clear(self) -> None:
        """Forget drains and reserve victims at the end of a term. Cancelled actions remove their own entries."""
        self.draining_workers.clear()
        self.drains.clear()
        self.reserve_victims.clear()
