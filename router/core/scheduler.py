"""The scheduler: match -> decide -> queue, for all base models of one router. No I/O; time and chance are arguments."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from lorafleet.identity import BlockHash, lora_id_of
from router.core.errors import NoReplica
from router.core.failover.circuit_breaker import HUNG, SILENT, CircuitBreaker
from router.core.failover.retry_budget import RetryBudget
from router.core.fleet import Replica, Roster
from router.core.kv.index import WorkerId
from router.core.queue.fair_queue import Fairness, FairQueue
from router.core.queue.queued_request import QueuedRequest
from router.core.queue.rooms import EngineRooms
from router.core.schedule.cost import adapter_move_s
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load import LoadBook
from router.core.schedule.policies.kv_lora import KvLoraPolicy
from router.core.schedule.policy import Decision, ForeseeablePolicy, RoutingPolicy, decide
from router.core.schedule.replica_book import LoadEntry
from router.core.schedule.request import NOTHING, HashChains, HashedRequest, PrefixMatch
from router.core.schedule.snapshot import FleetSnapshot
from router.core.sessions.book import SessionBook, SessionState

# A queued request is decided again and again; its prefix match is reused for this long.
_MATCH_KEPT_S = 0.1
# Whether a queued request may choose an engine with room is asked where at most one replica in so many has room: that
# costs the terms of those replicas, and a decision costs those of all.
_LEAST_FORESEEN = 4
# Base models and adapters whose decisions are numbered.
_MAX_TURNS = 10_000


@dataclass(frozen=True, slots=True)
class ShadowComparison:
    """A shadow policy's choice beside the live one: whether they agree, and the cost of each by the cost model."""

    policy: str
    agrees: bool
    cost_s: float
    live_cost_s: float


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Decides where requests go, counts those in flight, and queues those for which no engine has room.

    roster          the replicas of a base model, now
    match           what they have cached of a prompt
    on_shadow          called with what each shadow policy would have done; shadows decide nothing
    on_shadow_failure  called with the name of a shadow policy that raised, and its error
    late_binding_s  seconds of work queued at an engine at most; infinite: everything is sent at once
    most_in_flight_tokens  prompt tokens of this router at a base model's engines at most, further requests wait; 0: no
                    bound. A larger prompt goes when no other is in flight
    fairness        whether what a program was served counts among the queued requests of one adapter
    breaker         circuits of the replicas where requests failed
    budget          makes the retry budget of a base model
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
    fairness: Fairness = "request"
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    budget: Callable[[], RetryBudget] = RetryBudget
    rng: Random = field(default_factory=Random)
    load: LoadBook = field(default_factory=LoadBook)
    sessions: SessionBook = field(default_factory=SessionBook)
    queue: FairQueue = field(init=False)
    _foreseeable: ForeseeablePolicy | None = field(init=False)
    _turns: dict[tuple[str, str], int] = field(default_factory=dict)
    _budgets: dict[str, RetryBudget] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the queue, which decides through this scheduler."""
        self._foreseeable = self.policy if isinstance(self.policy, ForeseeablePolicy) else None
        self.queue = FairQueue(
            self._decide_queued,
            self.late_binding_s,
            self._is_full if self.most_in_flight_tokens else None,
            rooms=EngineRooms(self.roster, self.load, self.late_binding_s, self._may_choose),
            move_s=self._move_s,
            service_s=self._service_s,
        )

    def _move_s(self, queued: QueuedRequest) -> float:
        """Seconds to bring the request's adapter to the device of its likely replica; 0.0 if it is there."""
        request, worker = queued.hashed.request, queued.likely_worker
        if not request.engine_name:
            return 0.0
        roster = self.roster(request.base_model)
        position = None if worker is None else roster.positions.get(worker)
        if position is None:
            return 0.0
        replica = roster.replicas[position]
        held, book = replica.residents.get(request.engine_name), self.load.book(replica.id)
        if held is None:
            return 0.0
        was_reported = held.location == "device"
        if book.is_on_device(request.engine_name, was_reported=was_reported) if book is not None else was_reported:
            return 0.0
        if was_reported:  # others have taken its slot since
            return self.costs.host_to_device_s
        return adapter_move_s(replica, request.engine_name, roster.middle, self.costs)

    def decide(self, hashed: HashedRequest, now: float) -> Decision:
        """Decide where this request would go now, behind the queue; sends and queues nothing. Raises NoReplica.

        Takes the next turn number of its adapter and a random seed.
        """
        return self._decide(hashed, self.match(hashed), self.queue.backlog, now)

    def decide_or_enqueue(self, queued: QueuedRequest, now: float) -> Decision | None:
        """The decision, if the request may be sent now; else None, and it is queued. Raises NoReplica, Saturated."""
        return self.queue.decide_or_enqueue(queued, now)

    def take_admissible(self, now: float) -> Iterator[tuple[QueuedRequest, Decision | NoReplica]]:
        """Take the queued requests that can be sent now; see FairQueue.take_admissible."""
        return self.queue.take_admissible(now)

    def record_dispatch(self, decision: Decision, now: float, hashed: HashedRequest | None = None) -> LoadEntry:
        """Count a request that is about to be sent, also at breaker and retry budget. Runs the shadow policies.

        hashed  the decided request, whose session has a turn more; None: of no session
        """
        if self.shadows:
            self._run_shadows(decision)
        request, score, replica = decision.request, decision.score, decision.replica
        entry = self.load.add(
            replica.id,
            request.engine_name,
            score.prefill_s,
            now,
            request.prompt_tokens,
            score.cached_tokens,
            request.base_model,
            score.adapter_s,
            request.sequences,
            # What is still queued here does not go before a request that is sent.
            score.first_token_s - decision.snapshot.backlog.get(replica.id, 0.0),
            None if hashed is None else self._begin_turn(hashed, decision, now),
        )
        if entry.session is not None:
            entry.session.program.service_s += score.prefill_s + score.adapter_s
        if not request.excluded:
            (self._budgets.get(request.base_model) or self._budget_of(request.base_model, now)).requests += 1
        self.breaker.record_dispatch(replica, entry, now)
        return entry

    def _service_s(self, queued: QueuedRequest, decision: Decision) -> float:
        """Seconds of engine work that the program of a decided request was given, where programs count."""
        if self.fairness == "request":
            return 0.0
        return self.sessions.service_s(queued.hashed.session, *_known_chain(queued.hashed, decision.snapshot))

    def session_of(self, hashed: HashedRequest, decision: Decision) -> SessionState | None:
        """The session that a decided request continues; None: it begins one."""
        return self.sessions.find(hashed.session, *_known_chain(hashed, decision.snapshot))

    def _begin_turn(self, hashed: HashedRequest, decision: Decision, now: float) -> SessionState | None:
        """The session of a request that is about to be sent, with one turn more; None: it computes nothing."""
        request = hashed.request
        if not request.prompt_tokens:
            return None
        return self.sessions.begin_turn(
            hashed.session,
            *_known_chain(hashed, decision.snapshot),
            lora_id_of(request.engine_name),
            now,
            bool(request.excluded),
        )

    def record_success(self, replica: Replica, now: float, sent_at: float) -> None:
        """Record that a replica answered with a status below 400; may close its circuit."""
        self.breaker.record_success(replica, now, sent_at)

    def record_failure(self, replica: Replica, reason: str, now: float, *, sent_at: float = inf) -> None:
        """Count a failed attempt at a replica, unless it is gone; may open its circuit."""
        if self._same_incarnation(replica) is not None:
            fleet = self.roster(replica.base_model).replicas
            self.breaker.record_failure(replica, reason, now, self.rng, fleet=fleet, sent_at=sent_at)

    def record_probe(self, replica: Replica, now: float, *, is_well: bool) -> None:
        """Record the result of a health probe; see CircuitBreaker.record_probe."""
        self.breaker.record_probe(replica, now, self.rng, is_well=is_well)

    def try_take_retry(self, replica: Replica, now: float, *, sent_at: float) -> bool:
        """Whether a failed request may be sent once more, taken from the retry budget; call after `record_failure`.

        Requests in flight at a replica that was lost go elsewhere without drawing on the retry budget.
        """
        current = self._same_incarnation(replica)
        is_lost = current is None or current.state != "ready"
        if not is_lost and self.breaker.state(replica, now) != "closed":
            is_lost = sent_at <= self.breaker.changed_at(replica)
        return is_lost or self._budget_of(replica.base_model, now).take(now)

    def check_engines(self, replicas: Collection[Replica], now: float) -> None:
        """Open the circuits of engines that are silent or reported as hung; call once a second.

        replicas  all there are: circuits of other incarnations are forgotten
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
        """The replicas that take new requests and are not known to fail."""
        shut = self.breaker.open_incarnations(now)
        well = [replica for replica in self.roster(base_model).replicas if not replica.is_suspect]
        return [replica for replica in well if replica.state == "ready" and replica.incarnation not in shut]

    @property
    def retries_refused(self) -> int:
        """Retries refused because the budget of their base model was spent."""
        return sum(budget.refused for budget in self._budgets.values())

    def _run_shadows(self, decision: Decision) -> None:
        """Let each shadow policy decide on the same snapshot.

        `on_shadow` gets whether it chose the same replica, and both costs; `on_shadow_failure` gets an error.
        """
        for policy in self.shadows:
            try:
                shadow = decide(policy, decision.request, decision.snapshot)
            except Exception as exc:  # noqa: BLE001  (a shadow decides nothing, so it fails nothing)
                self.on_shadow_failure(policy.name, exc)
                continue
            is_same = shadow.position == decision.position
            self.on_shadow(ShadowComparison(policy.name, is_same, shadow.score.cost_s, decision.score.cost_s))

    def _same_incarnation(self, replica: Replica) -> Replica | None:
        """The replica as it is now, if its incarnation is still the same; else None."""
        same = (r for r in self.roster(replica.base_model).replicas if r.incarnation == replica.incarnation)
        return next(same, None)

    def _budget_of(self, base_model: str, now: float) -> RetryBudget:
        """The base model's retry budget; started where there is none."""
        budget = self._budgets.get(base_model)
        if budget is None:
            budget = self._budgets[base_model] = self.budget()
            budget.begin(now)
        return budget

    def _is_full(self, decision: Decision) -> bool:
        """Whether the request's tokens exceed what this router may have in flight at its base model."""
        if not self.most_in_flight_tokens:
            return False
        in_flight = self.load.in_flight_tokens(decision.request.base_model)
        return in_flight > 0 and in_flight + decision.request.prompt_tokens > self.most_in_flight_tokens

    def _decide_queued(self, queued: QueuedRequest, backlog: Mapping[WorkerId, float], now: float) -> Decision:
        """Decide a queued request; its prefix match is kept on it for a moment and reused. Raises NoReplica."""
        return self._decide(queued.hashed, self._matched(queued, now), backlog, now)

    def _matched(self, queued: QueuedRequest, now: float) -> PrefixMatch:
        """The prefix match of a queued request, at most `_MATCH_KEPT_S` old; kept on it."""
        if queued.matched is None or now - queued.matched[1] > _MATCH_KEPT_S:
            queued.matched = self.match(queued.hashed), now
        return queued.matched[0]

    def _may_choose(
        self, queued: QueuedRequest, positions: Sequence[int], backlog: Mapping[WorkerId, float], now: float
    ) -> bool:
        """Whether a queued request's decision may be one of these positions of its roster, not the likely replica's.

        False only where it certainly is not.
        """
        policy, request, likely_worker = self._foreseeable, queued.hashed.request, queued.likely_worker
        replicas = self.roster(request.base_model).replicas
        if policy is None or likely_worker is None or _LEAST_FORESEEN * len(positions) > len(replicas):
            return True
        matched = self._matched(queued, now)
        depth = matched.depths.get(likely_worker, 0)
        if all(matched.depths.get(replicas[i].id, 0) >= depth for i in positions):
            return True  # what it waits for is elsewhere, too
        snapshot = self._snapshot(queued.hashed, matched, backlog, now)
        likely = snapshot.roster.positions.get(likely_worker)
        try:
            able = snapshot.able(request)
        except NoReplica:
            return True
        if likely not in able:
            return True
        may = [position for position in positions if position in able]
        return bool(may) and policy.may_choose(request, snapshot, may, likely)

    def _decide(
        self, hashed: HashedRequest, matched: PrefixMatch, backlog: Mapping[WorkerId, float], now: float
    ) -> Decision:
        """Decide on a new snapshot of the fleet; numbers the decision and draws its seed. Raises NoReplica.

        Counts the decisions of each base model and engine name, from zero again when there are too many names.
        """
        request = hashed.request
        # Numbered for each adapter: a client that uses two in turn would else get the same half of each one's replicas.
        names = request.base_model, request.engine_name
        if len(self._turns) >= _MAX_TURNS:
            self._turns.clear()
        turn = self._turns[names] = self._turns.get(names, 0) + 1
        snapshot = self._snapshot(hashed, matched, backlog, now, self.rng.getrandbits(32), turn)
        return decide(self.policy, request, snapshot)

    def _snapshot(
        self,
        hashed: HashedRequest,
        matched: PrefixMatch,
        backlog: Mapping[WorkerId, float],
        now: float,
        seed: int = 0,
        turn: int = 0,
    ) -> FleetSnapshot:
        """All that a decision on this request reads, now."""
        base_model, load = hashed.request.base_model, self.load
        roster = self.roster(base_model)
        loads = load.fleet_load(base_model, roster.replicas)
        rho, context_tokens = load.utilisation(base_model, loads, now)
        # Positional arguments take a third of the time of named ones.
        return FleetSnapshot(
            roster,
            loads,
            matched.depths,
            matched.lower,
            matched.ranks,
            # A copy: the snapshot is kept, and the backlog goes on changing.
            dict(backlog) if backlog else NOTHING,
            self.breaker.open_incarnations(now),
            rho,
            context_tokens,
            now,
            seed,
            turn,
            self.costs,
        )

    def has_room(self, decision: Decision) -> bool:
        """Whether the chosen replica can take this request now."""
        return self.queue.has_room(decision) and not self._is_full(decision)


def _known_chain(hashed: HashedRequest, snapshot: FleetSnapshot) -> tuple[Sequence[BlockHash], int]:
    """A prompt's block hashes at one block size of the fleet, and how many of the first ones some replica has.

    Of an approximate prompt the hash that all turns of its conversation share.
    """
    if hashed.request.is_approximate and hashed.request.first_blocks:
        return (BlockHash(hashed.request.first_blocks),), 1
    for chain in hashed.chains.values():
        return chain, max(snapshot.depths.values(), default=0) if len(hashed.chains) == 1 else 0
    return (), 0


def first_blocks(chains: HashChains, *, tokens: int = 256) -> int:
    """The hash of a prompt's first `tokens`, which requests with the same beginning share; 0 without blocks."""
    for block_size, chain in sorted(chains.items()) if len(chains) > 1 else chains.items():
        if chain:
            return chain[min(len(chain), max(1, tokens // block_size)) - 1]
    return 0
