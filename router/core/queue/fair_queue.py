"""The queue of requests without room: engines get about a second of work each, and further requests wait here.

A queued request is decided only when there is room, so that it still gets the best replica then (late binding).

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996) on two levels: tenants share the fleet's time evenly,
and a tenant's adapters share its part by weight, in seconds of work. A request counts with its prefill when it is
sent, and with its decoding when that is over, as in Sheng et al., Fairness in Serving Large Language Models (2024).
Within an adapter requests go by priority, then in their order of arrival. With `service_s` a request counts as if it
had come as much later as its program was served: least attained service first, bounded so that none waits for ever.

Pure: time is an argument, and nothing here sleeps.
"""

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from router.core.errors import NoReplica, Saturated
from router.core.kv.index import WorkerId
from router.core.queue.admission import QueueUsage, RetryTimes, ServiceRates, WaitMargin, wait_s
from router.core.queue.queued_request import QueuedRequest
from router.core.queue.rooms import EngineRooms
from router.core.schedule.policy import Decision

# What goes first among the queued requests of one adapter: what came first, or what is of a program served least.
Fairness = Literal["request", "program"]
# (likely replica, whether an adapter slot is waited for) of queued requests.
_LineKey = tuple[WorkerId, bool]
# (served seconds and those that it is held, adapter, position in these requests, its requests, its weight, seconds of
# work that it is held; None: not known yet)
_FlowEntry = tuple[float, str, int, list[QueuedRequest], float, float | None]

# Queued requests considered in one pass; and requests scanned for one that waits for another replica than all of these,
# at a microsecond or two each.
MAX_CANDIDATES = 32
MAX_SCANNED = 1000
# Seconds after which a pass decides all of its requests again, also those that no engine with room would get: their
# work and the lines that predictions count change with the caches. 32 decisions each half second are some 0.2 % of a
# core.
_DECIDED_ANEW_S = 0.5
# The setting by which a request is refused that would wait, or has waited, for too long.
_WAIT_LIMIT = "max_wait_s"
# A flow that cannot be served, because what it needs is scarce, falls behind the others by at most this much work:
# else it would take the whole fleet for minutes afterwards. A guess.
MAX_LAG_S = 10.0
# A flow with long answers, which count when they are over, gets ahead of the others by at most this much.
MAX_DEBT_S = 10.0
# A request of a program that was served for long counts as if it had come so much later, at most: a guess.
MAX_SERVED_S = 10.0
_LEAST_WORK_S = 0.001
# An adapter that must be brought to the device waits until those that are there have had this many times the cost of
# that more work than their share, so that moving takes a ninth of the time at most. And at most so much work: a guess.
_HELD_MOVES = 8.0
MAX_HELD_S = 1.0
# Seconds over which a tenant's service rate is measured; the lower rate counts, because others come and go.
_TENANT_HORIZONS_S = (8.0, 40.0)
# The most that earlier refusals add to the Retry-After of the next one.
_MAX_RETRY_S = 300.0
# Idle tenants, and idle adapters of a tenant, that are remembered while any request waits. A forgotten one joins at the
# virtual time: it is spared at most the work of its last request.
_MAX_IDLE_FLOWS = 256


@dataclass(slots=True)
class _AdapterFlow:
    """The queued requests of one adapter of one tenant, in order.

    served_s  weighted seconds of work served so far
    """

    served_s: float = 0.0
    weight: float = 1.0
    waiting_s: float = 0.0
    requests: list[QueuedRequest] = field(default_factory=list)


@dataclass(slots=True)
class _TenantFlows:
    """One tenant's adapters.

    served_s   seconds of work served so far
    virtual_s  virtual time of its adapters: an adapter that was idle joins there
    """

    served_s: float = 0.0
    virtual_s: float = 0.0
    waiting: int = 0
    waiting_s: float = 0.0
    flows: dict[str, _AdapterFlow] = field(default_factory=dict)


@dataclass(slots=True)
class _StayingRequests:
    """The requests of one pass that stay in their lines, for those behind them.

    ahead_s       seconds of their work, by likely replica
    without_slot  replicas at which one of them waits for nothing but an adapter slot
    """

    ahead_s: dict[WorkerId, float] = field(default_factory=dict)
    without_slot: set[WorkerId] = field(default_factory=set)

    def add(self, queued: QueuedRequest) -> None:
        """Count a request that stays in its line."""
        worker = queued.likely_worker
        assert worker is not None, "a queued request has a line"
        if queued.wants_slot:
            self.without_slot.add(worker)
        else:
            self.ahead_s[worker] = self.ahead_s.get(worker, 0.0) + queued.work_s

    def is_slot_wanted(self, decision: Decision) -> bool:
        """Whether this request would take an adapter slot for which a request waits at its replica.

        Another adapter request, even of a running adapter, would keep the slot from the one that waits for it. Requests
        of the base model take no slot.
        """
        return decision.replica.id in self.without_slot and bool(decision.request.engine_name)


@dataclass(slots=True)
class FairQueue:
    """The queued requests, and the order in which they are decided.

    decide          decides a queued request now, given the seconds of queued work ahead of it by replica; may raise
                    NoReplica
    late_binding_s  seconds of work queued at an engine at most; infinite: everything is sent at once
    is_full         whether the decided base model takes no further request anywhere; then no request of that base model
                    overtakes this one. None: never
    rooms           where engines have room, so that a pass decides only what may be sent; None: a pass decides all
    service_s       seconds of engine work that the program of a decided request was given; 0.0: programs do not count
    move_s          seconds to bring a queued request's adapter to the device of its likely replica; 0.0: it is there
    usage           how much waits, and may
    rates           how fast queued work goes to each replica; tenant_rates: how fast each tenant's is served
    """

    decide: Callable[[QueuedRequest, Mapping[WorkerId, float], float], Decision]
    late_binding_s: float = inf
    is_full: Callable[[Decision], bool] | None = None
    rooms: EngineRooms | None = None
    service_s: Callable[[QueuedRequest, Decision], float] = lambda _request, _decision: 0.0
    move_s: Callable[[QueuedRequest], float] = lambda _: 0.0
    usage: QueueUsage = field(default_factory=QueueUsage)
    rates: ServiceRates = field(default_factory=ServiceRates)
    tenant_rates: tuple[ServiceRates, ...] = field(default_factory=lambda: tuple(map(ServiceRates, _TENANT_HORIZONS_S)))
    retry_times: RetryTimes = field(default_factory=RetryTimes)
    wait_margin: WaitMargin = field(default_factory=WaitMargin)
    _tenants: dict[str, _TenantFlows] = field(default_factory=dict)
    _virtual_s: float = 0.0
    _backlog_s: dict[WorkerId, float] = field(default_factory=dict)
    _lines: dict[_LineKey, dict[QueuedRequest, None]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _waiting: int = 0
    _by_model: dict[str, int] = field(default_factory=dict)
    _decided_all_at: float = -inf
    _full: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        """How many requests are queued."""
        return self._waiting

    @property
    def remembered_flows(self) -> int:
        """Tenants, and adapters of each, that the queue remembers; 0 while it is empty."""
        return len(self._tenants) + sum([len(tenant.flows) for tenant in self._tenants.values()])

    def waiting_by_adapter(self) -> dict[str, int]:
        """lora_id -> queued requests; those for base models are left out."""
        waiting: dict[str, int] = {}
        for tenant in self._tenants.values():
            for adapter, flow in tenant.flows.items():
                if adapter and flow.requests:
                    waiting[adapter] = waiting.get(adapter, 0) + len(flow.requests)
        return waiting

    @property
    def virtual_s(self) -> float:
        """Virtual time of the tenants, in seconds of work: the service of the one served last."""
        return self._virtual_s

    def lag_s(self, tenant: str, adapter: str | None = None) -> float:
        """Seconds of work by which a remembered tenant, or one adapter of it, is behind the virtual time."""
        flows = self._tenants[tenant]
        if adapter is not None:
            return flows.virtual_s - flows.flows[adapter].served_s
        return self._virtual_s - flows.served_s

    @property
    def backlog(self) -> Mapping[WorkerId, float]:
        """Seconds of queued work by likely replica."""
        return self._backlog_s

    def has_room(self, decision: Decision) -> bool:
        """Whether the chosen replica can take this request now: little work is queued at its engine, or it is idle."""
        return (
            _queued_s(decision) <= self.late_binding_s or not decision.snapshot.loads[decision.position].all_in_flight
        )

    def can_send(self, decision: Decision) -> bool:
        """Whether a request decided just now may be sent at once: there is room, and no other request waits for it."""
        if decision.replica.id in self._backlog_s or not self.has_room(decision):
            return False
        return self.is_full is None or not self._is_model_full(decision)

    def _may_overtake(self, decision: Decision) -> bool:
        """Whether a request decided just now may overtake those queued for its replica.

        True if the request takes no adapter slot, there is room, and the queued ones wait for nothing but slots.
        """
        worker = decision.replica.id
        if decision.request.engine_name or worker not in self._backlog_s or (worker, False) in self._lines:
            return False
        return self.has_room(decision) and not self._is_model_full(decision)

    def decide_or_enqueue(self, queued: QueuedRequest, now: float) -> Decision | None:
        """The decision, if this request may be sent at once; else None, and it is queued.

        A request that overtakes is charged to its tenant. A queued one gets its expected wait, number and likely
        replica. The first one in an empty queue starts the service rates.

        raises  NoReplica; Saturated when it may not wait, or would wait for too long; nothing is queued then
        """
        decision = self.decide(queued, self._backlog_s, now)
        if self.can_send(decision):
            return decision
        if self._may_overtake(decision):
            # A request that overtakes counts as served, as if it had waited.
            tenant, _ = self._join(queued)
            self._serve(queued, _work_s(decision))
            self._forget_idle_tenants(tenant)
            return decision
        queued.place_s = now + min(MAX_SERVED_S, self.service_s(queued, decision))
        queued.enqueued_at, queued.expected_s = now, self._expected_wait_s(queued, decision, now)
        if not self._waiting:
            self.rates.start(now)
            for rates in self.tenant_rates:
                rates.start(now)
        self.usage.add(queued.tenant, queued.size_bytes)
        tenant, flow = self._join(queued)
        queued.number, queued.is_waiting = next(self._numbers), True
        insort(flow.requests, queued, key=_order_key)
        tenant.waiting += 1
        self._waiting += 1
        base_model = decision.request.base_model
        self._by_model[base_model] = self._by_model.get(base_model, 0) + 1
        is_behind_slot = bool(decision.request.engine_name) and (decision.replica.id, True) in self._lines
        self._assign(queued, decision, is_behind_slot=is_behind_slot)
        return None

    def _join(self, queued: QueuedRequest) -> tuple[_TenantFlows, _AdapterFlow]:
        """The request's tenant and adapter flows, added where they are new. Idle ones join at the virtual time."""
        tenant = self._tenants.setdefault(queued.tenant, _TenantFlows())
        flow = tenant.flows.setdefault(queued.adapter, _AdapterFlow())
        if not tenant.waiting:
            tenant.served_s = max(tenant.served_s, self._virtual_s)
        if not flow.requests:
            flow.served_s = max(flow.served_s, tenant.virtual_s)
        flow.weight = queued.weight
        return tenant, flow

    def remove(self, queued: QueuedRequest) -> None:
        """Take a request out of the queue and its counts. Safe to call twice.

        Idle flows are forgotten; once the queue is empty all tenants and the virtual time are.
        """
        if not queued.is_waiting:
            return
        queued.is_waiting = False
        self.usage.remove(queued.tenant, queued.size_bytes)
        self._unassign(queued)
        tenant = self._tenants[queued.tenant]
        flow = tenant.flows[queued.adapter]
        flow.requests.remove(queued)
        tenant.waiting -= 1
        self._waiting -= 1
        base_model = queued.hashed.request.base_model
        self._by_model[base_model] -= 1
        if not self._by_model[base_model]:
            del self._by_model[base_model]
        # A flow at the virtual time would join there again: it need not be remembered. An empty queue remembers none.
        if not flow.requests and flow.served_s <= tenant.virtual_s:
            del tenant.flows[queued.adapter]
        if not tenant.waiting and tenant.served_s <= self._virtual_s:
            del self._tenants[queued.tenant]
        self._forget_idle_tenants(tenant)
        if not self._waiting:
            self._tenants.clear()
            self._full.clear()
            self._virtual_s = 0.0

    def _forget_idle_tenants(self, tenant: _TenantFlows) -> None:
        """Forget idle adapters of this tenant, and idle tenants, when there are too many; the least served first."""
        if len(tenant.flows) > 2 * (tenant.waiting + _MAX_IDLE_FLOWS):
            _drop_least_served(
                {name: flow.served_s for name, flow in tenant.flows.items() if not flow.requests}, tenant.flows
            )
        if len(self._tenants) > 2 * (self._waiting + _MAX_IDLE_FLOWS):
            _drop_least_served(
                {name: other.served_s for name, other in self._tenants.items() if not other.waiting}, self._tenants
            )

    def charge_answer(self, tenant: str, adapter: str, weight: float, work_s: float) -> None:
        """Charge an ended answer's seconds of decoding to its tenant and adapter, if any request waits.

        Where none waits, the work was taken from no other request.
        """
        if not self._waiting:
            return
        flows = self._tenants.setdefault(tenant, _TenantFlows())
        flows.served_s = _charged_s(flows.served_s, self._virtual_s, work_s, is_waiting=flows.waiting > 0)
        flow = flows.flows.setdefault(adapter, _AdapterFlow())
        is_waiting = bool(flow.requests)
        flow.served_s = _charged_s(flow.served_s, flows.virtual_s, work_s / weight, is_waiting=is_waiting)

    def time_out(self, queued: QueuedRequest, now: float) -> Saturated:
        """The error for a request that has waited as long as it may. Also updates the wait margin: call once."""
        self.wait_margin.record_wait(queued.tenant, queued.expected_s, now - queued.enqueued_at, is_over=False)
        own_s = self._max_tenant_wait_s(queued)
        room_s = own_s - queued.most_wait_s / self.wait_margin.factor(queued.tenant)
        if own_s == 0.0:  # its tenant's rate is not known: when the whole queue has been worked off
            room_s = sum(self._backlog_s.values()) / (sum(map(self.rates.rate, self._backlog_s)) or 1.0)
        return Saturated(
            f"no engine had room within {queued.most_wait_s:.3g} s; try again",
            limit=_WAIT_LIMIT,
            retry_after_s=self._retry_s(queued, queued.likely_worker, room_s, queued.work_s or _LEAST_WORK_S, now),
        )

    def wait_s(self, queued: QueuedRequest, decision: Decision) -> float:
        """Predicted wait of this request, from the work ahead of it in fair order and how fast that goes."""
        own_s = self._ahead_in_tenant_s(queued) / self._tenant_rate(queued)
        return max(own_s, self._wait_behind_s(self.ahead_s(queued), decision))

    def _wait_behind_s(self, ahead_s: float, decision: Decision) -> float:
        """Predicted seconds until the able replicas have served this much work of the queue, and have room."""
        loads, replicas = decision.snapshot.loads, decision.snapshot.roster.replicas
        position_of = {replicas[i].id: i for i in decision.snapshot.able(decision.request)}
        workers = list(position_of)
        until_room_s = max(0.0, _queued_s(decision) - self.late_binding_s)
        each_s = max(
            _LEAST_WORK_S, sum(self._backlog_s.values()) / self._waiting if self._waiting else _work_s(decision)
        )

        def guess(worker: WorkerId) -> float:
            """Seconds of work that a replica serves a second, before any measurement."""
            # No faster than its prefills, and no faster than its sequences end.
            own, replica = loads[position_of[worker]], replicas[position_of[worker]]
            return min(1.0, each_s * replica.max_num_seqs / max(own.request_s, each_s))

        return until_room_s + wait_s(ahead_s, self._backlog_s, workers, self.rates, guess)

    def _tenant_rate(self, queued: QueuedRequest) -> float:
        """Seconds of its tenant's work that are served a second; infinite until measured."""
        name = queued.tenant
        return min([rates.rate(name) for rates in self.tenant_rates if rates.is_measured(name)], default=inf)

    def _expected_wait_s(self, queued: QueuedRequest, decision: Decision, now: float) -> float:
        """Predicted wait of a request that is to be queued; 0.0 without evidence, or well below its limit.

        raises  Saturated where the queue is full, or the wait too long; remembers when it tells the tenant to retry
        """
        refusal = self.usage.refusal(queued.tenant, queued.size_bytes)
        if refusal is None and (queued.most_wait_s == inf or not self._has_evidence(decision)):
            return 0.0
        limit_s = queued.most_wait_s / self.wait_margin.factor(queued.tenant)
        # As if the whole queue were ahead of it, which is cheap to compute: ordinary queues are short.
        if refusal is None and max(self._max_tenant_wait_s(queued), self._max_wait_s(decision)) <= limit_s:
            return 0.0
        expected_s, work_s = self.wait_s(queued, decision), _work_s(decision)
        if refusal is not None:
            retry_s = self._retry_s(queued, decision.replica.id, expected_s - limit_s, work_s, now)
            raise Saturated(f"{refusal.why}; try again in a while", limit=refusal.limit, retry_after_s=retry_s)
        if expected_s > limit_s:
            raise Saturated(
                f"this would wait {expected_s:.1f} s for room at an engine, behind {self._waiting} requests; it may"
                f" wait {queued.most_wait_s:.3g} s, and is let in up to {limit_s:.3g} s; try again",
                limit=_WAIT_LIMIT,
                retry_after_s=self._retry_s(queued, decision.replica.id, expected_s - limit_s, work_s, now),
            )
        return expected_s

    def _max_wait_s(self, decision: Decision) -> float:
        """Predicted wait if the whole queue were ahead of the request."""
        return self._wait_behind_s(sum(self._backlog_s.values()), decision)

    def _max_tenant_wait_s(self, queued: QueuedRequest) -> float:
        """Predicted wait behind all queued work of the request's tenant; 0.0 while its rate is unmeasured."""
        tenant = self._tenants.get(queued.tenant)
        return tenant.waiting_s / self._tenant_rate(queued) if tenant is not None else 0.0

    def _has_evidence(self, decision: Decision) -> bool:
        """Whether a predicted wait may refuse this request: rates were measured, and no able replica is idle."""
        snapshot = decision.snapshot
        able = snapshot.able(decision.request)
        ids = [snapshot.roster.replicas[i].id for i in able]
        if any(
            not snapshot.loads[i].all_in_flight and id_ not in self._backlog_s for i, id_ in zip(able, ids, strict=True)
        ):
            return False
        return snapshot.roster.middle.prefill_tokens_per_s > 0 or any(map(self.rates.is_measured, ids))

    def _retry_s(
        self, queued: QueuedRequest, worker: WorkerId | None, room_s: float, work_s: float, now: float
    ) -> float:
        """Seconds for Retry-After: until there is room, behind earlier refusals of the tenant. Remembers that time."""
        rate = self._tenant_rate(queued)
        if rate == inf:
            rate = self.rates.rate(worker) if worker is not None else 1.0
        most_s = min(queued.most_wait_s, _MAX_RETRY_S)
        return self.retry_times.next_s(queued.tenant, room_s, work_s / rate, most_s, now)

    def _ahead_in_tenant_s(self, queued: QueuedRequest) -> float:
        """Seconds of work of the request's own tenant that would be served before the request if it were queued now."""
        tenant = self._tenants.get(queued.tenant)
        return _tenant_ahead_s(tenant, queued) if tenant is not None and tenant.waiting else 0.0

    def ahead_s(self, queued: QueuedRequest) -> float:
        """Seconds of work that would be served before a request if it were queued now.

        As `fair_order`, but with requests as a fluid: costs one step for each tenant and for each adapter of its own.
        """
        tenant = self._tenants.get(queued.tenant)
        if tenant is None or not tenant.waiting:
            own_s, served_s = 0.0, max(self._virtual_s, tenant.served_s if tenant is not None else 0.0)
        else:
            own_s, served_s = _tenant_ahead_s(tenant, queued), tenant.served_s
        until_s = served_s + own_s
        return own_s + sum(
            [
                min(other.waiting_s, max(0.0, until_s - other.served_s))
                for other in self._tenants.values()
                if other.waiting and other is not tenant
            ]
        )

    def _is_model_full(self, decision: Decision) -> bool:
        """Whether the decided base model takes no further request (`is_full`); remembered until the next pass."""
        if self.is_full is None:
            return False
        base_model = decision.request.base_model
        if base_model in self._full or self.is_full(decision):
            self._full.add(base_model)
            return True
        return False

    def take_admissible(self, now: float) -> Iterator[tuple[QueuedRequest, Decision | NoReplica]]:
        """Take the requests that can be sent now out of the queue, in fair order, each with its decision.

        Requests that no replica can serve any more come with NoReplica. Those that were decided and stay get their new
        likely replica; service rates go on. Record each dispatch before asking for the next request: it changes what
        has room.

        The requests are the same as if each was decided. But one is decided only if its decision may be an engine with
        room, see EngineRooms; each half second all are.
        """
        self._begin_pass(now)
        rooms = None if self._is_time_for_all(now) else self.rooms
        if rooms is not None and not rooms.is_any(self._by_model, now):
            return
        staying = _StayingRequests()
        for queued in self._candidates():
            if rooms is not None and not self._might_be_sent(queued, rooms, staying, now):
                staying.add(queued)
                continue
            decision = self._decide_safely(queued, staying, now)
            if isinstance(decision, NoReplica):
                self.remove(queued)
                yield queued, decision
            elif not self._may_go(decision, staying):
                if rooms is None or not rooms.keeps_line(queued, decision, now):
                    self._unassign(queued)
                    self._assign(queued, decision, is_behind_slot=staying.is_slot_wanted(decision))
                staying.add(queued)
            else:
                self._record_sent(queued, decision, now)
                self.remove(queued)
                yield queued, decision
                if rooms is not None and not rooms.is_any(self._by_model, now):
                    return

    def _begin_pass(self, now: float) -> None:
        """Bring the service rates up to now, and forget which base models were full."""
        self.rates.advance(self._backlog_s, now)
        tenants = [name for name, tenant in self._tenants.items() if tenant.waiting]
        for rates in self.tenant_rates:
            rates.advance(tenants, now)
        self._full.clear()

    def _might_be_sent(self, queued: QueuedRequest, rooms: EngineRooms, staying: _StayingRequests, now: float) -> bool:
        """Whether this request's decision may be an engine with room; False only where it certainly is not."""
        is_full = queued.hashed.request.base_model in self._full
        return not is_full and rooms.might_be_sent(queued, staying.ahead_s, now)

    def _decide_safely(self, queued: QueuedRequest, staying: _StayingRequests, now: float) -> Decision | NoReplica:
        """The decision behind the staying requests; NoReplica also for an unexpected error, which stops no other."""
        try:
            return self.decide(queued, staying.ahead_s, now)
        except NoReplica as exc:
            return exc
        except Exception as exc:  # noqa: BLE001  (it is logged by whoever takes the request)
            return _undecided_error(exc)

    def _may_go(self, decision: Decision, staying: _StayingRequests) -> bool:
        """Whether a request with this decision may be sent: its replica has room, and no staying one waits for that."""
        if staying.is_slot_wanted(decision) or decision.replica.id in staying.ahead_s:
            return False
        return self.has_room(decision) and not self._is_model_full(decision)

    def _record_sent(self, queued: QueuedRequest, decision: Decision, now: float) -> None:
        """Count a queued request that is about to be sent: as served, in the service rates and in the wait margin."""
        work_s = _work_s(decision)
        self._serve(queued, work_s)
        self.rates.record_served(decision.replica.id, work_s)
        for rates in self.tenant_rates:
            rates.record_served(queued.tenant, work_s)
        self.wait_margin.record_wait(queued.tenant, queued.expected_s, now - queued.enqueued_at, is_over=True)

    def _is_time_for_all(self, now: float) -> bool:
        """Whether this pass must decide all of its requests again; if so, the next half second begins."""
        is_changed = self.rooms is None or self.rooms.is_changed(self._by_model)
        if not is_changed and now - self._decided_all_at < _DECIDED_ANEW_S:
            return False
        self._decided_all_at = now
        return True

    def _candidates(self) -> Iterator[QueuedRequest]:
        """Requests to consider in this pass: the first in fair order, then the first for each other replica.

        So a long queue for one replica lets no other idle. Beyond the scan it is the request that has waited longest.
        Requests that wait for a slot and those that do not are counted apart, so that neither hides the other.
        """
        others = set(self._lines)
        for_slot = sum([len(line) for (_, wants_slot), line in self._lines.items() if wants_slot])
        left = [min(MAX_CANDIDATES, self._waiting - for_slot), min(MAX_CANDIDATES, for_slot)]
        for queued in itertools.islice(self.fair_order(), MAX_SCANNED):
            if not queued.is_waiting:
                continue
            line_key, wants_slot = _line_key(queued), queued.wants_slot
            if left[wants_slot] or line_key in others:
                others.discard(line_key)
                left[wants_slot] = max(0, left[wants_slot] - 1)
                yield queued
            elif not others and not any(left):
                return
        yield from [next(iter(self._lines[line_key])) for line_key in sorted(others & self._lines.keys())]

    def fair_order(self) -> Iterator[QueuedRequest]:
        """Queued requests in the order in which they would be served if all had room: least served flow first.

        A flow whose adapter is not on the device is held behind those whose adapters are, for a bounded share of work:
        so one device swap serves many requests. The order is that at the first request, whatever leaves or joins later.
        Limits how far the flows are behind the virtual time.
        """
        tenants = []
        for name, tenant in self._tenants.items():
            if tenant.waiting:
                tenant.served_s = max(tenant.served_s, self._virtual_s - MAX_LAG_S)
                tenants.append((tenant.served_s, name))
        heapq.heapify(tenants)
        heaps: dict[str, list[_FlowEntry]] = {}
        while tenants:
            key_s, name = tenants[0]
            heap = heaps.get(name)
            if heap is None:
                heap = heaps[name] = _flow_heap(self._tenants[name])
                if held_s := self._held_first_s(heap):
                    heapq.heapreplace(tenants, (key_s + held_s, name))
                    continue
            held_s = self._held_first_s(heap)
            flow_key_s, adapter, position, requests, weight, _ = heap[0]
            queued = requests[position]
            if position + 1 < len(requests):
                # Its first request brings the adapter to the device.
                next_key_s = flow_key_s + (queued.work_s - held_s) / weight
                heapq.heapreplace(heap, (next_key_s, adapter, position + 1, requests, weight, 0.0))
            else:
                heapq.heappop(heap)
            if heap:
                next_held_s = self._held_first_s(heap)
                heapq.heapreplace(tenants, (key_s - held_s + queued.work_s + next_held_s, name))
            else:
                heapq.heappop(tenants)
            yield queued

    def _held_first_s(self, heap: list[_FlowEntry]) -> float:
        """Seconds of work that the first flow of a heap is held, once all that are before it are asked for theirs."""
        while True:
            key_s, adapter, position, requests, weight, held_s = heap[0]
            if held_s is not None:
                return held_s
            held_s = min(MAX_HELD_S, _HELD_MOVES * self.move_s(requests[position]))
            heapq.heapreplace(heap, (key_s + held_s / weight, adapter, position, requests, weight, held_s))

    def _serve(self, queued: QueuedRequest, work_s: float) -> None:
        """Count a request's work as served to its tenant and adapter, and advance the virtual times."""
        tenant = self._tenants[queued.tenant]
        flow = tenant.flows[queued.adapter]
        self._virtual_s = max(self._virtual_s, tenant.served_s)
        tenant.virtual_s = max(tenant.virtual_s, flow.served_s)
        tenant.served_s += work_s
        flow.served_s += work_s / queued.weight

    def _assign(self, queued: QueuedRequest, decision: Decision, *, is_behind_slot: bool) -> None:
        """Put a queued request into the line of the decided replica, and add its work to the backlogs.

        Those are of the replica, the tenant and the adapter. Sets the request's likely worker, work and slot need.
        """
        worker = decision.replica.id
        queued.likely_worker, queued.work_s = worker, _work_s(decision)
        queued.wants_slot = is_behind_slot or decision.score.slot_s > 0
        self._backlog_s[worker] = self._backlog_s.get(worker, 0.0) + queued.work_s
        self._lines.setdefault(_line_key(queued), {})[queued] = None
        tenant = self._tenants[queued.tenant]
        tenant.waiting_s += queued.work_s
        tenant.flows[queued.adapter].waiting_s += queued.work_s

    def _unassign(self, queued: QueuedRequest) -> None:
        """Take a queued request out of its replica's line, and its work out of the backlogs. Safe to call twice.

        Those are of the replica, the tenant and the adapter.
        """
        worker = queued.likely_worker
        if worker is None:
            return
        line_key = _line_key(queued)
        del self._lines[line_key][queued]
        if not self._lines[line_key]:
            del self._lines[line_key]
        if (worker, False) in self._lines or (worker, True) in self._lines:
            self._backlog_s[worker] -= queued.work_s
        else:
            del self._backlog_s[worker]
        queued.likely_worker = None
        tenant = self._tenants[queued.tenant]
        tenant.waiting_s -= queued.work_s
        tenant.flows[queued.adapter].waiting_s -= queued.work_s


def _line_key(queued: QueuedRequest) -> _LineKey:
    """The line of an assigned request: its likely replica, and whether it waits for a slot."""
    assert queued.likely_worker is not None
    return queued.likely_worker, queued.wants_slot


def _charged_s(served_s: float, virtual_s: float, work_s: float, *, is_waiting: bool) -> float:
    """Served seconds after a charge. A waiting flow keeps its credit; an idle one joins at the virtual time first."""
    joined_s = served_s if is_waiting else max(served_s, virtual_s)
    return min(joined_s + work_s, max(joined_s, virtual_s + MAX_DEBT_S))


def _drop_least_served(idle: dict[str, float], known: dict[str, Any]) -> None:
    """Delete idle flows from `known` beyond the most that are remembered, the least served first."""
    for name in sorted(idle, key=idle.__getitem__)[: max(0, len(idle) - _MAX_IDLE_FLOWS)]:
        del known[name]


def _queued_s(decision: Decision) -> float:
    """Seconds until the chosen replica would begin, without the work that is queued here."""
    snapshot, score = decision.snapshot, decision.score
    queued_s = score.queue_s + score.slot_s
    return queued_s - snapshot.backlog.get(decision.replica.id, 0.0) if snapshot.backlog else queued_s


def _undecided_error(exc: Exception) -> NoReplica:
    """NoReplica, caused by an unexpected error of a decision."""
    error = NoReplica(f"it could not be decided where this should go ({type(exc).__name__}); the log says more")
    error.__cause__ = exc
    return error


def _tenant_ahead_s(tenant: _TenantFlows, queued: QueuedRequest) -> float:
    """Seconds of the tenant's queued work that would be served before the request; at least one request waits."""
    flow = tenant.flows.get(queued.adapter)
    before_s = served_s = 0.0
    if flow is not None and flow.requests:
        served_s = flow.served_s
        if _place_of(flow.requests[-1]) <= _place_of(queued):
            before_s = flow.waiting_s
        else:
            before_s = sum([other.work_s for other in flow.requests if _place_of(other) <= _place_of(queued)])
    else:
        served_s = max(tenant.virtual_s, flow.served_s if flow is not None else 0.0)
    until_s = served_s + before_s / queued.weight
    return before_s + sum(
        [
            min(other.waiting_s, max(0.0, (until_s - other.served_s) * other.weight))
            for other in tenant.flows.values()
            if other.requests and other is not flow
        ]
    )


def _flow_heap(tenant: _TenantFlows) -> list[_FlowEntry]:
    """A heap of the tenant's waiting adapters, each at its first request.

    Raises `served_s` that lags too far.
    """
    heap: list[_FlowEntry] = []
    for adapter, flow in tenant.flows.items():
        if flow.requests:
            flow.served_s = max(flow.served_s, tenant.virtual_s - MAX_LAG_S)
            heap.append((flow.served_s, adapter, 0, flow.requests.copy(), flow.weight, None))
    heapq.heapify(heap)
    return heap


def _place_of(queued: QueuedRequest) -> tuple[float, float]:
    """Order within one adapter of a tenant: priority, then arrival and what its program was served."""
    return queued.priority, queued.place_s


def _order_key(queued: QueuedRequest) -> tuple[float, float, int]:
    """Order within one adapter of a tenant, of requests with one place by their arrival."""
    return queued.priority, queued.place_s, queued.number


def _work_s(decision: Decision) -> float:
    """Seconds of prefill and adapter loading of the decided request, at least a millisecond; decoding is left out."""
    return max(_LEAST_WORK_S, decision.score.prefill_s + decision.score.adapter_s)
