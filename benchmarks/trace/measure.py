"""One run of one policy, and its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isinf
from statistics import mean

from benchmarks.trace.contenders import PEERS
from benchmarks.trace.engine import Hardware
from benchmarks.trace.fleet import SPEEDS, Setting, TraceFleet, TraceRouter
from benchmarks.trace.ours import LorafleetRouter
from benchmarks.trace.rules import Peer
from benchmarks.trace.workload import BLOCK, TraceLine, TraceRequest, requests_of
from router.core.queue.fair_queue import Fairness
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.policies import POLICIES

# A request is good when it meets both.
TTFT_BASE_S, TTFT_TOKEN_S, INTER_TOKEN_S = 1.0, 0.1 / 1000, 0.1

GOOD = (
    f"first token within {TTFT_BASE_S:g} s + {TTFT_TOKEN_S * 1000:g} s per 1,000 prompt tokens, then a token every "
    f"{INTER_TOKEN_S:g} s on average"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCase:
    """One fleet under one load."""

    capacity: int
    load: float
    routers: int
    report_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFigures:
    """What one run gave. Requests that were shed or failed are `inf` in percentiles, and the timeout in the mean."""

    requests: int
    hit_share: float
    """Prompt tokens that were cached, of all."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    good_share: float
    inter_token_p99_s: float
    shed: int
    failed: int
    """Without a first token within the timeout, or whose engine was lost during the answer."""
    loads: int
    cold_ttft_mean_s: float
    """Of the requests whose adapter had to be read from disk."""
    preemptions: int
    off_p50: float
    """By how much predicted first tokens were off, as a share of the measured; and of the worst tenth."""
    off_p90: float
    load_wait_s: float
    """Mean seconds of loads that requests waited for themselves, over all requests."""
    again_share: float
    """Prompt tokens that were computed once more though an engine had computed them before, of all."""
    completion_mean_s: float
    """From a program's first request to its last token, without its pauses; 0.0 where there are no programs."""
    completion_p95_s: float
    jain: float
    """Jain's index over programs, else over adapters, of mean first tokens by what is good; 1.0: all wait alike."""


def names() -> list[str]:
    """Every policy: ours by name, then the peers' rules."""
    return [*POLICIES, *PEERS]


def run(
    policy: str,
    lines: list[TraceLine],
    case: TraceCase,
    seed: int,
    *,
    hardware: Hardware,
    speeds: tuple[float, ...] = SPEEDS,
    late_binding_s: float,
    costs: CostSettings,
) -> tuple[TraceFigures, list[TraceRequest], TraceFleet]:
    """One policy, one seed. The same seed gives every policy the same requests and the same fleet."""
    setting = Setting(hardware=hardware, speeds=speeds, routers=case.routers, report_s=case.report_s)
    requests = requests_of(lines, seed=seed, load=case.load, routers=case.routers)
    fleet = replay(policy, requests, setting, seed, late_binding_s=late_binding_s, costs=costs)
    return figures(requests, fleet), requests, fleet


def replay(
    policy: str,
    requests: Sequence[TraceRequest],
    setting: Setting,
    seed: int,
    *,
    late_binding_s: float,
    costs: CostSettings,
    fairness: Fairness = "request",
) -> TraceFleet:
    """The fleet after one policy has served the requests, which are written into."""
    fleet = TraceFleet(setting, seed, learns_rates=policy in POLICIES)
    for number in range(setting.routers):
        router: TraceRouter
        if policy in POLICIES:
            router = LorafleetRouter(
                policy,
                fleet,
                seed * 100 + number,
                costs=costs,
                late_binding_s=late_binding_s,
                fairness=fairness,
            )
        else:
            router = Peer(PEERS[policy], fleet, seed * 100 + number)
        fleet.routers.append(router)
    fleet.run(requests)
    return fleet


def figures(requests: Sequence[TraceRequest], fleet: TraceFleet) -> TraceFigures:
    """The figures of a run that is over."""
    timeout_s = fleet.setting.timeout_s
    ttfts = sorted(r.first_token - r.arrived if r.first_token >= 0 else inf for r in requests)
    gaps: dict[int, int] = {}
    for engine in fleet.engines:
        for gap, times in engine.gaps.items():
            gaps[gap] = gaps.get(gap, 0) + times
    off = sorted(_off(r) for r in requests if r.predicted_s >= 0 and r.first_token >= 0) or [0.0]
    completions = _completions(requests)
    cold = [_or(r.first_token - r.arrived if r.first_token >= 0 else inf, timeout_s) for r in requests if r.load_s]
    return TraceFigures(
        requests=len(requests),
        hit_share=sum(r.cached_tokens for r in requests) / sum(r.prompt_tokens for r in requests),
        ttft_mean_s=mean(_or(ttft, timeout_s) for ttft in ttfts),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        good_share=sum(map(_is_good, requests)) / len(requests),
        inter_token_p99_s=_weighted(gaps, 0.99) / 1000,
        shed=sum(r.is_shed for r in requests),
        failed=sum(r.last_token < 0 and not r.is_shed for r in requests),
        loads=sum(engine.counters.loads for engine in fleet.engines),
        cold_ttft_mean_s=mean(cold) if cold else 0.0,
        preemptions=sum(engine.counters.preemptions for engine in fleet.engines),
        off_p50=percentile(off, 0.5),
        off_p90=percentile(off, 0.9),
        load_wait_s=sum(r.load_s for r in requests) / len(requests),
        again_share=_again_share(requests),
        completion_mean_s=mean(completions),
        completion_p95_s=percentile(completions, 0.95),
        jain=_jain(requests, timeout_s),
    )


def _completions(requests: Sequence[TraceRequest]) -> list[float]:
    """Seconds of each program, in order, without its pauses."""
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for r in requests:
        if r.program >= 0:
            began[r.program] = min(began.get(r.program, inf), r.arrived)
            ended[r.program] = max(ended.get(r.program, 0.0), r.last_token - r.paused_s)
    return sorted(ended[program] - began[program] for program in began) or [0.0]


def _again_share(requests: Sequence[TraceRequest]) -> float:
    """The share of prompt tokens that were computed again: each full block, and each prompt's tail, needs it once."""
    computed = sum(r.prompt_tokens - r.cached_tokens for r in requests if r.first_token >= 0)
    known: set[int] = set()
    once = 0
    for r in requests:
        if r.first_token >= 0:
            known.update(r.keys)
            once += r.prompt_tokens - len(r.keys) * BLOCK
    return max(0.0, computed - once - len(known) * BLOCK) / sum(r.prompt_tokens for r in requests)


def _jain(requests: Sequence[TraceRequest], timeout_s: float) -> float:
    waits: dict[int, list[float]] = {}
    for r in requests:
        ttft_s = r.first_token - r.arrived if r.first_token >= 0 else timeout_s
        who = r.program if r.program >= 0 else r.adapter
        waits.setdefault(who, []).append(ttft_s / (TTFT_BASE_S + TTFT_TOKEN_S * r.prompt_tokens))
    means = [mean(found) for found in waits.values()]
    return sum(means) ** 2 / (len(means) * sum(wait * wait for wait in means))


def _off(request: TraceRequest) -> float:
    measured_s = request.first_token - request.sent
    return abs(request.predicted_s - measured_s) / measured_s


def _is_good(request: TraceRequest) -> bool:
    if request.first_token < 0 or request.last_token < 0:
        return False
    first_s, rest_s = request.first_token - request.arrived, request.last_token - request.first_token
    return is_good(first_s, rest_s, request.prompt_tokens, request.output_tokens)


def is_good(first_s: float, rest_s: float, prompt_tokens: int, output_tokens: int) -> bool:
    """Whether an answer is as fast as `GOOD` says, by the seconds to its first token and from there to its last."""
    return first_s <= TTFT_BASE_S + TTFT_TOKEN_S * prompt_tokens and rest_s <= INTER_TOKEN_S * (output_tokens - 1)


def _or(ttft: float, otherwise: float) -> float:
    return otherwise if isinf(ttft) else ttft


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value of an ordered sequence below or at which this share of it lies."""
    return ordered[min(len(ordered) - 1, ceil(share * len(ordered)) - 1)]


def _weighted(counts: dict[int, int], share: float) -> float:
    left = share * sum(counts.values())
    for value, times in sorted(counts.items()):
        left -= times
        if left <= 0:
            return value
    return 0.0
