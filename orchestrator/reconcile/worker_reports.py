"""What the workers last said, in memory only: heartbeats and our own probes in, an `ObservedFleet` snapshot out.

A report stays valid for as long as its engine runs, however old it is. So silence alone changes nothing: agent and
engine are asked first, and only when both are gone is the worker lost.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from lorafleet.kube.slices import DiscoveredWorker
from orchestrator.core.placement.warm_up import WARMING
from orchestrator.core.state import OCCUPYING, AdapterFailure, ObservedFleet, ObservedWorker, Pair, ReportedAdapter
from orchestrator.store.backend import WorkerIntent
from workers.wire import LoadedLora, LoraInfo, Metadata

_AGENT_STATES = {"starting": "starting", "engine_down": "starting", "draining": "draining", "ready": "ready"}


@dataclass(slots=True)
class KnownWorker:
    """One worker. `reach`: heard (the agent speaks), unmanaged (only the engine answers), lost (neither).

    found  what EndpointSlices said of it last, also once they have stopped to name it: a pod that ends goes on ending
    """

    report: Metadata
    heard_at: float
    reach: str = "heard"
    since: dict[tuple[str, str], float] = field(default_factory=dict)
    """(lora_id, engine boot) -> when we, or the agent, first saw it ready"""
    probed_at: float = 0.0
    found: DiscoveredWorker | None = None

    @property
    def is_terminating(self) -> bool:
        return self.found is not None and self.found.is_terminating


@dataclass(frozen=True, slots=True)
class ReportChange:
    """What a report or probe changed: whether a pass is due, and which adapters went without our doing."""

    is_news: bool
    vanished: tuple[str, ...] = ()


class WorkerReports:
    """All workers by id. One writer: the event loop."""

    def __init__(self, *, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self.entries: dict[str, KnownWorker] = {}
        self._places: Mapping[str, DiscoveredWorker] = {}

    def place(self, found: Mapping[str, DiscoveredWorker]) -> bool:
        """Take what EndpointSlices say, by worker id; whether that can change a decision."""
        self._places = found
        is_news = False
        for worker_id, worker in found.items():
            entry = self.entries.get(worker_id)
            if entry is None or entry.found == worker:
                continue
            before = entry.is_terminating, entry.report
            entry.found, entry.report = worker, _placed(entry.report, worker)
            is_news |= before != (entry.is_terminating, entry.report)
        return is_news

    def other_of_the_name(self, report: Metadata, within_s: float) -> str | None:
        """Where an agent of that name is that is not this one, and has spoken of late; None when there is none."""
        entry = self.entries.get(report.instance_id)
        if entry is None or entry.reach != "heard" or self._clock() - entry.heard_at >= within_s:
            return None
        is_other = entry.report.agent_url != report.agent_url and entry.report.agent_boot_id != report.agent_boot_id
        return entry.report.agent_url if is_other else None

    def hear(self, report: Metadata) -> ReportChange:
        """Take an agent's own word."""
        now = self._clock()
        entry = self.entries.get(report.instance_id)
        if entry is None:
            found = self._places.get(report.instance_id)
            entry = self.entries[report.instance_id] = KnownWorker(_placed(report, found), now, found=found)
            self._note_ready(entry, now)
            return ReportChange(is_news=True)
        report = _placed(report, entry.found)
        before, entry.report, entry.heard_at = entry.report, report, now
        had = _ready_ids(before) if entry.reach != "lost" else frozenset()
        is_news = entry.reach != "heard" or _gist(before) != _gist(report)
        entry.reach = "heard"
        self._note_ready(entry, now)
        return ReportChange(is_news, tuple(sorted(had - _there_ids(report))))

    def engine_answers(self, worker_id: str, models: frozenset[str] | None) -> ReportChange:
        """The agent is silent, its engine is up: what it holds is still there, less what it does not list."""
        entry = self.entries[worker_id]
        loaded = entry.report.lora.loaded_loras
        there = tuple(lora for lora in loaded if models is None or lora.engine_name in models)
        gone = tuple(
            sorted({lora.lora_id for lora in loaded if lora.state == "ready"} - {lora.lora_id for lora in there})
        )
        is_news = entry.reach != "unmanaged" or bool(gone)
        entry.reach = "unmanaged"
        entry.report = _with_loaded(entry.report, there)
        return ReportChange(is_news, gone)

    def nobody_answers(self, worker_id: str) -> ReportChange:
        """Agent and engine are gone, and so is what the engine held."""
        entry = self.entries[worker_id]
        if entry.reach == "lost":
            return ReportChange(is_news=False)
        entry.reach = "lost"
        return ReportChange(is_news=True, vanished=tuple(sorted(_ready_ids(entry.report))))

    def loaded(self, worker_id: str, lora: LoadedLora, evicted: str | None) -> None:
        """Our own load succeeded: true at once, without waiting for the next report. `evicted`: an engine name."""
        entry = self.entries.get(worker_id)
        if entry is not None:
            others = tuple(
                held
                for held in entry.report.lora.loaded_loras
                if held.engine_name not in (lora.engine_name, evicted)
                and (held.lora_id != lora.lora_id or held.state in ("ready", "draining"))
            )
            entry.report = _with_loaded(entry.report, (*others, lora))
            self._note_ready(entry, self._clock())

    def unloaded(self, worker_id: str, engine_name: str) -> None:
        """Our own unload succeeded."""
        entry = self.entries.get(worker_id)
        if entry is not None:
            others = tuple(held for held in entry.report.lora.loaded_loras if held.engine_name != engine_name)
            entry.report = _with_loaded(entry.report, others)

    def silent(self, probe_after_s: float) -> list[str]:
        """Workers not heard for this long, to be probed; each at most once in that time."""
        now = self._clock()
        found = []
        for worker_id, entry in self.entries.items():
            if now - max(entry.heard_at, entry.probed_at) >= probe_after_s:
                entry.probed_at = now
                found.append(worker_id)
        return found

    def next_silent_s(self, probe_after_s: float) -> float | None:
        """Seconds until somebody will have been silent this long; None when nobody is there."""
        since = (max(entry.heard_at, entry.probed_at) for entry in self.entries.values() if entry.reach != "lost")
        first = min(since, default=None)
        return None if first is None else max(0.0, first + probe_after_s - self._clock())

    def forget(self, after_s: float) -> list[str]:
        """Drop workers that have been lost for long, or whose pods were ended and are gone, and say which."""
        now = self._clock()
        lost = {name: entry for name, entry in self.entries.items() if entry.reach == "lost"}
        ended = {name for name, entry in lost.items() if entry.is_terminating and name not in self._places}
        old = [name for name, entry in lost.items() if name in ended or now - entry.heard_at > after_s]
        for name in old:
            del self.entries[name]
        return old

    def base_model_names(self) -> frozenset[str]:
        return frozenset(entry.report.model.base_model for entry in self.entries.values())

    def snapshot(
        self,
        intents: Mapping[str, WorkerIntent],
        *,
        failures: Mapping[Pair, AdapterFailure],
        busy: Mapping[str, int],
        loading: Mapping[Pair, str],
        draining: Iterable[Pair],
        inspecting: Mapping[str, str],
        reserve_victims: Mapping[Pair, str],
        loading_victims: Iterable[Pair],
        digests: Callable[[str], str | None],
    ) -> ObservedFleet:
        """The fleet now.

        loading    (lora_id, worker_id) -> digest of loads that we have under way
        draining   (lora_id, worker_id) that take no new requests, by our own mark
        digests    lora_id -> its registered digest, to tell it from other bytes of the same name
        """
        workers = {name: self._worker(entry, intents.get(name), digests) for name, entry in self.entries.items()}
        for (lora_id, worker_id), digest in loading.items():
            if worker_id in workers and not workers[worker_id].has_in_slot(lora_id):
                held = ReportedAdapter(
                    lora_id=lora_id, digest=digest, engine_name="", state="loading", since=self._clock()
                )
                workers[worker_id] = replace(
                    workers[worker_id], adapters={**workers[worker_id].adapters, lora_id: held}
                )
        for lora_id, worker_id in draining:
            if worker_id in workers and lora_id in workers[worker_id].adapters:
                all_held = dict(workers[worker_id].adapters)
                all_held[lora_id] = replace(all_held[lora_id], state="draining")
                workers[worker_id] = replace(workers[worker_id], adapters=all_held)
        return ObservedFleet(
            workers=workers,
            failures=failures,
            busy=busy,
            inspecting=inspecting,
            loads_in_flight=len(loading),
            reserve_victims=reserve_victims,
            loading_victims=frozenset(loading_victims),
        )

    def _worker(
        self, entry: KnownWorker, intent: WorkerIntent | None, digests: Callable[[str], str | None]
    ) -> ObservedWorker:
        report = entry.report
        held = {} if entry.reach == "lost" else self._all_held(entry, digests)
        capacity = report.lora.capacity
        until = None if intent is None or intent.until is None else self._clock() + intent.until - self._wall()
        return ObservedWorker(
            id=report.instance_id,
            state=WARMING if is_warming(entry, intent) else state_of(entry, intent),
            base_model=entry.report.model.base_model,
            slots=capacity.loaded_count + capacity.available_slots if report.lora.enabled else 0,
            max_lora_rank=report.lora.max_lora_rank,
            refusal=report.lora.refusal,
            adapters=held,
            zone=report.zone,
            node=report.node,
            running=report.load.running + report.load.waiting,
            load=report.load.running + report.load.waiting,
            drain_deadline=until,
            is_agent_draining=report.state == "draining",
            is_terminating=entry.is_terminating,
            reported_at=entry.heard_at,
        )

    def _all_held(self, entry: KnownWorker, digests: Callable[[str], str | None]) -> dict[str, ReportedAdapter]:
        """By lora_id. Of two versions the registered one has the name, the other goes by its engine name: an orphan."""
        found: dict[str, ReportedAdapter] = {}
        loras = entry.report.lora.loaded_loras

        def order(lora: LoadedLora) -> tuple[bool, bool]:
            return lora.state not in OCCUPYING, lora.digest != digests(lora.lora_id)

        for lora in sorted(loras, key=order):
            held = self._held(entry, lora)
            if lora.lora_id not in found:
                found[lora.lora_id] = held
            elif lora.state in OCCUPYING:
                found[lora.engine_name] = replace(held, lora_id=lora.engine_name)
        return found

    def _held(self, entry: KnownWorker, lora: LoadedLora) -> ReportedAdapter:
        since = entry.since.get((lora.lora_id, entry.report.engine_boot_id), self._clock())
        return ReportedAdapter(
            lora_id=lora.lora_id,
            digest=lora.digest,
            engine_name=lora.engine_name,
            state=lora.state,
            location=lora.location,
            since=since,
        )

    def _note_ready(self, entry: KnownWorker, now: float) -> None:
        boot = entry.report.engine_boot_id
        entry.since = {
            (lora.lora_id, boot): entry.since.get((lora.lora_id, boot), now - self._age(lora))
            for lora in entry.report.lora.loaded_loras
            if lora.state == "ready"
        }

    def _age(self, lora: LoadedLora) -> float:
        """By the agent's clock, which may be off: it only delays or hastens an eviction by that much."""
        try:
            loaded_at = datetime.fromisoformat(lora.loaded_at or "")
        except ValueError:
            return 0.0
        loaded_at = loaded_at if loaded_at.tzinfo else loaded_at.replace(tzinfo=UTC)
        return max(0.0, self._wall() - loaded_at.timestamp())


def state_of(entry: KnownWorker, intent: WorkerIntent | None) -> str:
    """One word for a worker: what we cannot reach outweighs what it says, and that what we were told."""
    if entry.reach == "lost":
        return entry.reach
    if entry.is_terminating and entry.report.state in ("ready", "draining"):
        return "draining"  # its pod is being ended, whoever asked for that: what it has must be elsewhere soon
    if entry.reach == "unmanaged":
        return entry.reach
    said = _AGENT_STATES[entry.report.state]
    if said == "ready" and intent is None and entry.report.is_suspect:
        return "cordoned"  # a load hangs in its engine: it keeps what it has, and is given nothing new
    return intent.state if said == "ready" and intent is not None else said


def is_warming(entry: KnownWorker, intent: WorkerIntent | None) -> bool:
    """Whether a worker waits for its share; one that is cordoned, ends, or has a load that hangs is given nothing."""
    report = entry.report
    is_held_back = report.is_suspect or entry.is_terminating or intent is not None
    return entry.reach == "heard" and report.is_warming and not is_held_back


def _placed(report: Metadata, found: DiscoveredWorker | None) -> Metadata:
    """With zone, node and pool from the slices, where the agent knows none."""
    if found is None:
        return report
    place = (report.zone or found.zone, report.node or found.node, report.pool or found.pool)
    if place == (report.zone, report.node, report.pool):
        return report
    return report.model_copy(update=dict(zip(("zone", "node", "pool"), place, strict=True)))


def answering(entry: KnownWorker) -> tuple[LoadedLora, ...]:
    """What the worker lists, if requests can reach it at all."""
    is_used = entry.reach != "lost" and entry.report.state == "ready" and not entry.is_terminating
    return entry.report.lora.loaded_loras if is_used else ()


def _ready_ids(report: Metadata) -> frozenset[str]:
    if report.state in ("starting", "engine_down"):
        return frozenset()
    return frozenset(lora.lora_id for lora in report.lora.loaded_loras if lora.state == "ready")


def _there_ids(report: Metadata) -> frozenset[str]:
    if report.state in ("starting", "engine_down"):
        return frozenset()
    return frozenset(lora.lora_id for lora in report.lora.loaded_loras if lora.state in OCCUPYING)


def _gist(report: Metadata) -> tuple[object, ...]:
    """The part of a report that can change a decision; counters that move all the time are left out."""
    capacity = report.lora.capacity
    held = frozenset((lora.lora_id, lora.digest, lora.state) for lora in report.lora.loaded_loras)
    shape = (capacity.loaded_count + capacity.available_slots, report.lora.max_lora_rank, report.lora.enabled)
    who = (report.agent_url, report.transport.engine_url, report.engine_boot_id, report.zone, report.node)
    return (report.state, report.is_warming, held, shape, report.lora.refusal, who, report.model.base_model)


def _with_loaded(report: Metadata, loaded: tuple[LoadedLora, ...]) -> Metadata:
    """The same report with other adapters, and the slots counted again."""
    capacity = report.lora.capacity
    total = capacity.loaded_count + capacity.available_slots
    count = capacity.loaded_count + _occupied(loaded) - _occupied(report.lora.loaded_loras)
    capacity = capacity.model_copy(update={"loaded_count": count, "available_slots": max(0, total - count)})
    lora: LoraInfo = report.lora.model_copy(update={"loaded_loras": loaded, "capacity": capacity})
    return report.model_copy(update={"lora": lora})


def _occupied(loaded: Iterable[LoadedLora]) -> int:
    return sum(lora.state in OCCUPYING for lora in loaded)
