"""The view of an agent is that of its own order of events, in whatever order reports and answers arrive."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.reconcile.agent_view import (
    AdapterChange,
    AgentView,
    AsOf,
    first_view,
    with_changes,
    with_engine_models,
    with_report,
)
from tests.orchestrator.doubles import FakeAgent
from workers.wire import Metadata

NAMES = ("a@1", "b@1", "c@1", "a@2")
SLOTS = 4
IDLE = FakeAgent("w0", slots=SLOTS).metadata()


def lora(name: str, state: str = "ready") -> dict[str, str]:
    return {
        "lora_id": name.partition("@")[0], "digest": name, "engine_name": name, "state": state, "location": "device",
    }  # fmt: skip


def report(names: frozenset[str], number: int, boot_id: str = "a1", failed: tuple[str, ...] = ()) -> Metadata:
    loras = [*(lora(name) for name in sorted(names)), *(lora(name, "failed") for name in failed)]
    capacity = IDLE["lora"]["capacity"] | {"loaded_count": len(names), "available_slots": SLOTS - len(names)}
    changed = {"lora": IDLE["lora"] | {"loaded_loras": loras, "capacity": capacity}}
    return Metadata.model_validate(IDLE | changed | {"agent_boot_id": boot_id, "report_number": number})


def loaded(view: AgentView) -> frozenset[str]:
    """Names loaded by the view, whose slots must agree."""
    names = [lora.engine_name for lora in view.report.lora.loaded_loras if lora.state == "ready"]
    assert len(names) == len(set(names))
    capacity = view.report.lora.capacity
    assert (capacity.loaded_count, capacity.available_slots) == (len(names), SLOTS - len(names))
    return frozenset(names)


def change(at: AsOf, name: str, is_loaded: bool) -> AdapterChange:
    found = report(frozenset([name]), 1).lora.loaded_loras[0]
    return AdapterChange(at, name, found if is_loaded else None)


@dataclass(frozen=True)
class Told:
    """What the agent says: a report, or an answer with its effects."""

    report: Metadata | None
    changes: tuple[AdapterChange, ...] = ()

    def shown(self, view: AgentView) -> AgentView:
        return with_report(view, self.report) if self.report is not None else with_changes(view, self.changes)


@st.composite
def histories(draw) -> tuple[Metadata, list[Told], frozenset[str]]:
    """An agent's first report, all that it says afterwards in its order, and what it has loaded in the end.

    An answer may be stamped some time after its effect, while nothing has changed its adapters. Other adapters may
    change without an answer; then a report follows.
    """
    names: frozenset[str] = frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=2)))
    number, told = 1, []
    first = report(names, number)
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(("load", "unload", "replace", "own", "report", "report")))
        if kind == "report":
            told.append(Told(report(names, number)))
            continue
        name, number = draw(st.sampled_from(NAMES)), number + 1
        victims = frozenset(draw(st.sampled_from(sorted(names))) for _ in "1" if names and kind == "replace") - {name}
        before, names = names, names - {name} - victims | (frozenset() if kind == "unload" else {name})
        if kind == "own":
            names = before ^ {name}
            told.append(Told(report(names, number)))
            continue
        if draw(st.booleans()):
            told.append(Told(report(names, number)))  # made after the effect, before the answer
        number += draw(st.integers(0, 2))  # changes of other kinds
        at = AsOf("a1", number)
        gone = tuple(change(at, victim, is_loaded=False) for victim in sorted(victims))
        told.append(Told(None, (*gone, change(at, name, is_loaded=kind != "unload"))))
    return first, told, names


@given(histories(), st.randoms(use_true_random=False))
def test_any_order_of_arrival_ends_in_the_agents_own_state(history, rng) -> None:
    first, told, names = history
    arrived = list(told)
    rng.shuffle(arrived)
    view = first_view(first)
    for one in arrived:
        view = one.shown(view)
    assert loaded(view) == names


@given(histories(), st.randoms(use_true_random=False), st.data())
def test_what_arrives_twice_changes_nothing(history, rng, data) -> None:
    first, told, names = history
    arrived = [*told, *(data.draw(st.lists(st.sampled_from(told))) if told else [])]
    rng.shuffle(arrived)
    view = first_view(first)
    for one in arrived:
        view = one.shown(view)
    assert loaded(view) == names


@given(histories(), histories(), st.randoms(use_true_random=False))
def test_new_start_of_an_agent_owes_nothing_to_the_one_before(former, history, rng) -> None:
    first, told, names = history
    view = first_view(former[0].model_copy(update={"agent_boot_id": "a0"}))
    for one in former[1]:
        changes = tuple(AdapterChange(AsOf("a0", c.at.number + 50), c.engine_name, c.lora) for c in one.changes)
        made = one.report and one.report.model_copy(
            update={"agent_boot_id": "a0", "report_number": one.report.report_number + 50}
        )
        view = Told(made, changes).shown(view)
    arrived = [Told(first), *told]
    rng.shuffle(arrived)  # an answer of the new start may come before its first report
    for one in arrived:
        view = one.shown(view)
    assert loaded(view) == names


@given(histories())
def test_agent_without_numbers_is_believed_in_the_order_of_arrival(history) -> None:
    first, told, names = history
    view = first_view(first.model_copy(update={"report_number": 0}))
    for one in told:
        changes = tuple(AdapterChange(AsOf(), each.engine_name, each.lora) for each in one.changes)
        view = Told(one.report and one.report.model_copy(update={"report_number": 0}), changes).shown(view)
        assert one.report is None or loaded(view) == loaded(first_view(one.report))
    assert loaded(view) == names


def test_load_replaces_the_failure_of_its_adapter_and_no_other_version() -> None:
    view = first_view(report(frozenset(["a@1"]), 3, failed=("a@2", "b@1")))
    view = with_changes(view, [change(AsOf("a1", 4), "a@2", is_loaded=True)])
    states = {found.engine_name: found.state for found in view.report.lora.loaded_loras}
    assert states == {"a@1": "ready", "a@2": "ready", "b@1": "failed"}


def test_engine_that_lists_no_adapter_of_a_silent_agent_outweighs_its_answers() -> None:
    view = first_view(report(frozenset(["a@1", "b@1"]), 3))
    view = with_changes(view, [change(AsOf("a1", 5), "c@1", is_loaded=True)])
    view = with_engine_models(view, frozenset(["tiny-qwen", "b@1"]))
    assert loaded(view) == {"b@1"}
    assert loaded(with_report(view, report(frozenset(["b@1"]), 4))) == {"b@1"}  # made before the load
    assert loaded(with_report(view, report(frozenset(["b@1", "c@1"]), 6))) == {"b@1", "c@1"}
