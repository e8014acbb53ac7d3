"""filter -> cost -> pick: the replica where a request ends soonest and delays the others least."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from xxhash import xxh3_64_intdigest

from router.core.errors import NoReplica
from router.core.fleet import Excluded, Replica
from router.core.index import WorkerId
from router.core.load import Own

Share = Callable[[Replica], Own]


@dataclass(frozen=True, slots=True)
class Costs:
    """The numbers of the cost model. Where no source is named the value is a guess, nothing measured."""

    # Before any replica has reported a rate: an 8B model on one 80 GB GPU does about this.
    prefill_tokens_per_s: float = 10_000.0
    # An adapter in host memory moves to a device slot: rank 64 of an 8B model is 336 MB over PCIe.
    host_to_device_s: float = 0.02
    # What one second of prefill takes from each decode that runs beside it.
    decode_harm: float = 0.02
    kappa_max: float = 16.0
    # Within this share of the best (or this many seconds) the choice is random, so that routers do not herd.
    tie_share: float = 0.05
    tie_s: float = 0.0005
    # How much of a replica's own measured rate counts; the rest is the fleet's median.
    own_rate_share: float = 0.8


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as far as the choice of a replica depends on it.

    excluded  what failed this request; an engine that started again is not among it
    """

    base_model: str
    engine_name: str
    prompt_tokens: int
    excluded: Excluded = frozenset()


@dataclass(frozen=True, slots=True)
class Score:
    """One replica's terms, in seconds but for `depth_blocks` and `cached_tokens`."""

    replica: WorkerId
    depth_blocks: int
    cached_tokens: int
    prefill_s: float
    adapter_s: float
    queue_s: float
    harm_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen replica and why. `rejected` says which filter each other replica failed."""

    replica: Replica
    score: Score
    scores: tuple[Score, ...]
    rejected: Mapping[WorkerId, str]
    kappa: float
    rho: float


def kappa(rho: float, *, most: float) -> float:
    """How much dearer work is than waiting: work delays everyone behind it, more so the busier the fleet."""
    return most if rho >= 1 - 1 / most else max(1.0, 1 / (1 - rho))


def decide(
    ask: Ask,
    replicas: Sequence[Replica],
    depths: Mapping[WorkerId, int],
    share: Share,
    *,
    rho: float,
    costs: Costs,
    rng: Random,
    now: float,
) -> Decision:
    """The replica with the least cost; ties within a few percent fall at random.

    depths  contiguous cached blocks per replica
    share   this router's own load on a replica, and the others' as last reported
    rho     utilisation of the base model's fleet
    raises  NoReplica when every replica failed a filter
    """
    rejected = {r.id: reason for r in replicas if (reason := rejection(ask, r)) is not None}
    able = [r for r in replicas if r.id not in rejected]
    if not able:
        why = ", ".join(f"{replica}: {reason}" for replica, reason in sorted(rejected.items())) or "the fleet is empty"
        raise NoReplica(f"no replica of {ask.base_model!r} can serve this now ({why})")
    able = _within_slots(ask, able, share, rejected)
    price = kappa(rho, most=costs.kappa_max)
    moment = _Moment(price, fleet_prefill_rate(replicas, costs), costs, now)
    scores = tuple(_score(ask, r, depths.get(r.id, 0), share(r), moment) for r in able)
    best = min(score.cost_s for score in scores)
    close = [i for i, s in enumerate(scores) if s.cost_s <= best * (1 + costs.tie_share) + costs.tie_s]
    winner = rng.choice(close)
    return Decision(able[winner], scores[winner], scores, rejected, price, rho)


def rejection(ask: Ask, replica: Replica) -> str | None:
    """The filter that a replica fails, or None."""
    if replica.base_model != ask.base_model:
        return "other base model"
    if replica.incarnation in ask.excluded:
        return "failed this request before"
    if replica.state != "ready":
        return replica.state
    if ask.engine_name and ask.engine_name not in replica.residents:
        return "adapter not resident"
    if ask.engine_name in replica.draining:
        return "adapter draining"
    return None


def fleet_prefill_rate(replicas: Sequence[Replica], costs: Costs) -> float:
    """Tokens per second that the middle replica prefills; the default until one has measured it."""
    measured = [r.report.prefill_tokens_per_s for r in replicas if r.report.prefill_tokens_per_s > 0]
    return median(measured) if measured else costs.prefill_tokens_per_s


def prefill_rate(replica: Replica, fleet_rate: float, costs: Costs) -> float:
    """A replica's own measured rate, shrunk towards the fleet's."""
    own = replica.report.prefill_tokens_per_s or fleet_rate
    return costs.own_rate_share * own + (1 - costs.own_rate_share) * fleet_rate


def _within_slots(ask: Ask, able: list[Replica], share: Share, rejected: dict[WorkerId, str]) -> list[Replica]:
    """Those where this adapter opens no slot beyond `max_loras`; all of them when there is no such replica."""
    if not ask.engine_name:
        return able
    fits = [r for r in able if len((share(r).engine_names | {ask.engine_name}) - {""}) <= r.max_loras]
    if fits and len(fits) < len(able):
        rejected |= {r.id: "its adapter slots are all in use" for r in able if r not in fits}
    return fits or able


@dataclass(frozen=True, slots=True)
class _Moment:
    """What is the same for every replica of one decision."""

    kappa: float
    fleet_rate: float
    costs: Costs
    now: float


def _score(ask: Ask, replica: Replica, depth: int, own: Own, moment: _Moment) -> Score:
    costs = moment.costs
    # The engine computes at least the last token again, even on a full hit (vLLM 0.32, seen running).
    cached = min(depth * replica.block_size, max(0, ask.prompt_tokens - 1))
    prefill_s = (ask.prompt_tokens - cached) / prefill_rate(replica, moment.fleet_rate, costs)
    adapter_s = _adapter_wait_s(ask, replica, own, costs)
    queue_s = _queue_wait_s(replica, own, moment.now)
    harm_s = costs.decode_harm * prefill_s * (own.in_flight + own.others_in_flight)
    cost_s = moment.kappa * (prefill_s + adapter_s) + queue_s + harm_s
    return Score(replica.id, depth, cached, prefill_s, adapter_s, queue_s, harm_s, cost_s)


def _adapter_wait_s(ask: Ask, replica: Replica, own: Own, costs: Costs) -> float:
    if not ask.engine_name:
        return 0.0
    others = own.engine_names - {"", ask.engine_name}
    # Every slot is busy with another adapter: this one waits until one of them has no request left.
    contention_s = own.request_s if len(others) >= replica.max_loras else 0.0
    moves = replica.residents[ask.engine_name].location != "device"
    return contention_s + (costs.host_to_device_s if moves else 0.0)


def _queue_wait_s(replica: Replica, own: Own, now: float) -> float:
    # max, not sum: part of what the engine reports is ours, and it has worked since the report.
    age_s = max(0.0, now - replica.report.at)
    queue_s = max(own.prefill_s, own.others_queue_s + own.prefill_s - age_s)
    beyond = own.in_flight + own.others_in_flight + 1 - replica.max_num_seqs
    full_s = own.request_s * beyond / replica.max_num_seqs if beyond > 0 else 0.0
    # A full KV cache preempts or queues: priced as one more request's wait.
    return queue_s + full_s + (own.request_s if replica.report.kv_usage > 0.98 else 0.0)


def rendezvous_home(lora_id: str, replicas: Sequence[Replica]) -> Replica | None:
    """The replica where an adapter belongs when nobody decides: highest claim wins; None without replicas.

    The orchestrator's placement uses the same claim, so that both mean the same home; a test holds them together.
    """

    def claim(replica: Replica) -> tuple[int, str]:
        return xxh3_64_intdigest(f"{len(lora_id)}:{lora_id}{replica.id}".encode()), replica.id

    return max(replicas, key=claim, default=None)
