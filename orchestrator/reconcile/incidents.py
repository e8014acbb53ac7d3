"""Incidents in the history: those that agents and routers report, and what the orchestrator sees itself, each once."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import structlog

from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from orchestrator.core.incidents import KINDS_OF_INCIDENTS, Incident, IncidentBook
from orchestrator.leadership.leadership import Leadership
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.worker_reports import WorkerReports
from orchestrator.store.store import NOBODY, IntentStore
from workers.wire import AgentIncident, Metadata

log = structlog.get_logger()

# Incidents of the last term that are read to know again what has been recorded.
_READ_BACK = 5_000
# Of one router, so many workers' circuits are followed; more are no fleet's.
_MOST_CIRCUITS = 10_000
_MOST_ROUTERS = 1_000


class IncidentRecorder:
    """Writes incidents to the history, as events and into the metrics. Only the leader writes."""

    def __init__(
        self,
        *,
        store: IntentStore,
        reports: WorkerReports,
        catalog: CatalogBook,
        metrics: OrchestratorMetrics,
        leadership: Leadership,
        wall: Callable[[], float],
    ) -> None:
        self._store = store
        self._reports = reports
        self._catalog = catalog
        self._metrics = metrics
        self._leadership = leadership
        self._wall = wall
        self._book = IncidentBook()
        self._recorded: dict[str, tuple[str, int]] = {}  # worker_id -> agent's boot id, last incident recorded
        self._lost: dict[str, float] = {}  # worker_id -> when it was seen to be lost
        self._circuits: dict[str, Mapping[str, str]] = {}  # router_id -> worker_id -> open or half_open
        self._away: tuple[float, str] | None = None  # since when the lease cannot be reached, and why
        self._store_lost: Incident | None = None  # until the store takes changes again

    def begin_term(self) -> None:
        """Read which incidents have been recorded, and record that this process leads. Raises StoreError."""
        self._book = IncidentBook()
        recorded = self._store.history(kinds=tuple(KINDS_OF_INCIDENTS), limit=_READ_BACK)
        self._book.add_keys(str(entry.body.get("key")) for entry in reversed(recorded))
        self._recorded.clear()
        epoch, leader = self._store.epoch, self._leadership.holder
        begun = Incident("leader_changed", self._wall(), "", f"leader {epoch}", f"{leader} leads, epoch {epoch}")
        if self._book.is_to_record(begun):
            self._metrics.incidents.labels(begun.kind).inc()
            self._store_incident(begun)

    def record_agent_incidents(self, report: Metadata, incidents: Sequence[AgentIncident]) -> int:
        """Record an agent's incidents, each once; returns the number up to which it need not send them again."""
        worker_id, boot_id = report.instance_id, report.agent_boot_id
        known_boot_id, last = self._recorded.get(worker_id, ("", 0))
        last = last if known_boot_id == boot_id else 0
        for each in incidents:
            if each.id > last and each.kind in KINDS_OF_INCIDENTS:
                incident = Incident(
                    each.kind,
                    _unix_time(each.at, self._wall()),
                    worker_id,
                    f"{worker_id} {boot_id} {each.id}",
                    each.cause,
                    seconds=each.seconds,
                    adapters=each.adapters,
                )
                if not self._record(incident):
                    break
            last = max(last, each.id)
        self._recorded[worker_id] = boot_id, last
        return last

    def record_circuits(self, router_id: str, circuits: Mapping[str, str], *, is_last: bool) -> None:
        """Record the circuits that a router has opened or closed since its last report."""
        before = self._circuits.pop(router_id, {})
        now = self._wall()
        for worker_id in sorted(before.keys() | circuits.keys())[:_MOST_CIRCUITS]:
            was_open, is_open = worker_id in before, worker_id in circuits
            if was_open is is_open or (is_last and was_open):
                continue
            kind = "circuit_opened" if is_open else "circuit_closed"
            cause = f"router {router_id} {'sends it no requests' if is_open else 'sends it requests again'}"
            self._record(
                Incident(kind, now, worker_id, f"{kind} {router_id} {worker_id} {now}", cause, router_id=router_id)
            )
        if circuits and not is_last:
            self._circuits[router_id] = dict(circuits)
            while len(self._circuits) > _MOST_ROUTERS:
                self._circuits.pop(next(iter(self._circuits)))

    def look(self) -> None:
        """Record workers that were lost or are back, a lease that is reached again, and due summaries.

        Called at every pass, also while another process leads.
        """
        now = self._wall()
        if self._leadership.trouble and self._away is None:
            self._away = now, self._leadership.trouble
        if not self._leadership.is_leading:
            return
        if self._away is not None and not self._leadership.trouble:
            (since, why), self._away = self._away, None
            cause = f"{self._leadership.lease_place} was not reached for {now - since:.1f} s: {why}"
            self._record(Incident("lease_away", since, "", f"lease {since}", cause, seconds=round(now - since, 3)))
        lost = {worker_id for worker_id, entry in self._reports.workers.items() if entry.reach == "lost"}
        for worker_id in sorted(lost - self._lost.keys()):
            self._lost[worker_id] = now
            cause = "neither its agent nor its engine answers"
            self._record(Incident("worker_lost", now, worker_id, f"lost {worker_id} {now}", cause))
        for worker_id in sorted(self._lost.keys() - lost):
            since = self._lost.pop(worker_id)
            if worker_id in self._reports.workers:
                cause, gone_s = f"it answers again, after {now - since:.1f} s", round(now - since, 3)
                key = f"back {worker_id} {now}"
                self._record(Incident("worker_back", now, worker_id, key, cause, seconds=gone_s))
        for summary in self._book.due_summaries(now):
            self._store_incident(summary)

    def look_at_store(self, mended: str = "") -> None:
        """Record that the store takes no changes, and that it does again. Called every second.

        mended  what `IntentStore.check` has mended, in words; mostly empty
        """
        now, trouble = self._wall(), self._store.trouble
        if mended:
            log.error("store mended", cause=mended)
            self._record(Incident("store_lost", now, "", f"store mended {now}", mended, seconds=0.0))
        if trouble and self._store_lost is None:
            log.error("store takes no changes", cause=trouble)
            self._store_lost = Incident("store_lost", now, "", f"store lost {now}", trouble)
            self._record(self._store_lost)
        elif not trouble and self._store_lost is not None and self._leadership.is_leading:
            lost, self._store_lost = self._store_lost, None
            gone_s = round(now - lost.at, 3)
            if self._book.is_to_record(lost):
                self._store_incident(lost)  # no disk took it then
            self._record(
                Incident("store_back", now, "", f"store back {now}", f"after {now - lost.at:.1f} s", seconds=gone_s)
            )

    def _record(self, incident: Incident) -> bool:
        """Record an incident unless it is known or its like come too often; False if it must be tried again."""
        if not self._leadership.is_leading:
            return False
        self._metrics.incidents.labels(incident.kind).inc()
        return not self._book.is_to_record(incident) or self._store_incident(incident)

    def _store_incident(self, incident: Incident) -> bool:
        """Write one incident to the history, with a log line and an event; False, and logged, if it cannot be now."""
        body = {
            "cause": incident.cause,
            "at": incident.at,
            "key": incident.key,
            "seconds": incident.seconds,
            "adapters": incident.adapters,
            "router_id": incident.router_id or None,
            "count": incident.count if incident.count > 1 else None,
        }
        try:
            self._store.record(
                incident.kind, incident.subject, {name: v for name, v in body.items() if v is not None}, NOBODY
            )
        except (StoreError, OrchestratorUnavailable) as exc:
            self._book.forget(incident)
            log.warning("incident not recorded", kind=incident.kind, worker_id=incident.subject, error=str(exc))
            return False
        severity = KINDS_OF_INCIDENTS[incident.kind].severity
        write = {"info": log.info, "warning": log.warning, "error": log.error}[severity]
        write("incident", kind=incident.kind, worker_id=incident.subject, cause=incident.cause)
        self._catalog.emit_event("incident", worker_id=incident.subject or None, message=incident.first_line)
        return True


def _unix_time(text: str, otherwise: float) -> float:
    """Unix seconds of an ISO 8601 time; `otherwise` for one that is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return otherwise
