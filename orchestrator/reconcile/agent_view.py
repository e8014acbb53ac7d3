"""The latest state of each agent, by its reports and its answers to actions, in any order of arrival. Pure.

An agent counts the changes of its state. Each report, and each answer to an action, has the count at that moment
(`AsOf`). So a report that was on its way while an action was answered does not take the answer back, and a report that
another one has overtaken does not count. A new start of the agent counts anew. An agent of an older version does not
count, and is believed in the order of arrival.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from orchestrator.model.snapshot import OCCUPYING
from workers.wire import LoraInfo, Metadata, WorkerAdapter


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
    return _view(report, newer)


def with_changes(view: AgentView, changes: Iterable[AdapterChange]) -> AgentView:
    """The view after an answer with these effects. What a newer report or answer knows already changes nothing."""
    by_name = {change.engine_name: change for change in view.changes}
    for change in changes:
        known = by_name.get(change.engine_name)
        is_known = change.at.is_covered_by(as_of(view.reported))
        if not is_known and (known is None or not change.at.is_before(known.at)):
            by_name[change.engine_name] = change
    return _view(view.reported, by_name.values())


def with_place(view: AgentView, reported: Metadata) -> AgentView:
    """The view with the same report, whose zone, node or pool is known otherwise."""
    return _view(reported, view.changes)


def with_engine_models(view: AgentView, models: frozenset[str]) -> AgentView:
    """The view of a silent agent whose engine lists these names: other adapters are gone."""
    loaded = tuple(lora for lora in view.reported.lora.loaded_loras if lora.engine_name in models)
    changes = [change if change.engine_name in models else replace(change, lora=None) for change in view.changes]
    return _view(with_loaded(view.reported, loaded), changes)


def with_loaded(report: Metadata, loaded: tuple[WorkerAdapter, ...]) -> Metadata:
    """The report with these adapters, its slots counted anew."""
    capacity = report.lora.capacity
    total = capacity.loaded_count + capacity.available_slots
    count = capacity.loaded_count + _occupied_count(loaded) - _occupied_count(report.lora.loaded_loras)
    capacity = capacity.model_copy(update={"loaded_count": count, "available_slots": max(0, total - count)})
    lora: LoraInfo = report.lora.model_copy(update={"loaded_loras": loaded, "capacity": capacity})
    return report.model_copy(update={"lora": lora})


def _view(reported: Metadata, changes: Iterable[AdapterChange]) -> AgentView:
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
