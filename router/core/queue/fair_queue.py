"""Late binding: an engine is given about a second of work, the rest waits here and is decided when there is room.

What waits is served in fair order: tenants share the fleet's time evenly, and so do the adapters of one tenant, each
by its weight, counted in seconds of work. A better replica can still be chosen while a request waits, and nobody
starves behind a hot adapter.

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996) on two levels: what deficit round robin gives,
without a quantum to choose. A request counts with its prefill when it is sent, and with its answer when that is over
and its length is known, as in Sheng et al., Fairness in Serving Large Language Models (2024). Pure: time is an
argument, nothing here waits by itself.
"""

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from router.core.errors import NoReplica, Saturated
from router.core.kv.index import WorkerId
from router.core.queue.admission import QueueUsage, RetryTimes, ServiceRates, WaitMargin, wait_s
from router.core.schedule.policy import Decision
from router.core.schedule.request import HashedRequest, PrefixMatch

# Those who would go to one replica; apart, those of them who want an adapter slot that is not free.
_Line = tuple[WorkerId, bool]

# Waiting requests looked at in one go: each costs a decision. And how far back one is looked for that waits for another
# replica than all of these: a step costs a microsecond or two.
_LOOKED_AT = 32
_LOOKED_OVER = 1000
# Who waits and is not served, because what it waits for is scarce, may be this much work behind the others and no more:
# else it would have all of the fleet for minutes once there is room for it. A guess.
_MOST_LAG_S = 10.0
# And who had more than was counted when it was sent, by long answers or many, is set back by this much and no more.
_MOST_DEBT_S = 10.0
_LEAST_WORK_S = 0.001
# How fast a tenant is served changes as others come and go: the lower of the last seconds' speed and the last minute's.
_TENANT_HORIZONS_S = (8.0, 40.0)
# What those who were turned away before add to the time after which the next one is to come back, at most.
_MOST_RETRY_S = 300.0
# Tenants, and adapters of one tenant, that are remembered while they do not wait, as long as anybody does. One that is
# forgotten joins where the others are: at most it is spared what it had of the last request.
_REMEMBERED_IDLE = 256


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest:
    """One request that wants to be sent.

    tenant, adapter  whose share it counts against
    weight           of the adapter within its tenant; 2.0 gets twice the share of 1.0
    priority         orders the requests of one tenant and adapter, lower first, as vLLM has it
    size_bytes       what it holds while it waits
    deadline_at      when nobody wants its answer any more
    most_wait_s      it is refused at once where it would wait for longer; infinite: it is never asked
    payload          the caller's own
    expected_s, since  what was predicted when it began to wait, and when that was; 0.0: nothing was
    wants_slot       an adapter slot is free where it would go neither for it nor for one before it
    """

    hashed: HashedRequest
    tenant: str = ""
    adapter: str = ""
    weight: float = 1.0
    priority: float = 0.0
    size_bytes: int = 0
    deadline_at: float | None = None
    most_wait_s: float = inf
    payload: Any = None
    matched: tuple[PrefixMatch, float] | None = None
    number: int = 0
    bound_to: WorkerId | None = None
    bound_s: float = 0.0
    expected_s: float = 0.0
    since: float = 0.0
    wants_slot: bool = False
    is_waiting: bool = False


@dataclass(slots=True)
class _AdapterFlow:
    """The waiting requests of one adapter of one tenant in order, and its weighted seconds of work so far."""

    had_s: float = 0.0
    weight: float = 1.0
    waiting_s: float = 0.0
    requests: list[QueuedRequest] = field(default_factory=list)


@dataclass(slots=True)
class _TenantFlows:
    """`level_s` is how far the service of its adapters has come: where one that has been idle joins."""

    had_s: float = 0.0
    level_s: float = 0.0
    waiting: int = 0
    waiting_s: float = 0.0
    flows: dict[str, _AdapterFlow] = field(default_factory=dict)


@dataclass(slots=True)
class FairQueue:
    """Who waits, and in which order they are decided.

    decide    the decision for a ticket now, with the seconds of work that are ahead of it per replica; may raise
              NoReplica
    late_binding_s  how much work is queued at an engine at most; infinite: everything is sent at once
    is_full   whether its base model may not, wherever it would go; then nobody of that base model overtakes it;
              None: never
    pace      of a replica: the share of the predicted seconds that its prefills have taken of late
    room      how much may wait
    """

    decide: Callable[[QueuedRequest, Mapping[WorkerId, float], float], Decision]
    late_binding_s: float = inf
    is_full: Callable[[Decision], bool] | None = None
    pace: Callable[[WorkerId], float] = lambda _: 1.0
    usage: QueueUsage = field(default_factory=QueueUsage)
    rates: ServiceRates = field(default_factory=ServiceRates)
    tenant_rates: tuple[ServiceRates, ...] = field(default_factory=lambda: tuple(map(ServiceRates, _TENANT_HORIZONS_S)))
    retry_times: RetryTimes = field(default_factory=RetryTimes)
    wait_margin: WaitMargin = field(default_factory=WaitMargin)
    _tenants: dict[str, _TenantFlows] = field(default_factory=dict)
    _level_s: float = 0.0
    _bound: dict[WorkerId, float] = field(default_factory=dict)
    _lines: dict[_Line, dict[QueuedRequest, None]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _waiting: int = 0
    _full: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        """How many wait."""
        return self._waiting

    @property
    def backlog(self) -> Mapping[WorkerId, float]:
        """Seconds of work that wait here, by the replica that each would go to as things stand."""
        return self._bound

    def has_room(self, decision: Decision) -> bool:
        """Whether the chosen replica may be given this request now: little is queued there, or it has nothing to do."""
        return (
            _queued_s(decision) <= self.late_binding_s or not decision.snapshot.loads[decision.position].all_in_flight
        )

    def is_free(self, decision: Decision) -> bool:
        """Whether a request that was decided just now may be sent at once: there is room, and nobody waits for it."""
        if decision.replica.id in self._bound or not self.has_room(decision):
            return False
        return self.is_full is None or not self._is_held(decision)

    def _may_pass(self, decision: Decision) -> bool:
        """Whether a request that was decided just now may go before those who wait for its replica: it takes no adapter
        slot, and they wait for nothing else.
        """
        worker = decision.replica.id
        if decision.request.engine_name or worker not in self._bound or (worker, False) in self._lines:
            return False
        return self.has_room(decision) and not self._is_held(decision)

    def decide_or_enqueue(self, queued: QueuedRequest, now: float) -> Decision | None:
        """The decision if this request may be sent at once; else None, and it waits.

        raises  NoReplica; Saturated when it may not wait, or would for too long
        """
        decision = self.decide(queued, self._bound, now)
        if self.is_free(decision):
            return decision
        if self._may_pass(decision):
            # Whoever goes by others has had it, as if it had waited.
            tenant, _ = self._joined(queued)
            self._serve(queued, _work_s(decision))
            self._tidy(tenant)
            return decision
        queued.since, queued.expected_s = now, self._check_wait(queued, decision, now)
        if not self._waiting:
            self.rates.begin(now)
            for drain in self.tenant_rates:
                drain.begin(now)
        self.usage.add(queued.tenant, queued.size_bytes)
        tenant, flow = self._joined(queued)
        queued.number, queued.is_waiting = next(self._numbers), True
        insort(flow.requests, queued, key=_place)
        tenant.waiting += 1
        self._waiting += 1
        is_behind_slot = bool(decision.request.engine_name) and (decision.replica.id, True) in self._lines
        self._bind(queued, decision, is_behind_slot=is_behind_slot)
        return None

    def _joined(self, queued: QueuedRequest) -> tuple[_TenantFlows, _AdapterFlow]:
        """Its tenant and adapter. Whoever was idle joins where the others are: idle time earns nothing."""
        tenant = self._tenants.setdefault(queued.tenant, _TenantFlows())
        flow = tenant.flows.setdefault(queued.adapter, _AdapterFlow())
        if not tenant.waiting:
            tenant.had_s = max(tenant.had_s, self._level_s)
        if not flow.requests:
            flow.had_s = max(flow.had_s, tenant.level_s)
        flow.weight = queued.weight
        return tenant, flow

    def remove(self, queued: QueuedRequest) -> None:
        """It waits no longer; repeats change nothing."""
        if not queued.is_waiting:
            return
        queued.is_waiting = False
        self.usage.remove(queued.tenant, queued.size_bytes)
        self._unbind(queued)
        tenant = self._tenants[queued.tenant]
        flow = tenant.flows[queued.adapter]
        flow.requests.remove(queued)
        tenant.waiting -= 1
        self._waiting -= 1
        # One that would join at the level again need not be remembered; when nobody waits nobody need be.
        if not flow.requests and flow.had_s <= tenant.level_s:
            del tenant.flows[queued.adapter]
        if not tenant.waiting and tenant.had_s <= self._level_s:
            del self._tenants[queued.tenant]
        self._tidy(tenant)
        if not self._waiting:
            self._tenants.clear()
            self._full.clear()
            self._level_s = 0.0

    def _tidy(self, tenant: _TenantFlows) -> None:
        if len(tenant.flows) > 2 * (tenant.waiting + _REMEMBERED_IDLE):
            _forget({name: flow.had_s for name, flow in tenant.flows.items() if not flow.requests}, tenant.flows)
        if len(self._tenants) > 2 * (self._waiting + _REMEMBERED_IDLE):
            _forget({name: it.had_s for name, it in self._tenants.items() if not it.waiting}, self._tenants)

    def charge_answer(self, tenant: str, adapter: str, weight: float, work_s: float) -> None:
        """An answer is over that took so much work besides its prefill. Counts while anybody waits: before, whatever
        was taken was taken from nobody.
        """
        if not self._waiting:
            return
        had = self._tenants.setdefault(tenant, _TenantFlows())
        had.had_s = _set_back(had.had_s, self._level_s, work_s, is_waiting=had.waiting > 0)
        flow = had.flows.setdefault(adapter, _AdapterFlow())
        flow.had_s = _set_back(flow.had_s, had.level_s, work_s / weight, is_waiting=bool(flow.requests))

    def time_out(self, queued: QueuedRequest, now: float) -> Saturated:
        """The refusal of a request that has waited for as long as it may. Learns from it; to be called once."""
        self.wait_margin.record_wait(queued.expected_s, now - queued.since, is_over=False)
        own_s = self._longest_own_s(queued)
        room_s = own_s - queued.most_wait_s / self.wait_margin.margin
        if own_s == 0.0:  # its tenant's speed is not known: when all that waits has been worked off
            room_s = sum(self._bound.values()) / (sum(map(self.rates.rate, self._bound)) or 1.0)
        return Saturated(
            f"no engine had room within {queued.most_wait_s:.3g} s; try again",
            retry_after_s=self._retry_s(queued, queued.bound_to, room_s, queued.bound_s or _LEAST_WORK_S, now),
        )

    def wait_s(self, queued: QueuedRequest, decision: Decision) -> float:
        """For how long this request would wait, going by what is ahead of it in fair order and how fast that goes."""
        own_s = self._own_ahead_s(queued) / self._tenant_rate(queued)
        return max(own_s, self._wait_behind_s(self._ahead_s(queued), decision))

    def _wait_behind_s(self, ahead_s: float, decision: Decision) -> float:
        loads, replicas = decision.snapshot.loads, decision.snapshot.roster.replicas
        position_of = {replicas[i].id: i for i in decision.snapshot.able(decision.request)}
        workers = list(position_of)
        until_room_s = max(0.0, _queued_s(decision) - self.late_binding_s) * self.pace(decision.replica.id)
        each_s = max(_LEAST_WORK_S, sum(self._bound.values()) / self._waiting if self._waiting else _work_s(decision))

        def guess(worker: WorkerId) -> float:
            # No faster than its prefills, nor than its sequences end.
            own, replica = loads[position_of[worker]], replicas[position_of[worker]]
            return min(1 / self.pace(worker), each_s * replica.max_num_seqs / max(own.request_s, each_s))

        return until_room_s + wait_s(ahead_s, self._bound, workers, self.rates, guess)

    def _tenant_rate(self, queued: QueuedRequest) -> float:
        """How fast the requests of its tenant are served, beside all others; infinite until measured."""
        name = queued.tenant
        return min([drain.rate(name) for drain in self.tenant_rates if drain.is_measured(name)], default=inf)

    def _check_wait(self, queued: QueuedRequest, decision: Decision, now: float) -> float:
        """How long it is expected to wait; 0.0 where that is not foreseen, or not near what it may wait."""
        refusal = self.usage.refusal(queued.tenant, queued.size_bytes)
        if refusal is None and (queued.most_wait_s == inf or not self._has_evidence(decision)):
            return 0.0
        limit_s = queued.most_wait_s / self.wait_margin.margin
        # If everybody were ahead of it, which is soon computed: an ordinary line is short.
        if refusal is None and max(self._longest_own_s(queued), self._longest_s(decision)) <= limit_s:
            return 0.0
        expected_s, work_s = self.wait_s(queued, decision), _work_s(decision)
        if refusal is not None:
            retry_s = self._retry_s(queued, decision.replica.id, expected_s - limit_s, work_s, now)
            raise Saturated(f"{refusal}; try again in a while", retry_after_s=retry_s)
        if expected_s > limit_s:
            raise Saturated(
                f"this would wait {expected_s:.1f} s for room at an engine, behind {self._waiting} requests; it may"
                f" wait {queued.most_wait_s:.3g} s, and is let in up to {limit_s:.3g} s; try again",
                retry_after_s=self._retry_s(queued, decision.replica.id, expected_s - limit_s, work_s, now),
            )
        return expected_s

    def _longest_s(self, decision: Decision) -> float:
        return self._wait_behind_s(sum(self._bound.values()), decision)

    def _longest_own_s(self, queued: QueuedRequest) -> float:
        tenant = self._tenants.get(queued.tenant)
        return tenant.waiting_s / self._tenant_rate(queued) if tenant is not None else 0.0

    def _has_evidence(self, decision: Decision) -> bool:
        """Whether a prediction may refuse a request: nobody is refused for what a guess says, nor where a replica that
        could have it has nothing to do.
        """
        snapshot = decision.snapshot
        able = snapshot.able(decision.request)
        ids = [snapshot.roster.replicas[i].id for i in able]
        if any(
            not snapshot.loads[i].all_in_flight and id_ not in self._bound for i, id_ in zip(able, ids, strict=True)
        ):
            return False
        return snapshot.roster.middle.prefill_tokens_per_s > 0 or any(map(self.rates.is_measured, ids))

    def _retry_s(
        self, queued: QueuedRequest, worker: WorkerId | None, room_s: float, work_s: float, now: float
    ) -> float:
        """When to come back: once there is room, and behind those of its tenant that were told so before."""
        rate = self._tenant_rate(queued)
        if rate == inf:
            rate = self.rates.rate(worker, 1 / self.pace(worker)) if worker is not None else 1.0
        most_s = min(queued.most_wait_s, _MOST_RETRY_S)
        return self.retry_times.next_s(queued.tenant, room_s, work_s / rate, most_s, now)

    def _own_ahead_s(self, queued: QueuedRequest) -> float:
        """As `_ahead_s`, of its own tenant alone."""
        tenant = self._tenants.get(queued.tenant)
        return _ahead_of_its_tenant_s(tenant, queued) if tenant is not None and tenant.waiting else 0.0

    def _ahead_s(self, queued: QueuedRequest) -> float:
        """Seconds of work of all that would be served before it if it joined now: as `_in_order`, with requests as a
        fluid. Costs as much as there are tenants, and adapters of its own tenant, not requests.
        """
        tenant = self._tenants.get(queued.tenant)
        if tenant is None or not tenant.waiting:
            own_s, had_s = 0.0, max(self._level_s, tenant.had_s if tenant is not None else 0.0)
        else:
            own_s, had_s = _ahead_of_its_tenant_s(tenant, queued), tenant.had_s
        until_s = had_s + own_s
        return own_s + sum(
            [
                min(other.waiting_s, max(0.0, until_s - other.had_s))
                for other in self._tenants.values()
                if other.waiting and other is not tenant
            ]
        )

    def _is_held(self, decision: Decision) -> bool:
        if self.is_full is None:
            return False
        base_model = decision.request.base_model
        if base_model in self._full or self.is_full(decision):
            self._full.add(base_model)
            return True
        return False

    def take_admissible(self, now: float) -> Iterator[tuple[QueuedRequest, Decision | NoReplica]]:
        """The waiting requests that may be sent now, in fair order, each withdrawn; with NoReplica those that no
        replica can serve any more. Note each as sent before asking for the next: that changes what has room.
        """
        self.rates.advance(self._bound, now)
        tenants = [name for name, tenant in self._tenants.items() if tenant.waiting]
        for drain in self.tenant_rates:
            drain.advance(tenants, now)
        ahead: dict[WorkerId, float] = {}
        slotless: set[WorkerId] = set()
        self._full.clear()
        for queued in self._looked_at():
            if not queued.is_waiting:
                continue
            try:
                decision = self.decide(queued, ahead, now)
            except Exception as exc:  # noqa: BLE001  (whatever it is: it must not stop all who wait behind this one)
                self.remove(queued)
                yield queued, exc if isinstance(exc, NoReplica) else _undecided(exc)
                continue
            worker = decision.replica.id
            # One adapter's request more, if only of one that runs, would keep from the one before it the slot that it
            # waits for; the base model's takes none.
            is_behind_slot = worker in slotless and bool(decision.request.engine_name)
            if is_behind_slot or worker in ahead or not self.has_room(decision) or self._is_held(decision):
                self._unbind(queued)
                self._bind(queued, decision, is_behind_slot=is_behind_slot)
                if queued.wants_slot:
                    slotless.add(worker)
                else:
                    # Whoever comes later in the order finds this one ahead of it there.
                    ahead[worker] = ahead.get(worker, 0.0) + queued.bound_s
                continue
            work_s = _work_s(decision)
            self._serve(queued, work_s)
            self.rates.record_served(worker, work_s)
            for drain in self.tenant_rates:
                drain.record_served(queued.tenant, work_s)
            self.wait_margin.record_wait(queued.expected_s, now - queued.since, is_over=True)
            self.remove(queued)
            yield queued, decision

    def _looked_at(self) -> list[QueuedRequest]:
        """The first in fair order, and behind them the first for each replica that none before it waits for: a long
        line for one replica must not let another one idle. Far behind them it is whoever has waited there longest.
        Those who want a slot, and those who do not, are looked at apart: neither line hides the other.
        """
        found: list[QueuedRequest] = []
        others = set(self._lines)
        left = [0, 0]
        for (_, wants_slot), line in self._lines.items():
            left[wants_slot] = min(_LOOKED_AT, left[wants_slot] + len(line))
        for queued in itertools.islice(self._in_order(), _LOOKED_OVER):
            line_of = _line_of(queued)
            if left[queued.wants_slot] or line_of in others:
                found.append(queued)
                others.discard(line_of)
                left[queued.wants_slot] = max(0, left[queued.wants_slot] - 1)
            elif not others and not any(left):
                return found
        return found + [next(iter(self._lines[line])) for line in sorted(others)]

    def _in_order(self) -> Iterator[QueuedRequest]:
        """Waiting tickets as they would be served if all of them had room: least served tenant and adapter first."""
        tenants = []
        for name, tenant in self._tenants.items():
            if tenant.waiting:
                tenant.had_s = max(tenant.had_s, self._level_s - _MOST_LAG_S)
                tenants.append((tenant.had_s, name))
        heapq.heapify(tenants)
        flows = {name: _flow_heap(self._tenants[name]) for _, name in tenants}
        while tenants:
            had_s, name = tenants[0]
            heap = flows[name]
            flow_had_s, adapter, position = heap[0]
            flow = self._tenants[name].flows[adapter]
            queued = flow.requests[position]
            if position + 1 < len(flow.requests):
                heapq.heapreplace(heap, (flow_had_s + queued.bound_s / flow.weight, adapter, position + 1))
            else:
                heapq.heappop(heap)
            if heap:
                heapq.heapreplace(tenants, (had_s + queued.bound_s, name))
            else:
                heapq.heappop(tenants)
            yield queued

    def _serve(self, queued: QueuedRequest, work_s: float) -> None:
        tenant = self._tenants[queued.tenant]
        flow = tenant.flows[queued.adapter]
        self._level_s = max(self._level_s, tenant.had_s)
        tenant.level_s = max(tenant.level_s, flow.had_s)
        tenant.had_s += work_s
        flow.had_s += work_s / queued.weight

    def _bind(self, queued: QueuedRequest, decision: Decision, *, is_behind_slot: bool) -> None:
        worker = decision.replica.id
        queued.bound_to, queued.bound_s = worker, _work_s(decision)
        queued.wants_slot = is_behind_slot or decision.score.slot_s > 0
        self._bound[worker] = self._bound.get(worker, 0.0) + queued.bound_s
        self._lines.setdefault(_line_of(queued), {})[queued] = None
        tenant = self._tenants[queued.tenant]
        tenant.waiting_s += queued.bound_s
        tenant.flows[queued.adapter].waiting_s += queued.bound_s

    def _unbind(self, queued: QueuedRequest) -> None:
        worker = queued.bound_to
        if worker is None:
            return
        line_of = _line_of(queued)
        del self._lines[line_of][queued]
        if not self._lines[line_of]:
            del self._lines[line_of]
        if (worker, False) in self._lines or (worker, True) in self._lines:
            self._bound[worker] -= queued.bound_s
        else:
            del self._bound[worker]
        queued.bound_to = None
        tenant = self._tenants[queued.tenant]
        tenant.waiting_s -= queued.bound_s
        tenant.flows[queued.adapter].waiting_s -= queued.bound_s


def _line_of(queued: QueuedRequest) -> _Line:
    assert queued.bound_to is not None
    return queued.bound_to, queued.wants_slot


def _set_back(had_s: float, level_s: float, work_s: float, *, is_waiting: bool) -> float:
    """Whoever waits keeps what it is owed; anybody else joins where the others are."""
    joined_s = had_s if is_waiting else max(had_s, level_s)
    return min(joined_s + work_s, max(joined_s, level_s + _MOST_DEBT_S))


def _forget(idle: dict[str, float], known: dict[str, Any]) -> None:
    """Of the idle ones all but those that had most."""
    for name in sorted(idle, key=idle.__getitem__)[: max(0, len(idle) - _REMEMBERED_IDLE)]:
        del known[name]


def _queued_s(decision: Decision) -> float:
    """Seconds until the chosen replica would begin, of what is there and not here."""
    snapshot, score = decision.snapshot, decision.score
    queued_s = score.queue_s + score.slot_s
    return queued_s - snapshot.backlog.get(decision.replica.id, 0.0) if snapshot.backlog else queued_s


def _undecided(exc: Exception) -> NoReplica:
    told = NoReplica(f"it could not be decided where this should go ({type(exc).__name__}); the log says more")
    told.__cause__ = exc
    return told


def _ahead_of_its_tenant_s(tenant: _TenantFlows, queued: QueuedRequest) -> float:
    flow = tenant.flows.get(queued.adapter)
    before_s = had_s = 0.0
    if flow is not None and flow.requests:
        had_s = flow.had_s
        if flow.requests[-1].priority <= queued.priority:
            before_s = flow.waiting_s
        else:
            before_s = sum([other.bound_s for other in flow.requests if other.priority <= queued.priority])
    else:
        had_s = max(tenant.level_s, flow.had_s if flow is not None else 0.0)
    until_s = had_s + before_s / queued.weight
    return before_s + sum(
        [
            min(other.waiting_s, max(0.0, (until_s - other.had_s) * other.weight))
            for other in tenant.flows.values()
            if other.requests and other is not flow
        ]
    )


def _flow_heap(tenant: _TenantFlows) -> list[tuple[float, str, int]]:
    heap = []
    for adapter, flow in tenant.flows.items():
        if flow.requests:
            flow.had_s = max(flow.had_s, tenant.level_s - _MOST_LAG_S)
            heap.append((flow.had_s, adapter, 0))
    heapq.heapify(heap)
    return heap


def _place(queued: QueuedRequest) -> tuple[float, int]:
    return queued.priority, queued.number


def _work_s(decision: Decision) -> float:
    return max(_LEAST_WORK_S, decision.score.prefill_s + decision.score.adapter_s)
