"""The promises of docs/guarantees.md, each with the check that holds a run to it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.answers import UNKNOWN
from tests.simulation.clients import MOST_WAIT_S, OWN_TOKENS
from tests.simulation.history import History, Operation, Outcome, Register
from tests.simulation.scenario import FaultScenario

if TYPE_CHECKING:
    from tests.simulation.world import FleetWorld

_LONGEST_ASK_S = 700.0


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that did not hold, and how that showed."""

    guarantee: str
    how: str


CutOff = Mapping[int, Sequence[tuple[float, float]]]
"""Router -> times for which it was cut off from the orchestrators, or stood still."""


def check_run(history: History, scenario: FaultScenario, cut_off: CutOff) -> list[Broken]:
    """What the history of a whole run breaks."""
    return [
        *_names(history, scenario, cut_off),
        *_known_bytes(history),
        *_ends(history),
        *_caches(history),
        *_holds(history, cut_off),
        *_rollouts(history, scenario, cut_off),
        *_tenants(history, scenario),
        *_errors(history, scenario),
    ]


def _names(history: History, scenario: FaultScenario, cut_off: CutOff) -> Iterator[Broken]:
    """Each name is a register at each router: an answer has the bytes that it has there at some moment of the request.

    A change reaches the routers one by one, all before it is answered; so at the last question they agree. Answers of a
    router that is cut off do not count: a change waits for such a router only so long.
    """
    for name in filter(None, history.names):
        if name in scenario.fleet.rolling:
            continue
        counted = [each for each in history.of(name) if not _is_cut_off(each, cut_off)]
        if scenario.fleet.has_api_server:
            counted += _taken_back(counted)
        for router in range(scenario.fleet.routers):
            register = Register.of(
                [
                    each
                    for each in counted
                    if each.kind != "ask" or each.is_final or each.detail.get("router", router) == router
                ]
            )
            if register.explanation() is None:
                lines = "\n  ".join(map(str, register.operations))
                yield Broken(
                    "names", f"no order of these operations on {name} explains router{router}'s answers:\n  {lines}"
                )
                break


def _taken_back(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Writes that stand for the end of changes that an API server never took: any value before may be back.

    With ConfigMaps a change is in force before the server has taken it, and is answered after that.
    """
    writes = [each for each in operations if each.kind != "ask" and each.outcome is not Outcome.REFUSED]
    for lost in (each for each in writes if each.outcome is Outcome.UNKNOWN):
        for value in {None, *(each.value for each in writes if each.invoked_at < lost.returned_at)}:
            yield Operation("write", lost.name, lost.invoked_at, lost.client, value, detail={"taken": "back"})


def _is_cut_off(operation: Operation, cut_off: CutOff) -> bool:
    """Whether a request went to a router while that was cut off."""
    times = cut_off.get(operation.detail.get("router", -1), ()) if operation.kind == "ask" else ()
    return any(operation.invoked_at < until and operation.returned_at > since for since, until in times)


def _known_bytes(history: History) -> Iterator[Broken]:
    """No answer is of the base model, or of bytes that nobody wrote."""
    for each in history.operations:
        if each.kind == "ask" and each.value is not None and each.value < 0:
            whose = "no known bytes" if each.value == UNKNOWN else "the base model"
            yield Broken("never the base model", f"an answer of {whose}: {each}")


def _ends(history: History) -> Iterator[Broken]:
    """Every request ends, in an answer or an error."""
    for each in history.operations:
        if not each.has_returned or (each.kind == "ask" and each.returned_at - each.invoked_at > _LONGEST_ASK_S):
            yield Broken("never silence", f"not ended within {_LONGEST_ASK_S:g} s (of {MOST_WAIT_S:g}): {each}")


def _caches(history: History) -> Iterator[Broken]:
    """A request gets cached tokens of those bytes alone that serve it, of its own salt, and of its own tenant.

    A request whose router was killed has no known bytes: an engine may have served it by any of its name's.
    """
    asked: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for each in history.operations:
        if each.kind == "ask" and "prompt" in each.detail:
            asked[each.detail["salt"], each.detail.get("tenant", "")].append(each)
    for same in asked.values():
        for each in filter(_is_served, same):
            prompt, cached = each.detail["prompt"], each.detail["cached"]
            others = (
                other.detail["prompt"]
                for other in same
                if other is not each and (other.value == each.value if _is_served(other) else other.name == each.name)
            )
            longest = max((_common(prompt, other) for other in others), default=0)
            # More than the shared beginning is a prompt's own: the router has sent it a second time.
            if longest < cached <= len(prompt) - OWN_TOKENS:
                yield Broken(
                    "caches", f"{cached} cached tokens, {longest} were asked of these bytes in this cache: {each}"
                )


def _is_served(operation: Operation) -> bool:
    """Whether it is known which bytes have served a request, or that none has."""
    return operation.outcome is not Outcome.UNKNOWN


def _holds(history: History, cut_off: CutOff) -> Iterator[Broken]:
    """No request that comes while a hold is in force is answered before its end."""
    holds = [each for each in history.operations if each.kind == "hold" and each.outcome is Outcome.OK]
    for each in history.operations:
        if each.kind != "ask" or each.outcome is not Outcome.OK or _is_cut_off(each, cut_off):
            continue
        for hold in holds:
            if each.invoked_at > hold.returned_at and each.returned_at < hold.detail["until"]:
                yield Broken("holds", f"answered while {hold}: {each}")


def _rollouts(history: History, scenario: FaultScenario, cut_off: CutOff) -> Iterator[Broken]:
    """Between rollouts an alias answers by the bytes at which it points; during one by those before or after."""
    for name in scenario.fleet.rolling:
        moves = [each for each in history.of(name) if each.kind == "rollout"]
        for move in moves:
            before = move.detail["before"]
            if move.detail.get("is_aborted") and move.detail.get("after", before) != before:
                yield Broken("rollouts", f"an abort was answered and has not led back: {move}")
        for each in history.of(name):
            if each.kind != "ask" or each.value is None or _is_cut_off(each, cut_off):
                continue
            ended = [move for move in moves if move.returned_at < each.invoked_at]
            under_way = [move for move in moves if move not in ended and move.invoked_at < each.returned_at]
            allowed = {value for move in under_way for value in (move.detail["before"], move.value)}
            allowed |= {ended[-1].detail["after"]} if ended else {0}
            if each.value not in allowed:
                yield Broken("rollouts", f"only {sorted(allowed)} may answer: {each}")


def _tenants(history: History, scenario: FaultScenario) -> Iterator[Broken]:
    """No tenant gets an answer of an adapter that is another's alone."""
    for each in history.operations:
        owner, tenant = scenario.fleet.owners.get(each.name), each.detail.get("tenant", "")
        if each.kind == "ask" and owner and tenant not in {"", owner} and each.value is not None:
            yield Broken("tenants", f"an adapter of {owner} alone answered: {each}")


def _errors(history: History, scenario: FaultScenario) -> Iterator[Broken]:
    """No request fails where nothing does, or where one process is killed.

    But those inside a killed router, and streamed answers that had begun: nobody can take their first tokens back.
    """
    faults = scenario.faults
    killed = faults[0].about["node"] if len(faults) == 1 and faults[0].kind == "kill" else ""
    if faults and (not killed or killed.startswith("router") or scenario.fleet.workers < 2):
        return
    for each in history.operations:
        is_failed = each.kind == "ask" and each.outcome is Outcome.UNKNOWN and each.has_returned
        if is_failed and not (killed and each.detail.get("is_broken_stream")):
            yield Broken("no request is lost", str(each))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that both prompts begin with."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def check_leaders(world: "FleetWorld") -> list[Broken]:
    """At every moment at most one orchestrator leads."""
    leading = [
        name
        for name, service in world.services.orchestrators.items()
        if world.nodes[name].is_alive and service.leadership.is_leading
    ]
    now = world.loop.time()
    return [Broken("one leader", f"at {now:.3f} {' and '.join(leading)} lead")] if len(leading) > 1 else []
