"""The workers' last reports, in memory only: heartbeats and probes in, an `ObservedFleet` out.

A report stays valid while its engine runs, however old it is. Silence alone changes nothing: agent and engine are
probed first, and the worker is lost only when neither answers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from sortedcontainers import SortedDict  # type: ignore[import-untyped]

from lorafleet.kube.slices import DiscoveredWorker
from orchestrator.agentless.transport import agent_url_of
from orchestrator.core.placement.warm_up import WARMING
from orchestrator.model.catalog import WorkerState
from orchestrator.model.snapshot import (
    OCCUPYING,
    AdapterFailure,
    ObservedFleet,
    ObservedWorker,
    Pair,
    ReportedAdapter,
    WorkerDrainOrder,
    WorkerIntent,
    foreign_key,
)
from orchestrator.reconcile.agent_view import (
    AdapterChange,
    AgentView,
    AsOf,
    as_of,
    first_view,
    with_changes,
    with_engine_models,
    with_place,
    with_report,
)
from workers.wire import Metadata, WorkerAdapter

# Engines that finish what runs on an unloaded adapter, and answer later requests for it 404 (vLLM 0.32, seen running).
# SGLang loads it again for the next request.
_FINISHES_UNLOADED = frozenset({"vllm"})
_AGENT_STATES: Mapping[str, Literal["starting", "draining", "ready"]] = {
    "starting": "starting",
    "engine_down": "starting",
    "draining": "draining",
    "ready": "ready",
}


@dataclass(slots=True)
class KnownWorker:
    """One worker that has reported.

    view         what its agent has said last
    heard_at     when its agent last said anything; `reported_at`: when the report in `view` came
    reach        heard (the agent answers), unmanaged (only the engine does), lost (neither does)
    ready_since  (lora_id, engine boot id) -> when the adapter was first seen ready
    probed_at    when it was last probed
    kube_worker  its entry in EndpointSlices, kept when they no longer list it: a terminating pod stays terminating
    """

    view: AgentView
    heard_at: float
    reported_at: float
    reach: Literal["heard", "lost", "unmanaged"] = "heard"
    ready_since: dict[tuple[str, str], float] = field(default_factory=dict)
    probed_at: float = 0.0
    kube_worker: DiscoveredWorker | None = None

    @property
    def report(self) -> Metadata:
        """The agent's last report, with what its newer answers changed."""
        return self.view.report

    @property
    def is_terminating(self) -> bool:
        """Whether EndpointSlices have shown its pod as terminating."""
        return self.kube_worker is not None and self.kube_worker.is_terminating


@dataclass(frozen=True, slots=True)
class ReportChange:
    """What a report or probe changed.

    is_overtaken  the agent's report is older than what is known of it
    is_news   whether a pass is due
    vanished  adapters that are gone without an unload of ours
    """

    is_news: bool
    vanished: tuple[str, ...] = ()
    is_overtaken: bool = False


class WorkerReports:
    """All known workers. One writer: the event loop.

    workers     worker_id -> last report and how the worker was reached, in the order of ids
    configured  `configured_digest` of reports -> the adapters that those workers' settings name, once they are read
    """

    def __init__(self, *, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self.workers: dict[str, KnownWorker] = SortedDict()
        self.configured: dict[str, tuple[WorkerAdapter, ...]] = {}
        self._kube_workers: Mapping[str, DiscoveredWorker] = {}

    def set_kube_workers(self, found: Mapping[str, DiscoveredWorker]) -> bool:
        """Store the workers of EndpointSlices, by worker id; returns whether that can change a decision.

        Reports without zone, node or pool get those of the slices.
        """
        self._kube_workers = found
        is_news = False
        for worker_id, worker in found.items():
            entry = self.workers.get(worker_id)
            if entry is None or entry.kube_worker == worker:
                continue
            before = entry.is_terminating, entry.report
            entry.kube_worker = worker
            entry.view = with_place(entry.view, _with_kube_place(entry.view.reported, worker))
            is_news |= before != (entry.is_terminating, entry.report)
        return is_news

    def rival_agent_url(self, report: Metadata, within_s: float, *, may_move: bool) -> str | None:
        """URL of another agent with the same worker id that has reported of late; None without one.

        may_move  whether an agent at another address is the same one if it says so. Not where keys are needed: others
                  may know which start of the agent it is
        """
        entry = self.workers.get(report.instance_id)
        if entry is None or entry.reach != "heard" or self._clock() - entry.heard_at >= within_s:
            return None
        is_same = may_move and entry.report.agent_boot_id == report.agent_boot_id
        return entry.report.agent_url if entry.report.agent_url != report.agent_url and not is_same else None

    def record_report(self, report: Metadata) -> ReportChange:
        """Record an agent's report, which adds the worker or marks it as reached; returns what it changed.

        A report that was overtaken only shows that the agent is reached.
        """
        now = self._clock()
        entry = self.workers.get(report.instance_id)
        if entry is None:
            found = self._kube_workers.get(report.instance_id)
            entry = self.workers[report.instance_id] = KnownWorker(
                first_view(_with_kube_place(report, found)), now, now, kube_worker=found
            )
            self._update_ready_since(entry, now)
            return ReportChange(is_news=True)
        before, is_overtaken, entry.heard_at = entry.report, self.is_overtaken(report), now
        if not is_overtaken:
            entry.view, entry.reported_at = with_report(entry.view, _with_kube_place(report, entry.kube_worker)), now
        former_ids = _ready_ids(before) if entry.reach != "lost" else frozenset()
        is_news = entry.reach != "heard" or _decision_fields(before) != _decision_fields(entry.report)
        entry.reach = "heard"
        self._update_ready_since(entry, now)
        return ReportChange(is_news, tuple(sorted(former_ids - _occupying_ids(entry.report))), is_overtaken)

    def is_overtaken(self, report: Metadata) -> bool:
        """Whether a newer report of the same start of this agent has been recorded."""
        entry = self.workers.get(report.instance_id)
        return entry is not None and as_of(report).is_before(as_of(entry.view.reported))

    def record_engine_models(self, worker_id: str, models: frozenset[str] | None) -> ReportChange:
        """Mark the worker as unmanaged: only its engine answers. Returns what that changed.

        models  names that the engine lists: adapters not among them are dropped; None: not known
        """
        entry = self.workers[worker_id]
        loaded = entry.report.lora.loaded_loras
        if models is not None:
            entry.view = with_engine_models(entry.view, models)
        still_loaded = {lora.lora_id for lora in entry.report.lora.loaded_loras}
        gone = tuple(sorted({lora.lora_id for lora in loaded if lora.state == "ready"} - still_loaded))
        is_news = entry.reach != "unmanaged" or bool(gone)
        entry.reach = "unmanaged"
        return ReportChange(is_news, gone)

    def mark_lost(self, worker_id: str) -> ReportChange:
        """Mark the worker as lost, with all that its engine held; returns what that changed."""
        entry = self.workers[worker_id]
        if entry.reach == "lost":
            return ReportChange(is_news=False)
        entry.reach = "lost"
        return ReportChange(is_news=True, vanished=tuple(sorted(_ready_ids(entry.report))))

    def record_load(self, worker_id: str, lora: WorkerAdapter, evicted: str | None, at: AsOf) -> None:
        """Record the answer to a load, without waiting for the next report. No-op for an unknown worker.

        evicted  engine name of the victim, which is gone
        """
        victims = [] if evicted is None else [AdapterChange(at, evicted)]
        self._record_answer(worker_id, [*victims, AdapterChange(at, lora.engine_name, lora)])

    def record_unload(self, worker_id: str, engine_name: str, at: AsOf) -> None:
        """Record the answer to an unload, without waiting for the next report. No-op for an unknown worker."""
        self._record_answer(worker_id, [AdapterChange(at, engine_name)])

    def _record_answer(self, worker_id: str, changes: Iterable[AdapterChange]) -> None:
        """Record the effects of an answered action. The answer shows, too, that the agent is reached."""
        entry = self.workers.get(worker_id)
        if entry is not None:
            entry.view, entry.heard_at = with_changes(entry.view, changes), self._clock()
            self._update_ready_since(entry, self._clock())

    def workers_to_probe(self, probe_after_s: float) -> list[str]:
        """Workers silent for this long. Marks them as probed: each is returned at most once in that time."""
        now = self._clock()
        found = []
        for worker_id, entry in self.workers.items():
            if now - max(entry.heard_at, entry.probed_at) >= probe_after_s:
                entry.probed_at = now
                found.append(worker_id)
        return found

    def next_probe_in_s(self, probe_after_s: float) -> float | None:
        """Seconds until a worker has been silent for this long; None without workers."""
        since = (max(entry.heard_at, entry.probed_at) for entry in self.workers.values() if entry.reach != "lost")
        first = min(since, default=None)
        return None if first is None else max(0.0, first + probe_after_s - self._clock())

    def drop_lost(self, after_s: float) -> list[str]:
        """Drop lost workers that are silent for `after_s`, or whose terminated pods are gone; returns their ids."""
        now = self._clock()
        lost = {name: entry for name, entry in self.workers.items() if entry.reach == "lost"}
        ended = {name for name, entry in lost.items() if entry.is_terminating and name not in self._kube_workers}
        old = [name for name, entry in lost.items() if name in ended or now - entry.heard_at > after_s]
        for name in old:
            del self.workers[name]
        return old

    def configured_adapters(self, entry: KnownWorker) -> tuple[WorkerAdapter, ...]:
        """The adapters that the worker's settings name; none while they are not read."""
        return self.configured.get(entry.report.lora.configured_digest, ())

    def unread_lists(self) -> dict[str, list[str]]:
        """Digest -> workers that answer, of lists of configured adapters that are not read. Drops lists of nobody."""
        found: dict[str, list[str]] = {"": []}
        for worker_id, entry in self.workers.items():
            found.setdefault(entry.report.lora.configured_digest, []).extend(
                [worker_id] if entry.reach == "heard" else []
            )
        self.configured = {digest: items for digest, items in self.configured.items() if digest in found}
        return {digest: ids for digest, ids in found.items() if ids and digest and digest not in self.configured}

    def base_model_names(self) -> frozenset[str]:
        """Names of the base models that known workers serve."""
        return frozenset(entry.report.model.base_model for entry in self.workers.values())

    def has_copy(self, worker_id: str, name: str) -> bool:
        """Whether the worker reports an adapter with this lora_id or engine name in one of its slots."""
        entry = self.workers.get(worker_id)
        loras = () if entry is None else entry.report.lora.loaded_loras
        return any(lora.state in OCCUPYING and name in {lora.lora_id, lora.engine_name} for lora in loras)

    def observed_fleet(
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
        """The fleet now: the reports, with our operations in progress applied.

        loading    (lora_id, worker_id) -> digest of loads in progress
        draining   (lora_id, worker_id) with a drain of ours
        digests    lora_id -> registered digest
        """
        workers = {
            name: self._observed_worker(entry, intents.get(name), digests) for name, entry in self.workers.items()
        }
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
                changed = dict(workers[worker_id].adapters)
                changed[lora_id] = replace(changed[lora_id], state="draining")
                workers[worker_id] = replace(workers[worker_id], adapters=changed)
        return ObservedFleet(
            workers=workers,
            failures=failures,
            busy=busy,
            inspecting=inspecting,
            loads_in_flight=len(loading),
            reserve_victims=reserve_victims,
            loading_victims=frozenset(loading_victims),
        )

    def _observed_worker(
        self, entry: KnownWorker, intent: WorkerIntent | None, digests: Callable[[str], str | None]
    ) -> ObservedWorker:
        """The worker as placement uses it: report, reachability and operator's order in one."""
        report = entry.report
        held = {} if entry.reach == "lost" else self._adapters_on(entry, digests)
        capacity = report.lora.capacity
        return ObservedWorker(
            id=report.instance_id,
            state=WARMING if is_warming(entry, intent) else worker_state(entry, intent),
            base_model=entry.report.model.base_model,
            slots=capacity.loaded_count + capacity.available_slots if report.lora.enabled else 0,
            max_lora_rank=report.lora.max_lora_rank,
            refusal=report.lora.refusal,
            adapters=held,
            zone=report.zone,
            node=report.node,
            running=report.load.running + report.load.waiting,
            load=report.load.running + report.load.waiting,
            drain=self._drain_order(intent),
            is_agent_draining=report.state == "draining",
            is_terminating=entry.is_terminating,
            reported_at=entry.reported_at,
            has_agent=bool(agent_url_of(report)),
            finishes_unloaded=report.transport.dialect in _FINISHES_UNLOADED,
            kept_out=frozenset() if intent is None else frozenset(intent.kept_out),
            disk_room_bytes=capacity.disk_room_bytes,
        )

    def _drain_order(self, intent: WorkerIntent | None) -> WorkerDrainOrder | None:
        """The operator's order to drain, by our monotonic clock; None without one."""
        if intent is None or intent.state != "draining":
            return None
        ahead_s = self._clock() - self._wall()
        deadline = None if intent.until is None else intent.until + ahead_s
        return WorkerDrainOrder(
            began_at=intent.since + ahead_s,
            deadline=deadline,
            is_fixed=intent.deadline_s is not None,
            moves=intent.moves,
            move_bytes=intent.move_bytes,
        )

    def _adapters_on(self, entry: KnownWorker, digests: Callable[[str], str | None]) -> dict[str, ReportedAdapter]:
        """lora_id -> adapter on the worker. With two digests the unregistered one goes by its engine name.

        An adapter that another client loaded goes by its `foreign_key`, so that it hides no copy of ours.
        """
        found: dict[str, ReportedAdapter] = {}
        loras = entry.report.lora.loaded_loras

        def order(lora: WorkerAdapter) -> tuple[bool, bool]:
            return lora.state not in OCCUPYING, lora.digest != digests(lora.lora_id)

        for lora in sorted(loras, key=order):
            held = self._reported_adapter(entry, lora)
            if held.is_foreign:
                key = foreign_key(lora.engine_name)
                found[key] = replace(held, lora_id=key)
            elif lora.lora_id not in found:
                found[lora.lora_id] = held
            elif lora.state in OCCUPYING:
                found[lora.engine_name] = replace(held, lora_id=lora.engine_name)
        return found

    def _reported_adapter(self, entry: KnownWorker, lora: WorkerAdapter) -> ReportedAdapter:
        """One adapter on the worker as placement sees it."""
        since = entry.ready_since.get((lora.lora_id, entry.report.engine_boot_id), self._clock())
        unused_s = self._seconds_since(lora.last_used)
        return ReportedAdapter(
            lora_id=lora.lora_id,
            digest=lora.digest or lora.files_digest,
            engine_name=lora.engine_name,
            state=lora.state,
            location=lora.location,
            since=since,
            is_foreign=is_foreign(lora),
            is_configured=lora.is_configured,
            acceptance=None if lora.acceptance is None else lora.acceptance.result,
            last_used_at=None if unused_s is None else self._clock() - unused_s,
        )

    def _update_ready_since(self, entry: KnownWorker, now: float) -> None:
        """Update since when each ready adapter is ready; forget the others."""
        boot = entry.report.engine_boot_id
        entry.ready_since = {
            (lora.lora_id, boot): entry.ready_since.get(
                (lora.lora_id, boot), now - (self._seconds_since(lora.loaded_at) or 0.0)
            )
            for lora in entry.report.lora.loaded_loras
            if lora.state == "ready"
        }

    def _seconds_since(self, timestamp: str | None) -> float | None:
        """Seconds since a time of the agent's clock, at least 0; None without one. An error only shifts an eviction."""
        try:
            at = datetime.fromisoformat(timestamp or "")
        except ValueError:
            return None
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return max(0.0, self._wall() - at.timestamp())


def worker_state(entry: KnownWorker, intent: WorkerIntent | None) -> WorkerState:
    """The worker's state. Reachability outweighs the agent's report, which outweighs a cordon or drain by REST.

    A ready worker is draining while its pod is terminated, and cordoned while a load hangs in its engine.
    """
    if entry.reach == "lost":
        return entry.reach
    if entry.is_terminating and entry.report.state in ("ready", "draining"):
        return "draining"  # its pod is being terminated: its adapters must be elsewhere soon
    if entry.reach == "unmanaged":
        return entry.reach
    reported, ordered = _AGENT_STATES[entry.report.state], None if intent is None else intent.state
    if reported == "ready" and ordered is None and entry.report.is_suspect:
        return "cordoned"  # a load hangs in its engine: it keeps its adapters and gets no new ones
    return ordered if reported == "ready" and ordered is not None else reported


def is_warming(entry: KnownWorker, intent: WorkerIntent | None) -> bool:
    """Whether the worker waits for warm-up loads. A cordoned, terminating or suspect worker gets none."""
    report = entry.report
    is_held_back = report.is_suspect or entry.is_terminating or (intent is not None and intent.state is not None)
    return entry.reach == "heard" and report.is_warming and not is_held_back


def _with_kube_place(report: Metadata, found: DiscoveredWorker | None) -> Metadata:
    """The report, with zone, node and pool from EndpointSlices where the agent reports none."""
    if found is None:
        return report
    place = (report.zone or found.zone, report.node or found.node, report.pool or found.pool)
    if place == (report.zone, report.node, report.pool):
        return report
    return report.model_copy(update=dict(zip(("zone", "node", "pool"), place, strict=True)))


def is_foreign(lora: WorkerAdapter) -> bool:
    """Whether another client loaded the adapter: the engine has it under its bare name."""
    return lora.state in OCCUPYING and not lora.digest and lora.engine_name == lora.lora_id


def serving_adapters(entry: KnownWorker) -> tuple[WorkerAdapter, ...]:
    """The adapters that the worker lists; none if it takes no requests."""
    is_used = entry.reach != "lost" and entry.report.state == "ready" and not entry.is_terminating
    return entry.report.lora.loaded_loras if is_used else ()


def _ready_ids(report: Metadata) -> frozenset[str]:
    """lora_ids that the worker serves, by its report."""
    if report.state in ("starting", "engine_down"):
        return frozenset()
    return frozenset(lora.lora_id for lora in report.lora.loaded_loras if lora.state == "ready")


def _occupying_ids(report: Metadata) -> frozenset[str]:
    """lora_ids that take a slot on the worker, by its report."""
    if report.state in ("starting", "engine_down"):
        return frozenset()
    return frozenset(lora.lora_id for lora in report.lora.loaded_loras if lora.state in OCCUPYING)


def _decision_fields(report: Metadata) -> tuple[object, ...]:
    """The fields of a report that can change a decision; load counters are left out."""
    capacity = report.lora.capacity
    held = frozenset((lora.lora_id, lora.digest, lora.files_digest, lora.state) for lora in report.lora.loaded_loras)
    shape = (capacity.loaded_count + capacity.available_slots, report.lora.max_lora_rank, report.lora.enabled)
    configured = report.lora.configured_digest
    identity = (report.agent_url, report.transport.engine_url, report.engine_boot_id, report.zone, report.node)
    return (
        report.state,
        report.is_warming,
        held,
        configured,
        shape,
        report.lora.refusal,
        identity,
        report.model.base_model,
    )
