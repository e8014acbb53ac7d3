"""What each pool of workers has and needs: the figures that autoscalers ask for. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.core.demand import LIVE_S

_FIRST_REQUEST_S = 1.0
"""What a request takes until one has ended there; a guess, nothing measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """One ready worker of a pool.

    slots   those that placement fills
    wait_s  at its engine and before it in routers
    """

    pool: str
    base_model: str
    slots: int
    max_lora_rank: int
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNeed:
    """Copies that one adapter should have."""

    base_model: str | None
    rank: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """Workers of one base model under one name.

    slots         of all its workers together
    slots_wanted  copies of adapters that should be there, whether or not they have room
    queue_wait_s  how long a request that comes now would wait, the mean over its workers
    """

    base_model: str
    name: str
    slots: int
    slots_wanted: float
    queue_wait_s: float


@dataclass(slots=True)
class RouterQueues:
    """What routers say of the queues in front of workers, and of what they have there; a silent router's word
    expires.
    """

    _said: dict[str, tuple[float, Mapping[str, float], Mapping[str, int]]] = field(default_factory=dict)

    def report(self, router_id: str, waits_s: Mapping[str, float], in_flight: Mapping[str, int], now: float) -> None:
        """What one router says now.

        waits_s    worker_id -> seconds until what waits in that router for that worker has gone there
        in_flight  worker_id -> its requests at that worker's engine
        """
        self._said = {name: said for name, said in self._said.items() if now - said[0] < LIVE_S}
        self._said[router_id] = now, waits_s, in_flight

    def wait_s(self, worker_id: str, now: float) -> float:
        """The longest that any live router says: they share an engine, and each sees how fast its own part moves."""
        return max(
            (waits.get(worker_id, 0.0) for at, waits, _ in self._said.values() if now - at < LIVE_S), default=0.0
        )

    def in_flight(self, worker_id: str, now: float) -> int:
        """Requests that all live routers have at that worker's engine."""
        return sum(there.get(worker_id, 0) for at, _, there in self._said.values() if now - at < LIVE_S)


def engine_wait_s(running: int, waiting: int, request_s: float) -> float:
    """Seconds until an engine begins what comes now: what waits there, at the rate at which requests end (Little).

    request_s  from a request's start to its last token, 0.0 before any has ended
    """
    return waiting * (request_s or _FIRST_REQUEST_S) / max(1, running)


def pools(members: Iterable[PoolMember], needs: Iterable[AdapterNeed]) -> list[PoolFigures]:
    """Every pool that has a worker, by base model and name.

    A copy is wanted where it fits most closely: in the pools with the smallest `max_lora_rank` that takes it, as the
    others are dearer to run. Several such pools share it by their slots.
    """
    by_pool: dict[tuple[str, str], list[PoolMember]] = {}
    for member in members:
        by_pool.setdefault((member.base_model, member.pool), []).append(member)
    wanted = dict.fromkeys(by_pool, 0.0)
    for need in needs:
        fits = [
            (min(m.max_lora_rank for m in found if m.max_lora_rank >= need.rank), key)
            for key, found in by_pool.items()
            if need.base_model == key[0] and any(m.max_lora_rank >= need.rank for m in found)
        ]
        tier = [key for rank, key in fits if rank == min(fits)[0]]
        slots = {key: sum(m.slots for m in by_pool[key]) for key in tier}
        for key in tier:
            share = slots[key] / sum(slots.values()) if any(slots.values()) else 1 / len(tier)
            wanted[key] += need.copies * share
    return [
        PoolFigures(
            base_model=key[0],
            name=key[1],
            slots=sum(member.slots for member in found),
            slots_wanted=wanted[key],
            queue_wait_s=sum(member.wait_s for member in found) / len(found),
        )
        for key, found in sorted(by_pool.items())
    ]
