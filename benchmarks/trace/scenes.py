"""The scenes: the recorded trace under other loads and on other fleets, a crowd, texts, and programs of agents."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import pi, sin
from random import Random

from benchmarks.trace.engine import RANK_SHARES, Hardware
from benchmarks.trace.fleet import Setting
from benchmarks.trace.workload import BLOCK, TraceLine, TraceRequest, key, requests_of

# A request of a program takes about so long: only to tell which programs are live at once.
NOMINAL_S = 2.5
PROGRAMS, PROGRAMS_S = 200, 600.0
FIRST_TURNS, LAST_TURNS = 10, 43
DAY_S, SWING = 1800.0, 0.85
GREEDY, GREEDY_AT_S = 300, 120.0
TEXTS, TEXTS_S, PANEL = 300, 900.0, 10
CROWD, CROWD_AT_S, CROWD_S, CROWD_BLOCKS, CROWD_ADAPTER = 800, 600.0, 20.0, 16, 50

Run = tuple[list[TraceRequest], Setting]


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests and a fleet, drawn by a seed. `about` says them in words."""

    about: str
    draw: Callable[[Sequence[TraceLine], int], Run]


class _Drawing:
    """Ids and numbers of one seed's programs."""

    def __init__(self, seed: int, pauses: float = 1.0) -> None:
        self.rng = Random(seed)
        self.pauses = pauses
        self.blocks = count(1)
        self.numbers = count()
        self.sessions = count()

    def chain(
        self, turns: int, *, program: int, adapter: int, start: Sequence[int], parent: int = -1
    ) -> list[TraceRequest]:
        """The turns of one agent, each after the one before: its prompt, its answer and what its tool said."""
        rng, session = self.rng, next(self.sessions)
        ids, tokens, answered = list(start), len(start) * BLOCK, 0
        found: list[TraceRequest] = []
        for turn in range(turns):
            tokens += answered + min(20_000, int(rng.lognormvariate(7.3, 1.0)) + 50)
            ids += [next(self.blocks) for _ in range(-(-tokens // BLOCK) - len(ids))]
            answered = min(2000, int(rng.lognormvariate(4.4, 1.1)) + 1)
            keys = [key(adapter, block) for block in ids[: tokens // BLOCK]]
            request = TraceRequest(
                next(self.numbers), 0.0, tokens, answered, keys, tuple(ids), adapter, session, 0,
                parent=parent, program=program, waits_for=min(turn, 1),
            )  # fmt: skip
            if found:
                found[-1].then.append((request, self.pause_s()))
            found.append(request)
        return found

    def pause_s(self) -> float:
        """While a tool runs: half of them below 4 s, one in twenty above half a minute, none above ten minutes.

        All of this times `pauses`.
        """
        return self.pauses * min(600.0, self.rng.lognormvariate(1.4, 1.3))


def programs(seed: int, *, adapters: int, programs: int = PROGRAMS, pauses: float = 1.0) -> list[TraceRequest]:
    """Programs of 10 to 43 turns over ten minutes; half of them send out one to three sub-agents at some turn.

    pauses  times the usual ones
    """
    drawing = _Drawing(seed, pauses)
    rng = drawing.rng
    # What every agent and every sub-agent of an adapter begins with.
    systems = [[next(drawing.blocks) for _ in range(12)] for _ in range(adapters)]
    tasks = [[next(drawing.blocks) for _ in range(8)] for _ in range(adapters)]
    found: list[TraceRequest] = []
    for program in range(programs):
        adapter = rng.randrange(adapters)
        turns = drawing.chain(
            rng.randint(FIRST_TURNS, LAST_TURNS), program=program, adapter=adapter, start=systems[adapter]
        )
        turns[0].arrived = rng.random() * PROGRAMS_S * programs / PROGRAMS
        found += turns
        if rng.random() < 0.5:
            at = rng.randrange(1, len(turns) - 1)
            ((later, pause_s),) = turns[at].then
            turns[at].then.clear()
            later.waits_for = rng.randint(1, 3)
            for _ in range(later.waits_for):
                sub_turns = drawing.chain(
                    rng.randint(3, 8), program=program, adapter=adapter, start=tasks[adapter], parent=turns[0].session
                )
                sub_turns[0].waits_for = 1
                turns[at].then.append((sub_turns[0], 0.1))
                sub_turns[-1].then.append((later, pause_s))
                found += sub_turns
    return found


def greedy(seed: int) -> list[TraceRequest]:
    """A hundred programs over five minutes, and one of the same adapter that sends out 300 sub-agents at once."""
    found = programs(seed, adapters=1, programs=PROGRAMS // 2)
    drawing = _Drawing(-seed)
    drawing.blocks = count(1 + max(block for request in found for block in request.ids))
    drawing.numbers = count(len(found))
    drawing.sessions = count(1 + max(request.session for request in found))
    parent = next(drawing.sessions)
    task = [next(drawing.blocks) for _ in range(8)]
    for _ in range(GREEDY):
        turns = drawing.chain(drawing.rng.randint(3, 8), program=PROGRAMS // 2, adapter=0, start=task, parent=parent)
        turns[0].arrived = GREEDY_AT_S + drawing.rng.random()
        found += turns
    return found


def panels(seed: int, *, texts: int = TEXTS) -> list[TraceRequest]:
    """Long texts over fifteen minutes, each asked about by ten adapters at once, in one to four turns.

    Blocks of a text are cached for one adapter, and are of no use to the others.
    """
    drawing = _Drawing(seed)
    rng = drawing.rng
    found: list[TraceRequest] = []
    for text in range(texts):
        blocks = [next(drawing.blocks) for _ in range(min(64, int(rng.lognormvariate(2.7, 0.6)) + 1))]
        at_s = rng.random() * TEXTS_S * texts / TEXTS
        for adapter in range(PANEL):
            turns = drawing.chain(rng.randint(1, 4), program=text, adapter=adapter, start=blocks)
            turns[0].arrived = at_s + rng.random()
            found += turns
    return found


def diurnal(lines: Sequence[TraceLine], seed: int) -> list[TraceRequest]:
    """The trace with days of half an hour: from 0.15 of its speed at night to 1.85 at noon."""
    found = requests_of(list(lines), seed=seed, load=1.0, routers=1)
    for request in found:
        request.arrived = diurnal_s(request.arrived)
    return found


def diurnal_s(even_s: float) -> float:
    """When as many requests have come as would have by `even_s` at an even speed.

    The solution of t - SWING * DAY_S / 2 pi * sin(2 pi t / DAY_S) = even_s, whose derivative is the speed.
    """
    angle = even = 2 * pi * even_s / DAY_S
    for _ in range(100):  # each one leaves at most `SWING` of the error
        angle = even + SWING * sin(angle)
    return angle * DAY_S / (2 * pi)


def live_blocks(requests: Sequence[TraceRequest]) -> int:
    """The most blocks that agents between their first and their last turn need at one moment.

    By a clock on which each request takes `NOMINAL_S`; what agents have in common counts for each of them.
    """
    due = sorted((request.arrived, request.number, request) for request in requests if not request.waits_for)
    waits = {request.number: request.waits_for for request in requests}
    held: dict[int, int] = {}
    live = most = 0
    while due:
        now, _, request = due.pop(0)
        live += len(request.ids) - held.get(request.session, 0)
        held[request.session] = len(request.ids)
        most = max(most, live)
        for later, pause_s in request.then:
            waits[later.number] -= 1
            if not waits[later.number]:
                insort(due, (now + NOMINAL_S + pause_s, later.number, later))
        if not request.then or (request.parent >= 0 and all(later.parent < 0 for later, _ in request.then)):
            live -= held.pop(request.session)
    return most


def crowd(lines: Sequence[TraceLine], seed: int) -> list[TraceRequest]:
    """The trace's first twenty minutes, and 800 requests within 20 s for one adapter over one text of 8,192 tokens."""
    calm = requests_of([line for line in lines if line.at_s < 1200], seed=seed, load=1.0, routers=1)
    rng = Random(seed)
    shared = tuple(-n - 1 for n in range(CROWD_BLOCKS))
    first = max(block for line in lines for block in line.ids) + 1
    keys = [key(CROWD_ADAPTER, first + n) for n in range(CROWD_BLOCKS)]
    for n in range(CROWD):
        prompt, answer = CROWD_BLOCKS * BLOCK + rng.randrange(100, BLOCK), int(rng.lognormvariate(5.0, 0.5)) + 1
        at_s = CROWD_AT_S + rng.random() * CROWD_S
        calm.append(TraceRequest(0, at_s, prompt, answer, list(keys), (*shared, -n - 100), CROWD_ADAPTER, -n - 1, 0))
    calm.sort(key=lambda request: request.arrived)
    for number, request in enumerate(calm):
        request.number = number
    return calm


def _agents(adapters: int, share: float, pauses: float = 1.0) -> Scene:
    def draw(_lines: Sequence[TraceLine], seed: int) -> Run:
        usual = programs(seed, adapters=adapters)
        blocks = int(live_blocks(usual) * share / len(Setting().speeds))
        requests = usual if pauses == 1 else programs(seed, adapters=adapters, pauses=pauses)
        return requests, Setting(hardware=Hardware(blocks=blocks))

    among = "one adapter" if adapters == 1 else f"{adapters} adapters"
    paused = "" if pauses == 1 else f", pauses {pauses:g} times as long"
    return Scene(f"200 programs of agents, {among}, caches of {share:g} times what is live{paused}", draw)


def _trace(about: str, setting: Setting, load: float = 1.0) -> Scene:
    def draw(lines: Sequence[TraceLine], seed: int) -> Run:
        return requests_of(list(lines), seed=seed, load=load, routers=setting.routers), setting

    return Scene(about, draw)


_H100 = Setting(hardware=Hardware(blocks=2000))
# Rank 64 is 336 MB; the others in proportion.
_RANKS = replace(
    _H100, hardware=replace(_H100.hardware, ranks=tuple(RANK_SHARES), sizes=tuple(rank / 64 for rank in RANK_SHARES))
)
# 20 MB and 2 GB where 336 MB are the measure.
_MIXED = replace(_H100, hardware=replace(_H100.hardware, sizes=(20 / 336, 2048 / 336)))

SCENES: dict[str, Scene] = {
    "conversation": _trace("the trace as recorded", _H100),
    "light": _trace("the trace at 0.3 of its speed", _H100, 0.3),
    "heavy": _trace("the trace at twice its speed", _H100, 2.0),
    "four routers": _trace("four routers that share nothing", replace(_H100, routers=4)),
    "speeds": _trace("engines of speeds 1, 1, 2 and 4", replace(_H100, speeds=(1.0, 1.0, 2.0, 4.0))),
    "slow engine": _trace("one of eight engines is four times slower from minute 10", replace(_H100, slows_at_s=600.0)),
    "failing engine": _trace(
        "the trace at 1.5 of its speed; one of eight engines dies at minute 10 and is back at minute 13",
        replace(_H100, gone_s=(600.0, 780.0)),
        1.5,
    ),
    "diurnal": Scene("days of half an hour, speeds 0.15 to 1.85", lambda lines, seed: (diurnal(lines, seed), _H100)),
    "mixed adapters": _trace("adapters of 20 MB and 2 GB in turn", _MIXED),
    "mixed ranks": _trace("adapters of rank 8 to 128, which lengthen steps", _RANKS),
    "ten adapters": Scene("300 texts, ten adapters each", lambda _, seed: (panels(seed), _H100)),
    "flash crowd": Scene("800 requests in 20 s for one adapter", lambda lines, seed: (crowd(lines, seed), _H100)),
    "agents 0.5": _agents(1, 0.5),
    "agents 1": _agents(1, 1.0),
    "agents 2": _agents(1, 2.0),
    "agents 8 adapters": _agents(8, 1.0),
    "agents greedy": Scene(
        "100 programs of agents, and one that sends out 300 sub-agents at once", lambda _, seed: (greedy(seed), _H100)
    ),
    "agents pauses 0.25": _agents(1, 1.0, 0.25),
    "agents pauses 4": _agents(1, 1.0, 4.0),
}
PAUSES = {"agents pauses 0.25": 0.25, "agents 1": 1.0, "agents pauses 4": 4.0}
"""The scenes that differ in their pauses alone, and by how much."""
