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
from router.core.queue.fair_queue import FairQueue, HashChains, HashedRequest, PrefixMatch, QueuedRequest
from router.core.schedule.cost import CostSettings
from router.core.schedule.decision import NOTHING, Decision, FleetSnapshot, RoutingPolicy, decide
from router.core.schedule.load import LoadBook, LoadEntry
from router.core.schedule.policies.kv_lora import KvLoraPolicy

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
    shadowed  told what each shadow policy would have done; shadows decide nothing. `shadow_failed`: one raised
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
    shadowed: Callable[[ShadowComparison], None] = lambda _: None
    shadow_failed: Callable[[str, Exception], None] = lambda _name, _exc: None
    costs: CostSettings = field(default_factory=CostSettings)
    late_binding_s: float = 1.0
    most_in_flight_tokens: int = 0
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    budget: Callable[[], RetryBudget] = RetryBudget
    rng: Random = field(default_factory=Random)
    load: LoadBook = field(default_factory=LoadBook)
    waiting: FairQueue = field(init=False)
    _turns: dict[tuple[str, str], int] = field(default_factory=dict)
    _budgets: dict[str, RetryBudget] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = FairQueue(
            self._decide_ticket,
            self.late_binding_s,
            self._is_full if self.most_in_flight_tokens else None,
            self.load.pace,
        )

    def decide(self, prompt: HashedRequest, now: float) -> Decision:
        """Where this request would go now, behind all that waits. Raises NoReplica."""
        return self._decided(prompt, self.match(prompt), self.waiting.backlog, now)

    def offer(self, ticket: QueuedRequest, now: float) -> Decision | None:
        """The decision if it may be sent now, else None: it waits. Raises NoReplica, Saturated."""
        return self.waiting.offer(ticket, now)

    def ready(self, now: float) -> Iterator[tuple[QueuedRequest, Decision | NoReplica]]:
        """What may be sent now of what waits; see Dispatcher.ready."""
        return self.waiting.ready(now)

    def begin(self, decision: Decision, now: float) -> LoadEntry:
        """Note that a request is about to be sent as decided."""
        if self.shadows:
            self._ask_shadows(decision)
        ask, score, replica = decision.ask, decision.score, decision.replica
        flight = self.load.begin(
            replica.id,
            ask.engine_name,
            score.prefill_s,
            now,
            ask.prompt_tokens,
            score.cached_tokens,
            ask.base_model,
            score.adapter_s,
            ask.sequences,
        )
        if not ask.excluded:
            (self._budgets.get(ask.base_model) or self._budget_of(ask.base_model, now)).requests += 1
        self.breaker.sent(replica, flight, now)
        return flight

    def succeeded(self, replica: Replica, now: float, sent_at: float) -> None:
        """It answered with a status below 400."""
        self.breaker.succeeded(replica, now, sent_at)

    def failed(self, replica: Replica, reason: str, now: float, *, sent_at: float = inf) -> None:
        """An attempt there failed before any of it reached the client; see Breaker.failed."""
        if self._current(replica) is not None:
            fleet = self.roster(replica.base_model).replicas
            self.breaker.failed(replica, reason, now, self.rng, fleet=fleet, sent_at=sent_at)

    def looked(self, replica: Replica, now: float, *, is_well: bool) -> None:
        """It was asked for something of our own; see Breaker.looked."""
        self.breaker.looked(replica, now, self.rng, is_well=is_well)

    def may_retry(self, replica: Replica, now: float, *, sent_at: float) -> bool:
        """Whether a request that failed there may be sent once more; to be asked after `failed`, once for each retry.

        What was under way when a replica was lost is no sign of a storm: it goes elsewhere and draws on no budget.
        """
        current = self._current(replica)
        is_lost = current is None or current.state != "ready"
        if not is_lost and self.breaker.state(replica, now) != "closed":
            is_lost = sent_at <= self.breaker.changed_at(replica)
        return is_lost or self._budget_of(replica.base_model, now).take(now)

    def watch(self, replicas: Collection[Replica], now: float) -> None:
        """Look for engines that have fallen silent, or that their agents suspect, and forget the circuits of others
        than these; once a second.
        """
        self.breaker.known(replicas, now)
        for replica in replicas:
            if replica.is_suspect:
                self.failed(replica, HUNG, now)
                continue
            self.breaker.trusted(replica, now)
            silent_s = self.load.silent_s(replica.id, now, since=self.breaker.changed_at(replica))
            if silent_s > self.breaker.rules.silent_s:
                self.failed(replica, SILENT, now)

    def able(self, base_model: str, now: float) -> list[Replica]:
        """The replicas that take new requests, and are not known to fail."""
        shut = self.breaker.shut(now)
        well = [replica for replica in self.roster(base_model).replicas if not replica.is_suspect]
        return [replica for replica in well if replica.state == "ready" and replica.incarnation not in shut]

    @property
    def retries_refused(self) -> int:
        """Attempts that were not made again because their base model's budget was spent."""
        return sum(budget.refused for budget in self._budgets.values())

    def _ask_shadows(self, decision: Decision) -> None:
        for policy in self.shadows:
            try:
                shadow = decide(policy, decision.ask, decision.scene)
            except Exception as exc:  # noqa: BLE001  (a shadow decides nothing, so it fails nothing)
                self.shadow_failed(policy.name, exc)
                continue
            is_same = shadow.position == decision.position
            self.shadowed(ShadowComparison(policy.name, is_same, shadow.score.cost_s, decision.score.cost_s))

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
        there = self.load.in_flight_tokens(decision.ask.base_model)
        return there > 0 and there + decision.ask.prompt_tokens > self.most_in_flight_tokens

    def _decide_ticket(self, ticket: QueuedRequest, backlog: Mapping[WorkerId, float], now: float) -> Decision:
        if ticket.matched is None or now - ticket.matched[1] > _MATCH_KEPT_S:
            ticket.matched = self.match(ticket.prompt), now
        return self._decided(ticket.prompt, ticket.matched[0], backlog, now)

    def _decided(
        self, prompt: HashedRequest, matched: PrefixMatch, backlog: Mapping[WorkerId, float], now: float
    ) -> Decision:
        ask, load = prompt.ask, self.load
        roster = self.roster(ask.base_model)
        loads = load.owns(ask.base_model, roster.replicas)
        rho, context_tokens = load.work(ask.base_model, loads, now)
        # Of each model by itself: who asks two of them in turn would else ask the same half of each one's replicas.
        names = ask.base_model, ask.engine_name
        if len(self._turns) >= _MOST_TURNS:
            self._turns.clear()
        turn = self._turns[names] = self._turns.get(names, 0) + 1
        # In order, not by name: that takes a third of the time.
        scene = FleetSnapshot(
            roster,
            loads,
            matched.depths,
            matched.lower,
            matched.ranks,
            # A copy: the scene is kept, and what waits goes on changing.
            dict(backlog) if backlog else NOTHING,
            self.breaker.shut(now),
            rho,
            context_tokens,
            now,
            self.rng.getrandbits(32),
            turn,
            self.costs,
        )
        return decide(self.policy, ask, scene)

    def has_room(self, decision: Decision) -> bool:
        """Whether its replica may be given this request now."""
        return self.waiting.has_room(decision) and not self._is_full(decision)


def first_blocks(chains: HashChains, *, tokens: int = 256) -> int:
    """A hash of a prompt's first blocks: what requests that begin alike have in common; 0 of none."""
    for block_size, chain in sorted(chains.items()) if len(chains) > 1 else chains.items():
        if chain:
            return chain[min(len(chain), max(1, tokens // block_size)) - 1]
    return 0
