"""match -> decide -> wait: one router's choices, without its sockets. Time is an argument, chance comes from a seed."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from router.core.errors import NoReplica
from router.core.failover.circuit_breaker import HUNG, SILENT, CircuitBreaker
from router.core.failover.retry_budget import RetryBudget
from router.core.fleet import Replica, Roster
from router.core.kv.index import WorkerId
from router.core.queue.fair_queue import FairQueue, QueuedRequest
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load import LoadBook
from router.core.schedule.policies.kv_lora import KvLoraPolicy
from router.core.schedule.policy import Decision, RoutingPolicy, decide
from router.core.schedule.replica_book import LoadEntry
from router.core.schedule.request import NOTHING, HashChains, HashedRequest, PrefixMatch
from router.core.schedule.snapshot import FleetSnapshot

# A waiting request is decided again and again; its match is as good as new for this long.
_MATCH_KEPT_S = 0.1
# So many models and adapters are remembered whose turn it is.
_MOST_TURNS = 10_000


@dataclass(frozen=True, slots=True)
class ShadowComparison:
    """What another policy would have done: the cost of its choice and of the live one, by the same cost model."""

    policy: str
    agrees: bool
    cost_s: float
    live_cost_s: float


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Decides, remembers what it sent, and holds back what no engine should be given yet.

    roster    the replicas of a base model, now
    match     what they have cached of a prompt
    shadowed  told what each shadow policy would have done; shadows decide nothing. `on_shadow_failure`: one raised
    late_binding_s   how much work is queued at an engine at most; infinite: everything is sent at once
    most_in_flight_tokens  prompt tokens that this router has at a base model's engines at most; what is beyond waits;
                           0: no bound. A prompt that is larger than it all goes when nothing else is there
    breaker   who is passed over because what was sent there failed
    budget    makes each base model's bound on attempts after the first
    """

    roster: Callable[[str], Roster]
    match: Callable[[HashedRequest], PrefixMatch]
    policy: RoutingPolicy = field(default_factory=KvLoraPolicy)
    shadows: Sequence[RoutingPolicy] = ()
    on_shadow: Callable[[ShadowComparison], None] = lambda _: None
    on_shadow_failure: Callable[[str, Exception], None] = lambda _name, _exc: None
    costs: CostSettings = field(default_factory=CostSettings)
    late_binding_s: float = 1.0
    most_in_flight_tokens: int = 0
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    budget: Callable[[], RetryBudget] = RetryBudget
    rng: Random = field(default_factory=Random)
    load: LoadBook = field(default_factory=LoadBook)
    queue: FairQueue = field(init=False)
    _turns: dict[tuple[str, str], int] = field(default_factory=dict)
    _budgets: dict[str, RetryBudget] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = FairQueue(
            self._decide_ticket,
            self.late_binding_s,
            self._is_full if self.most_in_flight_tokens else None,
            self.load.prefill_pace,
        )

    def decide(self, hashed: HashedRequest, now: float) -> Decision:
        """Where this request would go now, behind all that waits. Raises NoReplica."""
        return self._decided(hashed, self.match(hashed), self.queue.backlog, now)

    def decide_or_enqueue(self, queued: QueuedRequest, now: float) -> Decision | None:
        """The decision if it may be sent now, else None: it waits. Raises NoReplica, Saturated."""
        return self.queue.decide_or_enqueue(queued, now)

    def take_admissible(self, now: float) -> Iterator[tuple[QueuedRequest, Decision | NoReplica]]:
        """What may be sent now of what waits; see Dispatcher.ready."""
        return self.queue.take_admissible(now)

    def record_dispatch(self, decision: Decision, now: float) -> LoadEntry:
        """Note that a request is about to be sent as decided."""
        if self.shadows:
            self._ask_shadows(decision)
        request, score, replica = decision.request, decision.score, decision.replica
        flight = self.load.add(
            replica.id,
            request.engine_name,
            score.prefill_s,
            now,
            request.prompt_tokens,
            score.cached_tokens,
            request.base_model,
            score.adapter_s,
            request.sequences,
        )
        if not request.excluded:
            (self._budgets.get(request.base_model) or self._budget_of(request.base_model, now)).requests += 1
        self.breaker.record_dispatch(replica, flight, now)
        return flight

    def record_success(self, replica: Replica, now: float, sent_at: float) -> None:
        """It answered with a status below 400."""
        self.breaker.record_success(replica, now, sent_at)

    def record_failure(self, replica: Replica, reason: str, now: float, *, sent_at: float = inf) -> None:
        """An attempt there failed before any of it reached the client; see Breaker.failed."""
        if self._current(replica) is not None:
            fleet = self.roster(replica.base_model).replicas
            self.breaker.record_failure(replica, reason, now, self.rng, fleet=fleet, sent_at=sent_at)

    def record_probe(self, replica: Replica, now: float, *, is_well: bool) -> None:
        """It was asked for something of our own; see Breaker.looked."""
        self.breaker.record_probe(replica, now, self.rng, is_well=is_well)

    def take_retry(self, replica: Replica, now: float, *, sent_at: float) -> bool:
        """Whether a request that failed there may be sent once more; call once for each retry,
        after `record_failure`.

        What was under way when a replica was lost is no sign of a storm: it goes elsewhere and draws on no budget.
        """
        current = self._current(replica)
        is_lost = current is None or current.state != "ready"
        if not is_lost and self.breaker.state(replica, now) != "closed":
            is_lost = sent_at <= self.breaker.changed_at(replica)
        return is_lost or self._budget_of(replica.base_model, now).take(now)

    def check_engines(self, replicas: Collection[Replica], now: float) -> None:
        """Look for engines that have fallen silent, or that their agents suspect, and forget the circuits of others
        than these; once a second.
        """
        self.breaker.forget_others(replicas, now)
        for replica in replicas:
            if replica.is_suspect:
                self.record_failure(replica, HUNG, now)
                continue
            self.breaker.record_not_hung(replica, now)
            silent_s = self.load.silent_s(replica.id, now, since=self.breaker.changed_at(replica))
            if silent_s > self.breaker.rules.silent_s:
                self.record_failure(replica, SILENT, now)

    def healthy_replicas(self, base_model: str, now: float) -> list[Replica]:
        """The replicas that take new requests, and are not known to fail."""
        shut = self.breaker.open_incarnations(now)
        well = [replica for replica in self.roster(base_model).replicas if not replica.is_suspect]
        return [replica for replica in well if replica.state == "ready" and replica.incarnation not in shut]

    @property
    def retries_refused(self) -> int:
        """Attempts that were not made again because their base model's budget was spent."""
        return sum(budget.refused for budget in self._budgets.values())

    def _ask_shadows(self, decision: Decision) -> None:
        for policy in self.shadows:
            try:
                shadow = decide(policy, decision.request, decision.snapshot)
            except Exception as exc:  # noqa: BLE001  (a shadow decides nothing, so it fails nothing)
                self.on_shadow_failure(policy.name, exc)
                continue
            is_same = shadow.position == decision.position
            self.on_shadow(ShadowComparison(policy.name, is_same, shadow.score.cost_s, decision.score.cost_s))

    def _current(self, replica: Replica) -> Replica | None:
        """It as it is now, if that is still the same incarnation."""
        same = (r for r in self.roster(replica.base_model).replicas if r.incarnation == replica.incarnation)
        return next(same, None)

    def _budget_of(self, base_model: str, now: float) -> RetryBudget:
        budget = self._budgets.get(base_model)
        if budget is None:
            budget = self._budgets[base_model] = self.budget()
            budget.begin(now)
        return budget

    def _is_full(self, decision: Decision) -> bool:
        if not self.most_in_flight_tokens:
            return False
        there = self.load.in_flight_tokens(decision.request.base_model)
        return there > 0 and there + decision.request.prompt_tokens > self.most_in_flight_tokens

    def _decide_ticket(self, queued: QueuedRequest, backlog: Mapping[WorkerId, float], now: float) -> Decision:
        if queued.matched is None or now - queued.matched[1] > _MATCH_KEPT_S:
            queued.matched = self.match(queued.hashed), now
        return self._decided(queued.hashed, queued.matched[0], backlog, now)

    def _decided(
        self, hashed: HashedRequest, matched: PrefixMatch, backlog: Mapping[WorkerId, float], now: float
    ) -> Decision:
        request, load = hashed.request, self.load
        roster = self.roster(request.base_model)
        loads = load.fleet_load(request.base_model, roster.replicas)
        rho, context_tokens = load.utilisation(request.base_model, loads, now)
        # Of each model by itself: who asks two of them in turn would else ask the same half of each one's replicas.
        names = request.base_model, request.engine_name
        if len(self._turns) >= _MOST_TURNS:
            self._turns.clear()
        turn = self._turns[names] = self._turns.get(names, 0) + 1
        # In order, not by name: that takes a third of the time.
        snapshot = FleetSnapshot(
            roster,
            loads,
            matched.depths,
            matched.lower,
            matched.ranks,
            # A copy: the scene is kept, and what waits goes on changing.
            dict(backlog) if backlog else NOTHING,
            self.breaker.open_incarnations(now),
            rho,
            context_tokens,
            now,
            self.rng.getrandbits(32),
            turn,
            self.costs,
        )
        return decide(self.policy, request, snapshot)

    def has_room(self, decision: Decision) -> bool:
        """Whether its replica may be given this request now."""
        return self.queue.has_room(decision) and not self._is_full(decision)


def first_blocks(chains: HashChains, *, tokens: int = 256) -> int:
    """A hash of a prompt's first blocks: what requests that begin alike have in common; 0 of none."""
    for block_size, chain in sorted(chains.items()) if len(chains) > 1 else chains.items():
        if chain:
            return chain[min(len(chain), max(1, tokens // block_size)) - 1]
    return 0
