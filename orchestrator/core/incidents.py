"""Incidents: what happened to workers, engines and the fleet by itself, each once, and bounded while something flaps.

Pure: times come in as arguments.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class IncidentKind:
    """How bad incidents of a kind are, and what to do about one. Empty: nothing."""

    severity: Severity
    next_step: str = ""


KINDS_OF_INCIDENTS = {
    "agent_started": IncidentKind("info"),
    "engine_started": IncidentKind("info"),
    "engine_start_failed": IncidentKind(
        "error", "read the engine's output in the cause; correct its arguments, memory or model"
    ),
    "engine_died": IncidentKind(
        "error", "read the engine's output in the cause; for SIGKILL look for the out-of-memory killer (dmesg)"
    ),
    "engine_hung": IncidentKind(
        "error", "the engine is restarted; see whether its device is healthy (nvidia-smi, dmesg)"
    ),
    "engine_back": IncidentKind("info"),
    "lora_kernels_missing": IncidentKind(
        "error", "install a vLLM build for the worker's device, with Triton; adapters are slow or wrong without it"
    ),
    "acceptance_differs": IncidentKind(
        "error", "see what its answers look like (lorafleet adapters list), and docs/acceptance.md; publish it again"
    ),
    "worker_lost": IncidentKind("error", "see whether its node and agent run; its adapters are loaded elsewhere"),
    "worker_back": IncidentKind("info"),
    "circuit_opened": IncidentKind("warning", "see the worker's own incidents; requests go elsewhere meanwhile"),
    "circuit_closed": IncidentKind("info"),
    "leader_changed": IncidentKind("info"),
    "lease_away": IncidentKind(
        "warning", "see why what the cause names did not answer; it may also be a machine without CPU time"
    ),
    "store_lost": IncidentKind("error", "the orchestrator takes no changes meanwhile: the cause says what to do"),
    "store_back": IncidentKind("info"),
    "disk_full": IncidentKind("error", "make room on the worker's disk, or raise max_disk_bytes"),
}
_WINDOW_S = 600.0
# Of one kind at one worker, so many a window are recorded one by one; the rest is summed up.
_ONE_BY_ONE = 5
_KEPT_KEYS = 20_000
_KEPT_PAIRS = 10_000


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened.

    at         Unix seconds
    subject    the worker's id; of the fleet itself empty
    key        the same for the same incident, however often it is reported
    cause      in words, with the first line naming it
    seconds    how long it took or lasted; None: does not apply
    adapters   adapters that are back; None: does not apply
    router_id  the router that saw it; empty: no router
    count      how many this stands for
    """

    kind: str
    at: float
    subject: str
    key: str
    cause: str = ""
    seconds: float | None = None
    adapters: int | None = None
    router_id: str = ""
    count: int = 1

    @property
    def first_line(self) -> str:
        """The incident in one line, for an event and for the console of `lorafleet up`."""
        cause = self.cause.partition("\n")[0]
        return f"{self.kind}: {cause}" if cause else self.kind


@dataclass(slots=True)
class _Recent:
    """The incidents of one kind at one worker within the window: times of recorded ones, and those not recorded."""

    recorded: deque[float] = field(default_factory=deque)
    left_out: int = 0
    left_out_since: float = 0.0
    newest: Incident | None = None


class IncidentBook:
    """Which incidents are new, and which are left out because their like come too often."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._recent: OrderedDict[tuple[str, str], _Recent] = OrderedDict()

    def add_keys(self, keys: Iterable[str]) -> None:
        """Count these incidents as recorded."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > _KEPT_KEYS:
            self._keys.popitem(last=False)

    def forget(self, incident: Incident) -> None:
        """Count the incident as not recorded, because it could not be stored."""
        self._keys.pop(incident.key, None)

    def is_to_record(self, incident: Incident) -> bool:
        """Whether the incident is to be recorded; from now on it counts as known.

        False for a known one, and for one of a kind of which its worker had too many within the window: those are
        counted for a summary.
        """
        if incident.key in self._keys:
            return False
        self.add_keys((incident.key,))
        recent = self._recent.setdefault((incident.kind, incident.subject), _Recent())
        self._recent.move_to_end((incident.kind, incident.subject))
        if len(self._recent) > _KEPT_PAIRS:
            self._recent.popitem(last=False)
        while recent.recorded and incident.at - recent.recorded[0] >= _WINDOW_S:
            recent.recorded.popleft()
        if len(recent.recorded) < _ONE_BY_ONE and not recent.left_out:
            recent.recorded.append(incident.at)
            return True
        if not recent.left_out:
            recent.left_out_since = incident.at
        recent.left_out += 1
        recent.newest = incident
        return False

    def due_summaries(self, now: float) -> list[Incident]:
        """One incident for all that were left out of a kind at a worker, once a window; they count as summed up."""
        summaries = []
        for recent in self._recent.values():
            newest = recent.newest
            if newest is None or now - recent.left_out_since < _WINDOW_S:
                continue
            cause = f"{recent.left_out} more within {_WINDOW_S / 60:.0f} minutes, the last: {newest.cause}"
            summaries.append(replace(newest, key=f"{newest.key}+", cause=cause, count=recent.left_out))
            recent.left_out, recent.newest = 0, None
            recent.recorded.clear()
        return summaries
