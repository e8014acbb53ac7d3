"""The figures that autoscalers ask for: slots and queues of each worker pool. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

_FIRST_REQUEST_S = 1.0
"""Duration of a request where none has ended yet; a guess, nothing measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """One ready worker of a pool.

    slots   slots that placement fills
    wait_s  queue wait for a new request, in routers and at the engine
    """

    pool: str
    base_model: str
    slots: int
    max_lora_rank: int
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNeed:
    """The copies that one adapter should have."""

    base_model: str | None
    rank: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """The figures of one pool: the workers of one base model with one pool name.

    slots         slots of all its workers
    slots_wanted  copies of adapters that should be in the pool, whether or not they have room
    queue_wait_s  wait of a request that comes now, the mean over its workers
    use           of a pool that may be at zero; None: of another
    """

    base_model: str
    name: str
    slots: int = 0
    slots_wanted: float = 0.0
    queue_wait_s: float = 0.0
    use: "PoolUse | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Whether the base model of a pool that may be at zero is in use.

    held    requests that routers hold for its first ready worker
    idle_s  seconds since any request for it was held, ran or ended
    """

    held: int
    idle_s: float


def engine_wait_s(running: int, waiting: int, request_s: float) -> float:
    """Seconds until an engine would start a new request: its queue at the rate at which requests end (Little's law).

    request_s  mean time from a request's start to its last token; 0.0 before any has ended
    """
    return waiting * (request_s or _FIRST_REQUEST_S) / max(1, running)


def pool_figures(members: Iterable[PoolMember], needs: Iterable[AdapterNeed]) -> list[PoolFigures]:
    """The figures of every pool with a worker, by base model and name.

    A copy counts for the pools with the smallest sufficient `max_lora_rank`, as others are dearer to run. Several such
    pools share it by their slots.
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


def with_pools_from_zero(figures: Iterable[PoolFigures], uses: Mapping[tuple[str, str], PoolUse]) -> list[PoolFigures]:
    """The figures with the use of each pool that may be at zero; such a pool without a worker has figures of 0.

    uses  (base model, pool) -> its use
    """
    found = {(pool.base_model, pool.name): pool for pool in figures}
    for key, use in uses.items():
        found[key] = replace(found.get(key) or PoolFigures(base_model=key[0], name=key[1]), use=use)
    return [found[key] for key in sorted(found)]
