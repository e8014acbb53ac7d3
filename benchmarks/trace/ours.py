"""Our router on the trace: the product's own mind, index, load book and policies, joined as the router does it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType

from benchmarks.trace.fleet import Changes, EngineReading, TraceFleet
from benchmarks.trace.workload import ADAPTERS, BLOCK, TraceRequest
from lorafleet.identity import AdapterLocation, BlockHash
from router.core.errors import NoReplica
from router.core.fleet import EngineReport, Replica, ResidentAdapter, Roster
from router.core.kv.index import KvIndex, PendingBlocks, WorkerId
from router.core.queue.fair_queue import Fairness
from router.core.queue.queued_request import QueuedRequest
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.policies import POLICIES
from router.core.schedule.policy import Decision
from router.core.schedule.replica_book import LoadEntry
from router.core.schedule.request import HashedRequest, PrefixMatch, RoutingRequest
from router.core.scheduler import Scheduler
from router.core.sessions.session import Session

MODEL = "base"
# What just has been sent counts as stored until its first token, and for as long after that.
HOLD_S = 2.0
# How often those who wait are looked at, the longer the queue the less often, and for how long they may wait. The
# router looks every 20 ms and whenever something has ended; with a long queue that would be most of this benchmark's
# time, and change nothing while the engines have a second of work each.
LOOK_S, FEW, LOOK_MOST_S = 0.02, 8, 1.0
MOST_WAIT_S = 60.0

_NAMES = [f"adapter-{n}" for n in range(ADAPTERS)]
_PLACES: tuple[AdapterLocation, ...] = ("device", "host", "disk")


def _residents(loads_s: Sequence[float]) -> Mapping[AdapterLocation, Sequence[ResidentAdapter]]:
    """Every adapter in every place, made once for all reports."""
    return {
        place: [ResidentAdapter(name, "", name, place, load_s=s) for name, s in zip(_NAMES, loads_s, strict=True)]
        for place in _PLACES
    }


_UNMEASURED = _residents([0.0] * ADAPTERS)


class LorafleetRouter:
    """One router of ours with one of its policies."""

    def __init__(
        self,
        policy: str,
        fleet: TraceFleet,
        seed: int,
        *,
        costs: CostSettings,
        late_binding_s: float,
        fairness: Fairness = "request",
    ) -> None:
        workers = range(len(fleet.engines))
        self._fleet = fleet
        self._ids = [WorkerId(f"w{n}") for n in workers]
        self._index = KvIndex(BLOCK)
        self._roster = Roster(tuple(self._replica(n) for n in workers))
        self._scheduler = Scheduler(
            roster=lambda _: self._roster,
            match=self._match,
            policy=POLICIES[policy](),
            costs=costs,
            late_binding_s=late_binding_s,
            fairness=fairness,
            rng=Random(seed),
        )
        self._residents: dict[int, Mapping[AdapterLocation, Sequence[ResidentAdapter]]] = {}
        self._flights: dict[TraceRequest, tuple[LoadEntry, PendingBlocks]] = {}
        self._tickets: dict[TraceRequest, QueuedRequest] = {}
        self._is_polling = False
        self._looked = -1.0

    def offer(self, request: TraceRequest, now: float) -> None:
        """Send it, or let it wait."""
        ask = RoutingRequest(
            base_model=MODEL,
            engine_name=_NAMES[request.adapter],
            prompt_tokens=request.prompt_tokens,
            session=str(request.session),
            # The block that all requests have in common, and the one that tells conversations apart.
            first_blocks=(request.keys or [0])[min(1, len(request.keys) - 1)],
        )
        ticket = QueuedRequest(
            hashed=HashedRequest(ask, {BLOCK: [BlockHash(key) for key in request.keys]}, session=_session(request)),
            adapter=ask.engine_name,
            payload=request,
        )
        decision = self._scheduler.decide_or_enqueue(ticket, now)
        if decision is not None:
            self._send(request, decision, now, ticket.hashed)
            return
        self._tickets[request] = ticket
        self._fleet.at(now + MOST_WAIT_S, lambda _: self._give_up(request))
        self._poll_soon(now)

    def first_token(self, request: TraceRequest) -> None:
        """Its prefill is over."""
        now = self._fleet.now
        flight, hold = self._flights[request]
        self._scheduler.load.record_first_token(flight, now)
        self._fleet.at(now + HOLD_S, lambda _: self._index.remove_pending(hold))
        self._ready(now)

    def ended(self, request: TraceRequest) -> None:
        """It is over, or its client has left."""
        now = self._fleet.now
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            self._scheduler.queue.remove(ticket)
        flying = self._flights.pop(request, None)
        if flying is not None:
            self._scheduler.load.remove(flying[0], now)
            if request.first_token < 0:
                self._index.remove_pending(flying[1])
        self._ready(now)

    def read(self, reading: EngineReading) -> None:
        """A new report is a new roster."""
        replicas = list(self._roster.replicas)
        replicas[reading.worker] = self._replica(reading.worker, reading)
        self._roster = Roster(tuple(replicas))
        self._scheduler.load.apply_report(replicas[reading.worker])
        self._ready(self._fleet.now)

    def lost(self, worker: int) -> None:
        """Mark a worker's replica as unreachable: it gets no requests until its next report."""
        replicas = list(self._roster.replicas)
        replicas[worker] = replace(self._replica(worker), state="unreachable")
        self._roster = Roster(tuple(replicas))

    def cached(self, worker: int, changes: Changes) -> None:
        """Into the index, runs of one kind in one call."""
        at, end = 0, len(changes)
        while at < end:
            is_new = changes[at][1]
            run = []
            while at < end and changes[at][1] is is_new:
                run.append(BlockHash(changes[at][0]))
                at += 1
            (self._index.add if is_new else self._index.drop)(self._ids[worker], run)

    def _match(self, prompt: HashedRequest) -> PrefixMatch:
        return PrefixMatch(self._index.match(prompt.chains[BLOCK]))

    def _replica(self, worker: int, reading: EngineReading | None = None) -> Replica:
        hardware = self._fleet.setting.hardware
        report = EngineReport()
        residents: Mapping[str, ResidentAdapter] = dict(zip(_NAMES, _UNMEASURED["disk"], strict=True))
        if reading is not None:
            report = EngineReport(
                running=reading.running,
                waiting=reading.waiting,
                kv_usage=reading.kv_usage,
                prefill_tokens_per_s=reading.prefill_tokens_per_s,
                token_s=reading.decode_step.token_s,
                sequence_s=reading.decode_step.sequence_s,
                context_token_s=reading.decode_step.context_token_s,
                output_tokens=reading.output_tokens,
                load_s=reading.load_s,
                at=reading.at,
            )
            own = self._residents.get(worker)
            if own is None:
                own = self._residents[worker] = _residents(reading.loads_s)
            residents = {_NAMES[n]: own[place][n] for n, place in enumerate(reading.locations)}
        return Replica(
            id=self._ids[worker],
            base_model=MODEL,
            engine_url="",
            agent_url="",
            dialect="vllm",
            state="ready",
            block_size=BLOCK,
            max_loras=hardware.max_loras,
            max_num_seqs=hardware.max_num_seqs,
            max_model_len=1 << 20,
            total_kv_blocks=hardware.blocks,
            residents=MappingProxyType(residents),
            report=report,
        )

    def _send(self, request: TraceRequest, decision: Decision, now: float, hashed: HashedRequest) -> None:
        flight = self._scheduler.record_dispatch(decision, now, hashed)
        hold = self._index.add_pending(decision.replica.id, [BlockHash(key) for key in request.keys])
        self._flights[request] = flight, hold
        request.predicted_s = flight.predicted_s
        self._fleet.send(request, decision.position)

    def _give_up(self, request: TraceRequest) -> None:
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            self._scheduler.queue.remove(ticket)
            self._fleet.shed(request)

    def _ready(self, now: float) -> None:
        if not self._tickets or now - self._looked < self._pause_s() / 2:
            return
        self._looked = now
        for ticket, decision in self._scheduler.take_admissible(now):
            request = ticket.payload
            del self._tickets[request]
            if isinstance(decision, NoReplica):
                self._fleet.shed(request)
            else:
                self._send(request, decision, now, ticket.hashed)

    def _poll_soon(self, now: float) -> None:
        if not self._is_polling:
            self._is_polling = True
            self._fleet.at(now + self._pause_s(), self._poll)

    def _pause_s(self) -> float:
        return min(LOOK_MOST_S, LOOK_S * max(1.0, len(self._tickets) / FEW))

    def _poll(self, now: float) -> None:
        self._is_polling = False
        self._ready(now)
        if self._tickets:
            self._poll_soon(now)


def _session(request: TraceRequest) -> Session:
    """The session of a request's agent, with the session that started this agent as its parent."""
    return Session(str(request.session), "" if request.parent < 0 else str(request.parent))
