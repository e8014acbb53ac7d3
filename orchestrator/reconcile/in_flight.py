"""What we have begun and not yet heard the end of, and what failed: all that a pass knows beside the reports.

Kept in memory only. A process that ends forgets it, and its successor reads from the agents what came of it.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from orchestrator.core.failures import FailureBook
from orchestrator.core.plan import AdapterDrain
from orchestrator.core.state import Pair


@dataclass(slots=True)
class OperationsInProgress:
    """One writer: the event loop.

    busy          worker_id -> loads and unloads on their way there
    loading       (lora_id, worker_id) -> digest; `load_began`: since when
    inspecting    lora_id -> worker_id that looks at its bytes
    leaving       workers that were told to drain
    unloading     (lora_id, worker_id) that is on its way out: not told twice, as the second might end what comes after
    evicting      (lora_id, worker_id) that makes room for a load on its way there: no other load's to name
    drains        (lora_id, worker_id) that takes no new requests
    owed          victims of loads that took the reserve -> what they made room for
    failures      what went wrong where, and until when that counts
    load_seconds  of the last hundred loads
    """

    busy: Counter[str] = field(default_factory=Counter)
    loading: dict[Pair, str] = field(default_factory=dict)
    load_began: dict[Pair, float] = field(default_factory=dict)
    inspecting: dict[str, str] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    unloading: set[Pair] = field(default_factory=set)
    loading_victims: set[Pair] = field(default_factory=set)
    drains: dict[Pair, AdapterDrain] = field(default_factory=dict)
    reserve_victims: dict[Pair, str] = field(default_factory=dict)
    failures: FailureBook = field(default_factory=FailureBook)
    load_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    def clear(self) -> None:
        """Our term is over: drains and debts are our successor's to find. What is cancelled settles its own count."""
        self.leaving.clear()
        self.drains.clear()
        self.reserve_victims.clear()
