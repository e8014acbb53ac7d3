"""The peers' rules, each as close to its source as what it may see here allows. Facts are theirs, the code is not.

rules.py says what they share, token_peers.py and learned_peers.py have the newer ones, contenders.py the names of all.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from random import Random
from statistics import mean, pstdev
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from benchmarks.trace.fleet import Changes, EngineReading
from benchmarks.trace.rules import Exact, Rule
from benchmarks.trace.workload import BLOCK, TraceRequest

# --- vLLM production-stack, helm 0.1.12 (a6c01db), src/vllm_router/routers/routing_logic.py


class StackRoundRobin(Rule):
    """RoundRobinRouter: a counter over the sorted endpoints."""

    _turn = -1

    def choose(self, request: TraceRequest) -> int:  # noqa: ARG002 - any request
        """The next."""
        self._turn += 1
        return self._turn % self.workers


class StackSession(Rule):
    """SessionRouter: a consistent hash ring on the session's header."""

    points: ClassVar[int] = 160

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        ring = [
            (xxh3_64_intdigest(f"w{n}-{point}".encode()), n) for n in range(workers) for point in range(self.points)
        ]
        self._ring = sorted(ring)

    def choose(self, request: TraceRequest) -> int:
        """Where the session's hash falls."""
        place = bisect_right(self._ring, (xxh3_64_intdigest(str(request.session).encode()), -1))
        return self._ring[place % len(self._ring)][1]


class StackPrefixAware(Rule):
    """PrefixAwareRouter: a trie of all prompts ever sent (no eviction, no adapter in it); of those that match deepest,
    one by chance, whatever its load.
    """

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self._seen: dict[int, set[int]] = {}

    def choose(self, request: TraceRequest) -> int:
        """One of the deepest matches."""
        matched = set(range(self.workers))
        for block in request.ids:
            deeper = matched & self._seen.get(block, set())
            if not deeper:
                break
            matched = deeper
        return self.rng.choice(sorted(matched))

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the trie."""
        for block in request.ids:
            self._seen.setdefault(block, set()).add(worker)


class StackKvAware(StackSession):
    """KvawareRouter: the instance that LMCache's controller names first, if it has all but 2,000 tokens of the prompt;
    else by session. The controller goes block by block and names the first holder of each.
    """

    follows_events: ClassVar[bool] = True
    threshold_tokens: ClassVar[int] = 2000

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self._holders: dict[int, dict[int, None]] = {}

    def choose(self, request: TraceRequest) -> int:
        """The first holder, or the session's."""
        matched: dict[int, int] = {}
        for depth, key in enumerate(request.keys, start=1):
            holders = self._holders.get(key)
            if not holders:
                break
            matched[next(iter(holders))] = depth * BLOCK
        if matched:
            first, tokens = next(iter(matched.items()))
            if tokens >= request.prompt_tokens - self.threshold_tokens:
                return first
        return super().choose(request)

    def cached(self, worker: int, changes: Changes) -> None:
        """Into the controller's pool."""
        for key, is_new in changes:
            if is_new:
                self._holders.setdefault(key, {})[worker] = None
            elif key in self._holders:
                self._holders[key].pop(worker, None)
                if not self._holders[key]:
                    del self._holders[key]


# --- vllm-project/router (16917f4, a fork of SGLang's), src/policies/cache_aware.rs, src/tree.rs, src/main.rs


class CacheAware(Rule):
    """CacheAwarePolicy: the fewest requests when loads are apart by more than 64 and by 1.5; else whoever was sent the
    deepest match last, if that is more than 0.3 of the prompt; else the fewest requests. The tree knows no adapter.
    """

    threshold: ClassVar[float] = 0.3
    apart: ClassVar[int] = 64
    apart_ratio: ClassVar[float] = 1.5

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self._last: dict[int, int] = {}

    def choose(self, request: TraceRequest) -> int:
        """Balance first, then match."""
        most, least = max(self.in_flight), min(self.in_flight)
        if most - least > self.apart and most > least * self.apart_ratio:
            return self.least_busy()
        worker, depth = None, 0
        for block in request.ids:
            last = self._last.get(block)
            if last is None:
                break
            worker, depth = last, depth + 1
        if worker is not None and depth / len(request.ids) > self.threshold:
            return worker
        return self.least_busy()

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the tree, which at its default size (2^26 characters a worker) forgets nothing of this trace."""
        for block in request.ids:
            self._last[block] = worker


# --- llm-d inference scheduler (520af47, 0.8), pkg/epp: scorers, their weights by config/charts/epplib


class LlmD(Rule):
    """Weighted scores, the highest wins: queue 2, KV in use 2, prefix 3 (an LRU of what was sent, as large as the
    engine's cache, with the adapter in its keys), LoRA affinity 1 as in its test configuration.

    Its limit of 256 blocks of a prompt is left out: of 16 tokens each that would be no more than 8 of ours.
    """

    queue, kv, prefix, lora = 2.0, 2.0, 3.0, 1.0
    max_loras: ClassVar[int] = 8

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]

    def choose(self, request: TraceRequest) -> int:
        """The highest sum."""
        queues = [reading.waiting if reading else 0 for reading in self.readings]
        least, most = min(queues), max(queues)
        depths = self.depths(request)
        scores = []
        for n, reading in enumerate(self.readings):
            score = self.queue * ((most - queues[n]) / (most - least) if most > least else 1.0)
            score += self.kv * (1 - (reading.kv_usage if reading else 0.0))
            score += self.prefix * depths.get(n, 0) / max(1, len(request.keys))
            scores.append(score + self.lora * self._affinity(request.adapter, reading))
        best = max(scores)
        return self.rng.choice([n for n, score in enumerate(scores) if score == best])

    def depths(self, request: TraceRequest) -> Mapping[int, int]:
        """Matching blocks per worker."""
        found = {}
        for n, sent in enumerate(self._sent):
            depth = 0
            for key in request.keys:
                if key not in sent:
                    break
                depth += 1
            found[n] = depth
        return found

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the worker's LRU."""
        held = self._sent[worker]
        for key in request.keys:
            held[key] = None
            held.move_to_end(key)
        while len(held) > self.blocks:
            held.popitem(last=False)

    def _affinity(self, adapter: int, reading: EngineReading | None) -> float:
        if reading is None:
            return 0.8
        if adapter in reading.running_adapters:
            return 1.0
        if len(reading.running_adapters) + len(reading.waiting_adapters) < self.max_loras:
            return 0.8
        return 0.6 if adapter in reading.waiting_adapters else 0.0


class LlmDPrecise(Exact, LlmD):
    """deploy/config/epp-precise-prefix-cache-config.yaml: precise prefix 2, KV in use 1, queue 1."""

    queue, kv, prefix, lora = 1.0, 1.0, 2.0, 0.0


# --- Dynamo (07a6c9c), lib/kv-router/src/scheduling/selector/default.rs


class Dynamo(Exact):
    """Least of (prefill tokens in work and of this request) / block size - overlap + distinct blocks in use, this
    request's included; all by the router's own account. Temperature 0, equal ones by chance.
    """

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self.prefill_tokens = [0] * workers
        self._mine: dict[TraceRequest, int] = {}
        self.in_use: list[dict[int, int]] = [{} for _ in range(workers)]

    def choose(self, request: TraceRequest) -> int:
        """The least cost."""
        depths = self.depths(request)
        costs = []
        for n in range(self.workers):
            in_use = self.in_use[n]
            blocks = len(in_use) + sum(key not in in_use for key in request.keys)
            prefill = (self.prefill_tokens[n] + request.prompt_tokens) / BLOCK - depths.get(n, 0)
            costs.append(max(0.0, prefill) + blocks)
        best = min(costs)
        worker = self.rng.choice([n for n, cost in enumerate(costs) if cost == best])
        self._mine[request] = max(0, request.prompt_tokens - depths.get(worker, 0) * BLOCK)
        return worker

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the account."""
        self.prefill_tokens[worker] += self._mine[request]
        in_use = self.in_use[worker]
        for key in request.keys:
            in_use[key] = in_use.get(key, 0) + 1

    def first_token(self, request: TraceRequest) -> None:
        """Out of prefill."""
        self.prefill_tokens[request.worker] -= self._mine.pop(request, 0)

    def ended(self, request: TraceRequest) -> None:
        """Out of use."""
        self.first_token(request)
        in_use = self.in_use[request.worker]
        for key in request.keys:
            if in_use[key] == 1:
                del in_use[key]
            else:
                in_use[key] -= 1


# --- AIBrix 0.7 (e3e10f9): pkg/plugins/gateway/algorithms/prefix_cache.go and its table in pkg/utils/prefixcacheindexer


class AiBrix(Rule):
    """prefix-cache: only the least busy when requests are apart by more than 8; of those that match, the deepest whose
    requests are within one standard deviation of the mean; else the least busy. What was sent is kept for 20 minutes,
    in 200,000 pieces of 128 characters (the documented size), with the model's name, here the adapter's, in the key.
    """

    apart: ClassVar[int] = 8
    kept_s: ClassVar[float] = 1200.0
    kept_blocks: ClassVar[int] = 200_000 * 128 // 4 // BLOCK

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self._sent = OrderedDict[int, tuple[float, dict[int, None]]]()

    def choose(self, request: TraceRequest) -> int:
        """Balance, match, guard."""
        counts = self.in_flight
        open_to = set(range(self.workers))
        if max(counts) - min(counts) > self.apart:
            open_to = {n for n in open_to if counts[n] == min(counts)}
        depths = self._depths(request, open_to)
        limit = mean(counts) + pstdev(counts)
        order = list(depths)
        self.rng.shuffle(order)
        order.sort(key=lambda n: (-depths[n], counts[n]))
        within = [n for n in order if counts[n] <= limit]
        return within[0] if within else self.least_busy()

    def _depths(self, request: TraceRequest, open_to: set[int]) -> dict[int, int]:
        depths: dict[int, int] = {}
        matched = open_to
        for depth, key in enumerate(request.keys, start=1):
            at, holders = self._sent.get(key, (0.0, {}))
            matched = matched & holders.keys()
            if not matched or self.now - at > self.kept_s:
                break
            depths |= dict.fromkeys(matched, depth)
        return depths

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the table."""
        for key in request.keys:
            _, holders = self._sent.pop(key, (0.0, {}))
            holders[worker] = None
            self._sent[key] = self.now, holders
        while len(self._sent) > self.kept_blocks:
            self._sent.popitem(last=False)
