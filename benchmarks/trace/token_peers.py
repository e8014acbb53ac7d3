"""Newer rules of peers that count tokens and requests in flight. Facts are theirs, the code is not."""

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from benchmarks.trace.peers import Dynamo, LlmD
from benchmarks.trace.rules import Exact, Rule
from benchmarks.trace.workload import BLOCK, TraceRequest


class InFlightTokens(Exact):
    """The router's own account of each worker: tokens still to prefill, and tokens of the requests in flight."""

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self.to_prefill = [0] * workers
        self.held = [0] * workers
        self._prefilling: dict[TraceRequest, int] = {}

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the account."""
        self._prefilling[request] = self.uncached(request)[worker]
        self.to_prefill[worker] += self._prefilling[request]
        self.held[worker] += request.prompt_tokens

    def first_token(self, request: TraceRequest) -> None:
        """Out of prefill."""
        self.to_prefill[request.worker] -= self._prefilling.pop(request, 0)

    def ended(self, request: TraceRequest) -> None:
        """Out of the account."""
        self.first_token(request)
        self.held[request.worker] -= request.prompt_tokens


class LMetric(InFlightTokens):
    """LMetric (OSDI 2026, arXiv 2603.15202): the least of new prefill tokens x batch size, with no weights at all.

    New prefill tokens are those in work and those of this request that are not cached. The batch counts this request,
    so that engines without any still differ by their caches.
    """

    def choose(self, request: TraceRequest) -> int:
        """The least product."""
        batches = [count + 1 for count in self.in_flight]
        tokens = [work + own for work, own in zip(self.to_prefill, self.uncached(request), strict=True)]
        return self.least([work * batch for work, batch in zip(tokens, batches, strict=True)])


class RayTokenLoad(InFlightTokens):
    """Ray Serve LLM's KVAwareRouter (ray, doc/source/serve/llm/user-guides/kv-aware-routing): the least token load.

    That is the request's remaining prefill, the worker's prefill in work, and the tokens that its requests hold. Ray
    hands the choice to Dynamo's selection service (routing_policies/kv_aware/kv_token_tracker.py); unlike Dynamo's
    rule here, this one counts tokens of each request, not distinct blocks. Answers' tokens are left out: no router
    here is told of them before the end.
    """

    def choose(self, request: TraceRequest) -> int:
        """The least load."""
        loads = zip(self.to_prefill, self.held, self.uncached(request), strict=True)
        return self.least([prefill + held + own for prefill, held, own in loads])


class RayPrefixAware(Rule):
    """Ray Serve LLM's PrefixCacheAffinityRouter (routing_policies/prefix_aware/prefix_aware_router.py).

    Of those that were sent the deepest match, the shortest queue, if the match is a tenth of the prompt or more; else
    those that were sent the least text. Without either: the shorter of two queues by chance. By default no difference
    of queues counts as imbalance, and nothing is forgotten. The tree knows no adapter.
    """

    match_rate: ClassVar[float] = 0.1

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self._seen: dict[int, set[int]] = {}
        self._sizes = [0] * workers

    def choose(self, request: TraceRequest) -> int:
        """Match, else spread."""
        matched, depth = set(range(self.workers)), 0
        for block in request.ids:
            deeper = matched & self._seen.get(block, set())
            if not deeper:
                break
            matched, depth = deeper, depth + 1
        if depth / len(request.ids) >= self.match_rate:
            among = sorted(matched)
        elif any(self._sizes):
            among = [n for n, size in enumerate(self._sizes) if size == min(self._sizes)]
        else:
            among = self.rng.sample(range(self.workers), 2)
        shortest = min(self.in_flight[n] for n in among)
        return self.rng.choice([n for n in among if self.in_flight[n] == shortest])

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the tree."""
        for block in request.ids:
            holders = self._seen.setdefault(block, set())
            self._sizes[worker] += worker not in holders
            holders.add(worker)


class LlmDTokenLoad(LlmD):
    """llm-d's token-load-scorer behind its prefix-cache-affinity-filter (pkg/epp/framework/plugins/scheduling).

    Those that were sent 0.8 of the prompt or more are sticky; among them, the fewest prompt tokens in flight. One in a
    hundred requests looks at all, and so does one whose sticky workers are behind by more than 5 s of prefill: their
    tokens in flight by the plugin's rate of 15,928 a second.
    """

    threshold: ClassVar[float] = 0.8
    exploration: ClassVar[float] = 0.01
    penalty_s: ClassVar[float] = 5.0
    tokens_per_s: ClassVar[float] = 15_928.0

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self.tokens = [0] * workers

    def choose(self, request: TraceRequest) -> int:
        """The fewest tokens among the sticky ones."""
        among = self.sticky(request, [tokens / self.tokens_per_s for tokens in self.tokens])
        fewest = min(self.tokens[n] for n in among)
        return self.rng.choice([n for n in among if self.tokens[n] == fewest])

    def sticky(self, request: TraceRequest, first_token_s: list[float]) -> list[int]:
        """The workers that pass the filter, by the first token predicted at each."""
        everybody = list(range(self.workers))
        shares = self.prefix_shares(request)
        sticky = [n for n in everybody if shares[n] >= self.threshold]
        others = [n for n in everybody if n not in sticky]
        if not sticky or not others or self.rng.random() < self.exploration:
            return everybody
        behind_s = min(first_token_s[n] for n in sticky) - min(first_token_s[n] for n in others)
        return everybody if behind_s > self.penalty_s else sticky

    def prefix_shares(self, request: TraceRequest) -> list[float]:
        """Share of the prompt's blocks that each worker was sent."""
        depths: Mapping[int, int] = self.depths(request)
        return [depths.get(n, 0) / max(1, len(request.keys)) for n in range(self.workers)]

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the LRU and the account."""
        super().sent(request, worker)
        self.tokens[worker] += request.prompt_tokens

    def ended(self, request: TraceRequest) -> None:
        """Out of the account."""
        super().ended(request)
        self.tokens[request.worker] -= request.prompt_tokens


class DynamoSessions(Dynamo):
    """Dynamo with `--router-session-affinity-ttl-secs 600` (lib/llm/src/session_affinity, 1.6.2), hard mode.

    A session's first request is placed by the KV cost; later ones go to the same worker, until 600 s without any.
    All sub-agents of one session share a binding.
    """

    ttl_s: ClassVar[float] = 600.0

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self._bound: dict[tuple[bool, int], tuple[int, float]] = {}

    def choose(self, request: TraceRequest) -> int:
        """The bound worker, else the least cost."""
        is_sub_agent = request.parent >= 0
        binding = is_sub_agent, request.parent if is_sub_agent else request.session
        worker, until = self._bound.get(binding, (0, -1.0))
        if until < self.now:
            worker = super().choose(request)
        depth = self.depths(request).get(worker, 0)
        self._mine[request] = max(0, request.prompt_tokens - depth * BLOCK)
        self._bound[binding] = worker, self.now + self.ttl_s
        return worker
