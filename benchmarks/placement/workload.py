"""The requests of one run: sessions of a Zipf-popular adapter each, a hot set that changes, a flash crowd."""

import heapq
from dataclasses import dataclass
from itertools import accumulate
from random import Random

ZIPF = 0.9
LOAD_S, LOAD_SIGMA = 4.4, 0.26
"""Loads from remote storage were measured to take this long (p50 4.4 s, p90 6.1 s)."""
GAP_S = 12.0
CHANGES = 10
"""Adapters of the hot set that change places with others when it changes."""
LEAST_RANK, MOST_RANK, MOST_PADDING = 8, 128, 0.84
"""Requests of rank 8 were measured to lose up to 84 % beside rank 128, at their p95 (LoRAServe, arXiv 2511.22880)."""


def padding(rank: int) -> float:
    """How many times as long a batch takes when this is its largest rank: kernels pad all of it to that.

    Linear in between, a guess.
    """
    return 1 + MOST_PADDING * max(0, rank - LEAST_RANK) / (MOST_RANK - LEAST_RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario. Times in seconds; None for what does not happen.

    rate        requests a second, all adapters together
    work_s      mean engine work of one request
    change_s    how often the hot set changes
    flash       (from, to, requests a second more) for one adapter of the middle
    lost, back  when a worker goes, and when another comes
    is_regular  every adapter at its rate like a clock, each request the same work: demand that does not change
    warm_s      what comes before is not measured
    turns       mean requests of a session; 1: nobody comes back for another turn
    load_s      median seconds of a load; `stall_s`: the last of them, in which its engine stands still
    answer_s    from the first token to the last
    burst       (at, count): one request for each of so many adapters that nobody else asks for
    greedy      (adapters, rate): one tenant, who asks for so many adapters of its own, one after the other
    ranks       of the adapters, in turn; a request takes longer by the largest rank on its engine (`padding`)
    """

    name: str
    adapters: int = 100
    workers: int = 8
    slots: int = 8
    rate: float = 8.0
    work_s: float = 0.6
    lasts_s: float = 3600.0
    change_s: float | None = None
    flash: tuple[float, float, float] | None = None
    lost: float | None = None
    back: float | None = None
    is_regular: bool = False
    warm_s: float = 300.0
    zipf: float = ZIPF
    turns: int = 8
    load_s: float = LOAD_S
    stall_s: float = 0.5
    answer_s: float = 3.0
    burst: tuple[float, int] | None = None
    greedy: tuple[int, float] | None = None
    ranks: tuple[int, ...] = (LEAST_RANK,)

    def rank_of(self, adapter: int) -> int:
        """The rank of an adapter."""
        return self.ranks[adapter % len(self.ranks)]

    @property
    def first_greedy(self) -> int:
        """Number of the greedy tenant's first adapter: all above are its own, too."""
        return self.adapters + (0 if self.burst is None else self.burst[1])

    @property
    def all_adapters(self) -> int:
        """The number of adapters, the greedy tenant's included."""
        return self.first_greedy + (0 if self.greedy is None else self.greedy[0])


@dataclass(slots=True, eq=False)
class PlacementRequest:
    """One request, and what came of it: seconds on the run's clock, -1 where it never happened."""

    at: float
    adapter: int
    work_s: float
    first_token: float = -1.0
    has_waited: bool = False
    """Whether it found its adapter ready nowhere."""


def requests_of(scene: Scenario, seed: int) -> list[PlacementRequest]:
    """In order of arrival. A session keeps its adapter: about `turns` requests, about GAP_S apart."""
    rng = Random(seed)
    if scene.is_regular:
        return _regular(scene, rng)
    popular = list(range(scene.adapters))
    rng.shuffle(popular)
    weights = list(accumulate((rank + 1) ** -scene.zipf for rank in range(scene.adapters)))
    found: list[tuple[float, int]] = []
    now, changed = 0.0, 0.0
    while now < scene.lasts_s:
        now += rng.expovariate(scene.rate / scene.turns)
        if scene.change_s is not None and now - changed >= scene.change_s:
            changed += scene.change_s
            for rank in range(CHANGES):
                other = rng.randrange(CHANGES, scene.adapters)
                popular[rank], popular[other] = popular[other], popular[rank]
        found += _session(rng, now, rng.choices(popular, cum_weights=weights)[0], scene.turns)
    if scene.flash is not None:
        began, until, more = scene.flash
        at, crowded = began, popular[scene.adapters // 2]
        while (at := at + rng.expovariate(more)) < until:
            found.append((at, crowded))
    if scene.burst is not None:
        began, count = scene.burst
        found += ((began, scene.adapters + number) for number in range(count))
    if scene.greedy is not None:
        count, rate = scene.greedy
        times = (number / rate for number in range(int(scene.lasts_s * rate)))
        found += ((at, scene.first_greedy + number % count) for number, at in enumerate(times))
    found = [entry for entry in found if entry[0] < scene.lasts_s]
    heapq.heapify(found)
    sigma = 0.8
    mu = -(sigma**2) / 2
    ordered = (heapq.heappop(found) for _ in range(len(found)))
    return [PlacementRequest(at, adapter, scene.work_s * rng.lognormvariate(mu, sigma)) for at, adapter in ordered]


def _regular(scene: Scenario, rng: Random) -> list[PlacementRequest]:
    weights = [(rank + 1) ** -scene.zipf for rank in range(scene.adapters)]
    found = []
    for adapter, weight in enumerate(weights):
        period_s = sum(weights) / weight / scene.rate
        at = rng.random() * period_s
        while at < scene.lasts_s:
            found.append(PlacementRequest(at, adapter, scene.work_s))
            at += period_s
    return sorted(found, key=lambda request: (request.at, request.adapter))


def _session(rng: Random, now: float, adapter: int, mean_turns: int) -> list[tuple[float, int]]:
    turns = [(now, adapter)]
    while rng.random() > 1 / mean_turns:
        now += rng.expovariate(1 / GAP_S)
        turns.append((now, adapter))
    return turns


def hottest(requests: list[PlacementRequest], until: float, count: int) -> list[int]:
    """The adapters most asked for in the five minutes before."""
    asked: dict[int, int] = {}
    for request in requests:
        if until - 300 <= request.at < until:
            asked[request.adapter] = asked.get(request.adapter, 0) + 1
    return sorted(asked, key=lambda adapter: (-asked[adapter], adapter))[:count]
