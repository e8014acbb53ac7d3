"""The latest state of each agent, and of the files on its disk, by its reports and answers, in any order of arrival.

An agent counts the changes of its state. Each report, and each answer to an action, has the count at that moment
(`AsOf`). So a report that was on its way while an action was answered does not take the answer back, and a report that
another one has overtaken does not count. A new start of the agent counts anew.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from lorafleet.identity import FileMark
from lorafleet.service.loops import ChangeSignal
from orchestrator.model.snapshot import OCCUPYING
from workers.wire import HeldFiles, LoraInfo, Metadata, WorkerAdapter


@dataclass(frozen=True, slots=True)
class AsOf:
    """The moment of a report or answer: an agent's start, and its count of changes. 0: an older agent, without one."""

    agent_boot_id: str = ""
    number: int = 0

    def is_before(self, other: "AsOf") -> bool:
        """Whether the same start of an agent counted fewer changes here than there."""
        return 0 < self.number < other.number and self.agent_boot_id == other.agent_boot_id

    def is_covered_by(self, other: "AsOf") -> bool:
        """Whether what was said there knows of all that was said here."""
        return 0 < self.number <= other.number and self.agent_boot_id == other.agent_boot_id


def as_of(report: Metadata) -> AsOf:
    """The moment of a report."""
    return AsOf(report.agent_boot_id, report.report_number)


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """The effect of an answered action on one name at the engine. `lora`: what is loaded now; None: nothing."""

    at: AsOf
    engine_name: str
    lora: WorkerAdapter | None = None


@dataclass(frozen=True, slots=True)
class AgentView:
    """What is known of an agent.

    reported  its newest report
    changes   effects of answers that are newer than it, one for each engine name
    report    the report with these changes
    """

    reported: Metadata
    report: Metadata
    changes: tuple[AdapterChange, ...] = ()


def first_view(report: Metadata) -> AgentView:
    """The view after an agent's first report."""
    return AgentView(report, report)


def with_report(view: AgentView, report: Metadata) -> AgentView:
    """The view after one more report; the same view if the report was overtaken."""
    if as_of(report).is_before(as_of(view.reported)):
        return view
    newer = [change for change in view.changes if as_of(report).is_before(change.at)]
    return _view_after_changes(report, newer)


def with_changes(view: AgentView, changes: Iterable[AdapterChange]) -> AgentView:
    """The view after an answer with these effects. What a newer report or answer knows already changes nothing."""
    by_name = {change.engine_name: change for change in view.changes}
    for change in changes:
        known = by_name.get(change.engine_name)
        is_known = change.at.is_covered_by(as_of(view.reported))
        if not is_known and (known is None or not change.at.is_before(known.at)):
            by_name[change.engine_name] = change
    return _view_after_changes(view.reported, by_name.values())


def with_place(view: AgentView, reported: Metadata) -> AgentView:
    """The view with the same report, whose zone, node or pool is known otherwise."""
    return _view_after_changes(reported, view.changes)


def with_engine_models(view: AgentView, models: frozenset[str]) -> AgentView:
    """The view of a silent agent whose engine lists these names: other adapters are gone."""
    loaded = tuple(lora for lora in view.reported.lora.loaded_loras if lora.engine_name in models)
    changes = [change if change.engine_name in models else replace(change, lora=None) for change in view.changes]
    return _view_after_changes(with_loaded(view.reported, loaded), changes)


def with_loaded(report: Metadata, loaded: tuple[WorkerAdapter, ...]) -> Metadata:
    """The report with these adapters, its slots counted anew."""
    capacity = report.lora.capacity
    total = capacity.loaded_count + capacity.available_slots
    count = capacity.loaded_count + _occupied_count(loaded) - _occupied_count(report.lora.loaded_loras)
    capacity = capacity.model_copy(update={"loaded_count": count, "available_slots": max(0, total - count)})
    lora: LoraInfo = report.lora.model_copy(update={"loaded_loras": loaded, "capacity": capacity})
    return report.model_copy(update={"lora": lora})


def _view_after_changes(reported: Metadata, changes: Iterable[AdapterChange]) -> AgentView:
    """The view of a report and of changes that are newer than it."""
    changes = tuple(changes)
    if not changes:
        return AgentView(reported, reported)
    names = {change.engine_name for change in changes}
    new = [change.lora for change in changes if change.lora is not None]
    new_ids = {lora.lora_id for lora in new}
    others = [
        lora
        for lora in reported.lora.loaded_loras
        if lora.engine_name not in names and (lora.lora_id not in new_ids or lora.state in ("ready", "draining"))
    ]
    return AgentView(reported, with_loaded(reported, (*others, *new)), changes)


def _occupied_count(loaded: Iterable[WorkerAdapter]) -> int:
    """Number of these adapters that take a slot."""
    return sum(lora.state in OCCUPYING for lora in loaded)


@dataclass(slots=True)
class ReportedDisk:
    """One worker's disk.

    agent_boot_id  the agent whose numbers these are
    seen           number of the last change that is known
    is_whole       whether nothing was left to report
    files          digest -> whether it is kept
    unconfirmed    digests of before that the agent, which began anew, has not named yet
    answered       digest -> as of when an answer of the agent told its state: older heartbeats do not change it
    """

    agent_boot_id: str
    disk_id: str
    seen: int = 0
    is_whole: bool = False
    files: dict[str, bool] = field(default_factory=dict)
    unconfirmed: set[str] = field(default_factory=set)
    answered: dict[str, AsOf] = field(default_factory=dict)

    def answer(self, at: AsOf, digests: Iterable[str]) -> None:
        """Keep older heartbeats from changing these digests. No-op for an answer that names no report."""
        if at.number:
            self.answered |= dict.fromkeys(digests, at)


class HeldFilesBook:
    """The disks of all workers. One writer: the event loop.

    disks    worker_id -> disk
    holders  digest -> workers that have it; `keepers`: that keep it
    arrived  digest -> disks to which its files came since the ledger took this, where all else on the disk was known
    changed  wakes those that wait for files
    """

    def __init__(self) -> None:
        self.disks: dict[str, ReportedDisk] = {}
        self.holders: dict[str, set[str]] = {}
        self.keepers: dict[str, set[str]] = {}
        self.arrived: Counter[str] = Counter()
        self.changed = ChangeSignal()

    def record(self, report: Metadata, files: HeldFiles) -> bool:
        """Apply what a heartbeat reports; returns whether anything has changed.

        Changes that do not follow the known ones are not applied: `seen` is 0 then, and the agent begins anew.
        """
        worker_id, boot_id = report.instance_id, report.agent_boot_id
        disk = self.disks.get(worker_id)
        if disk is None or (disk.agent_boot_id, disk.disk_id) != (boot_id, files.disk_id):
            known = disk or ReportedDisk(boot_id, files.disk_id)
            disk = ReportedDisk(boot_id, files.disk_id, files=known.files, answered=known.answered)
            self.disks[worker_id] = disk
        disk.answered = {name: at for name, at in disk.answered.items() if as_of(report).is_before(at)}
        if files.since not in (0, disk.seen):
            disk.seen, disk.is_whole = 0, False
            return False
        had_whole = disk.is_whole
        named = {*files.held, *files.kept}
        if files.since == 0:
            disk.unconfirmed = set(disk.files)  # what none of the changes names is gone, once all have come
        disk.unconfirmed -= named | disk.answered.keys()
        states = [(name, False) for name in files.held] + [(name, True) for name in files.kept]
        gone = [*files.gone, *(() if files.left else disk.unconfirmed)]
        told = [*states, *((name, None) for name in gone)]
        news = self._put_all(worker_id, [(name, state) for name, state in told if name not in disk.answered])
        disk.seen, disk.is_whole = files.upto, files.left == 0
        return news or disk.is_whole != had_whole

    def note(self, worker_id: str, digest: str, at: AsOf) -> None:
        """Record an answer (or report) by which a worker has the files of a digest, without waiting for a heartbeat."""
        if (disk := self.disks.get(worker_id)) is not None:
            disk.answer(at, (digest,))
            self._put_all(worker_id, [(digest, disk.files.get(digest, False))])

    def note_mark(self, worker_id: str, digests: Collection[str], mark: FileMark, at: AsOf) -> None:
        """Record an answer by which a worker has marked its files of these digests."""
        if (disk := self.disks.get(worker_id)) is not None:
            disk.answer(at, digests)
            marked = digests if mark == "kept" else [digest for digest in digests if digest in disk.files]
            self._put_all(worker_id, [(digest, mark == "kept") for digest in marked])

    def forget(self, present: Collection[str]) -> None:
        """Forget the disks of workers that are not among these."""
        for worker_id in [name for name in self.disks if name not in present]:
            self._put_all(worker_id, [(digest, None) for digest in [*self.disks[worker_id].files]])
            del self.disks[worker_id]

    def clear_seen(self) -> None:
        """Ask all agents to report anew, at the beginning of a term. What is known counts until they have."""
        for disk in self.disks.values():
            disk.seen, disk.is_whole = 0, False

    def _put_all(self, worker_id: str, states: Iterable[tuple[str, bool | None]]) -> bool:
        """Record several digests; returns whether any is news, which wakes those that wait."""
        news = sum(self._put(worker_id, digest, state) for digest, state in states) > 0
        if news:
            self.changed.notify()
        return news

    def _put(self, worker_id: str, digest: str, state: bool | None) -> bool:
        """Record that a worker keeps a digest (True), has it (False) or not (None); returns whether that is news."""
        disk = self.disks[worker_id]
        files = disk.files
        if files.get(digest) is state:
            return False
        if digest not in files and disk.is_whole and not self._is_on_shared_disk(digest, disk):
            self.arrived[digest] += 1
        if state is None:
            del files[digest]
        else:
            files[digest] = state
        _set_membership(self.holders, digest, worker_id, is_in=state is not None)
        _set_membership(self.keepers, digest, worker_id, is_in=state is True)
        return True

    def _is_on_shared_disk(self, digest: str, disk: ReportedDisk) -> bool:
        """Whether another agent has already reported these files on the same disk."""
        return any(self.disks[other].disk_id == disk.disk_id for other in self.holders.get(digest, ()))


def _set_membership(index: dict[str, set[str]], digest: str, worker_id: str, *, is_in: bool) -> None:
    """Add a worker to the set of a digest, or take it out; an empty set goes."""
    if is_in:
        index.setdefault(digest, set()).add(worker_id)
    elif (names := index.get(digest)) is not None:
        names.discard(worker_id)
        if not names:
            del index[digest]
