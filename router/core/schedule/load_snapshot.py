"""The load of a base model's replicas at one moment: read by decisions, recorded with them, changed by nothing.

`ReplicaLoad` has the names. The load book makes the same values as plain tuples, and `cost_loop.py` reads those:
CPython 3.11 unpacks them in a fifth of the time.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf, log
from typing import NamedTuple

import msgspec

from router.core.sessions.held import Victim

# Seconds over which prompts count as placed: about how long a busy engine keeps a block. A guess; 60 to 600 do alike in
# `benchmarks.trace`.
PLACED_S = 120.0
# Until a request has ended at a replica: a guess.
FIRST_REQUEST_S = 2.0
# A replica that was given less than a twentieth of its KV cache of late counts as one that was given a twentieth.
_LEAST_PLACED = log(0.05)


class ReplicaLoad(NamedTuple):
    """The load of one replica as this router knows it. Times are the router's clock; -inf: never.

    busy_until         when our prefills there will be done, by their predicted work
    behind_s           our unfinished prefills but the largest, which may be nearly done: the least that must be waited
    others_until       when the prefills that other clients had waiting there at the last report will be done
    in_prefill, in_decode   our sequences before and after their first token
    others_in_flight   sequences of other clients, by the engine's last report
    engine_names       what our requests there run; "" is the base model. Empty while one of ours has waited too long
                       for a slot, so that no adapter passes it
    slots_used         adapters among `engine_names`
    fresh              adapters sent there since the last report that are in device slots by vLLM's LRU rule
    slot_at            when a slot will be free for one more adapter; -inf: one is free
    full_s             wait for one of `max_num_seqs`
    request_s          how long a request takes there
    kv_tokens, kv_free_tokens   size of the KV cache, and what is free of it
    kv_token_s         wait for each token that is not free
    placed             log of the uncached tokens sent there of late, as a share of its KV cache, on a scale where
                       fading is a subtraction: `placed - now / PLACED_S` is the log now
    prefill_pace       seconds that its latest prefills took, by those that its rate predicts
    victims            whose cached tokens the next prompt pushes out, the first one first
    """

    busy_until: float = -inf
    behind_s: float = 0.0
    others_until: float = -inf
    in_prefill: int = 0
    in_decode: int = 0
    others_in_flight: int = 0
    engine_names: frozenset[str] = frozenset()
    slots_used: int = 0
    fresh: frozenset[str] = frozenset()
    slot_at: float = -inf
    full_s: float = 0.0
    request_s: float = FIRST_REQUEST_S
    kv_tokens: float = inf
    kv_free_tokens: float = inf
    kv_token_s: float = 0.0
    placed: float = -inf
    prefill_pace: float = 1.0
    victims: tuple[Victim, ...] = ()

    @property
    def in_flight(self) -> int:
        """Our sequences at the replica."""
        return self.in_prefill + self.in_decode

    @property
    def all_in_flight(self) -> int:
        """Sequences at the replica, ours and those of other clients."""
        return self.in_prefill + self.in_decode + self.others_in_flight

    @property
    def decoding(self) -> int:
        """Sequences at the replica that may be past their first token."""
        return self.in_decode + self.others_in_flight

    @property
    def context_in_use(self) -> float:
        """Tokens that its requests hold in the KV cache; 0.0 where its size is not known."""
        return self.kv_tokens - self.kv_free_tokens if self.kv_free_tokens < self.kv_tokens < inf else 0.0

    def has_slot(self, engine_name: str) -> bool:
        """Whether this adapter needs no further slot, or one is free."""
        return self.slot_at == -inf or engine_name in self.engine_names

    def queue_s(self, now: float) -> float:
        """Seconds until a request sent now would start prefill.

        The predicted rest of our prefills (at least `behind_s`), plus other clients' waiting prefills by the engine's
        last report, less the time since.
        """
        return max(self.busy_until - now, self.behind_s) + max(0.0, self.others_until - now)

    def kv_wait_s(self, prompt_tokens: int) -> float:
        """Seconds until the KV cache has room for a prompt; 0.0 for one that never fits, which the engine refuses."""
        if not self.kv_free_tokens < prompt_tokens <= self.kv_tokens:
            return 0.0
        return min(self.request_s, (prompt_tokens - self.kv_free_tokens) * self.kv_token_s)

    def cache_turnover(self, now: float) -> float:
        """Log of how fast cached blocks are displaced at the replica. Differences between replicas are what counts.

        An engine keeps a block for as long as its cache lasts at the rate of new ones, and hits grow with the log of
        that time.
        """
        return max(_LEAST_PLACED, self.placed - now / PLACED_S)


# A ReplicaLoad without its names, in the order of its fields.
LoadVector = tuple[
    float, float, float, int, int, int, frozenset[str], int, frozenset[str], float, float, float, float, float, float,
    float, float, tuple[Victim, ...],
]  # fmt: skip
_IDLE: LoadVector = ReplicaLoad()


class FleetLoad(msgspec.Struct, frozen=True, eq=False):
    """The load of every replica of a roster, in its order. Indexing gives a `ReplicaLoad`.

    vectors           for `cost_loop.py`
    resting           `placed` of each replica where a request would wait for nothing; None of the others
    least_placed      the lowest `placed`
    others_in_flight  sequences of other clients, over all replicas
    without_slot      replicas with all adapter slots in use
    """

    vectors: Sequence[LoadVector]
    resting: Sequence[float | None]
    least_placed: float
    others_in_flight: int
    without_slot: int

    @classmethod
    def of(cls, loads: Iterable[ReplicaLoad]) -> "FleetLoad":
        """A FleetLoad of these loads, in their order."""
        known = list(loads)
        table = LoadTable(len(known))
        for position, load in enumerate(known):
            table.update(position, load)
        return table.snapshot()

    def __len__(self) -> int:
        """How many replicas."""
        return len(self.vectors)

    def __getitem__(self, position: int) -> ReplicaLoad:
        """The load of the replica at a position of the roster."""
        return ReplicaLoad._make(self.vectors[position])

    def __iter__(self) -> Iterator[ReplicaLoad]:
        """Each replica's load, in the roster's order."""
        return map(ReplicaLoad._make, self.vectors)

    def with_room(self, now: float, most_queued_s: float) -> tuple[int, ...]:
        """Positions where a small request would wait at most so long for prefill, or where nothing is in flight."""
        until = now + most_queued_s
        found = []
        for position, vector in enumerate(self.vectors):
            # Mostly our own prefills alone say that there is none.
            if vector[0] <= until:
                load = ReplicaLoad._make(vector)
                if load.queue_s(now) + load.full_s <= most_queued_s or not load.all_in_flight:
                    found.append(position)
        return tuple(found)

    def base_placed(self, now: float) -> float:
        """`placed` of the replica whose cache is displaced slowest: the excess over it is cache pressure."""
        return max(self.least_placed, _LEAST_PLACED + now / PLACED_S)


class LoadTable:
    """The load vectors of one roster, updated a replica at a time."""

    __slots__ = ("_others", "_placed", "_resting", "_vectors", "_without_slot")

    def __init__(self, count: int) -> None:
        self._vectors = [_IDLE] * count
        self._resting: list[float | None] = [-inf] * count
        self._placed = [-inf] * count
        self._others = [0] * count
        self._without_slot: set[int] = set()

    def update(self, position: int, vector: LoadVector) -> None:
        """Replace the load of the replica at a position.

        Also updates who else works there, who rests, and who has no free slot.
        """
        (
            busy_until, behind_s, others_until, in_prefill, in_decode, others, engine_names, slots_used, _, slot_at,
            full_s, _, kv_tokens, kv_free_tokens, _, placed, _, _,
        ) = vector  # fmt: skip
        self._vectors[position], self._placed[position], self._others[position] = vector, placed, others
        is_busy = in_prefill or in_decode or others or behind_s or busy_until > -inf or others_until > -inf
        would_wait = is_busy or engine_names or slots_used or slot_at > -inf or full_s or kv_free_tokens < kv_tokens
        self._resting[position] = None if would_wait else placed
        if slot_at > -inf:
            self._without_slot.add(position)
        else:
            self._without_slot.discard(position)

    def snapshot(self) -> FleetLoad:
        """The loads as they are now; later updates do not change them."""
        least_placed = min(self._placed, default=-inf)
        return FleetLoad(
            self._vectors.copy(), self._resting.copy(), least_placed, sum(self._others), len(self._without_slot)
        )
