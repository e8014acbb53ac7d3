"""The requests of one run: a recorded or a drawn trace, its times scaled and jittered, an adapter fixed per session."""

import json
import os
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random

BLOCK = 512
"""Tokens of one block of the trace."""
TICK_S = 3.0
"""The trace's clock ticks so slowly: everything within a tick came at its beginning, and is jittered over it."""
ADAPTERS, ZIPF = 100, 0.9

VARIABLE = "LORAFLEET_TRACE"
WHERE_FROM = (
    "Mooncake's conversation trace (FAST'25, Apache-2.0): conversation_trace.jsonl in FAST25-release/traces of "
    "https://github.com/kvcache-ai/Mooncake"
)


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line of a trace: when, how long, and the ids of its 512-token blocks, the last of which may be partial."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class TraceRequest:
    """One request. `keys` are its full blocks under its adapter; `ids` all its blocks, whatever its adapter.

    What came of it is written in by the run: seconds on the run's clock, -1 where it never happened.
    """

    number: int
    arrived: float
    prompt_tokens: int
    output_tokens: int
    keys: list[int]
    ids: tuple[int, ...]
    adapter: int
    session: int
    router: int

    sent: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    cached_tokens: int = 0
    load_s: float = 0.0
    worker: int = -1
    is_shed: bool = False
    predicted_s: float = -1.0
    """From sent to its first token, as its router predicted; -1: it predicts nothing."""
    parent: int = -1
    """The session whose sub-agent sent it; -1: no sub-agent did."""
    program: int = -1
    """The program that it is a turn of; -1: it is on its own."""
    then: list[tuple["TraceRequest", float]] = field(default_factory=list)
    """Requests that come once this one and all others that name them have ended, so many seconds after the last."""
    waits_for: int = 0
    """Requests that must end before this one comes; 0: it comes at `arrived`."""
    paused_s: float = 0.0
    """Seconds of pauses before it, along the way that took longest."""


def asked_lines(file: str | None, *, is_quick: bool) -> list[TraceLine]:
    """The trace of this file or of the variable; a quick run needs none. Raises SystemExit without one."""
    file = file or os.environ.get(VARIABLE)
    if is_quick:
        return read(Path(file))[:500] if file else drawn()
    if not file:
        raise SystemExit(
            f"no trace: give --trace FILE or {VARIABLE}, or --quick for a small one that is made up.\n{WHERE_FROM}"
        )
    return read(Path(file))


def read(file: Path) -> list[TraceLine]:
    """The lines of a trace in Mooncake's format. Raises ValueError with the line that is not in it."""
    lines = []
    for number, text in enumerate(file.read_text().splitlines(), start=1):
        try:
            raw = json.loads(text)
            ids = tuple(raw["hash_ids"])
            line = TraceLine(raw["timestamp"] / 1000, raw["input_length"], max(1, raw["output_length"]), ids)
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"{file}, line {number}: {exc!r}; expected {WHERE_FROM}") from exc
        if len(ids) != -(-line.prompt_tokens // BLOCK):
            raise ValueError(
                f"{file}, line {number}: {len(ids)} ids for {line.prompt_tokens} tokens in blocks of {BLOCK}"
            )
        lines.append(line)
    return lines


def drawn(requests: int = 500, seed: int = 1) -> list[TraceLine]:
    """A small trace of the same shape: one block common to all, sessions that grow turn by turn, a tick of 3 s."""
    rng = Random(seed)
    fresh = iter(range(1, 10_000_000))
    lines: list[TraceLine] = []
    sessions: list[tuple[list[int], int]] = []
    gap_s = 0.3
    for number in range(requests):
        if sessions and rng.random() < 0.4:
            ids, tokens = sessions.pop(rng.randrange(max(0, len(sessions) - 40), len(sessions)))
            ids = ids[: tokens // BLOCK]
        else:
            ids, tokens = [0], BLOCK
        tokens += min(60_000, int(rng.lognormvariate(8.3, 1.1)) + 50)
        ids = ids + [next(fresh) for _ in range(-(-tokens // BLOCK) - len(ids))]
        output = min(2000, int(rng.lognormvariate(5.3, 1.0)) + 1)
        at_s = number * gap_s // TICK_S * TICK_S
        lines.append(TraceLine(at_s, tokens, output, tuple(ids)))
        if tokens < 60_000:
            sessions.append((ids, tokens))
    return lines


def requests_of(lines: list[TraceLine], *, seed: int, load: float, routers: int) -> list[TraceRequest]:
    """The trace at `load` times its speed, in order of arrival; `seed` draws jitter, adapters and routers."""
    rng = Random(seed)
    adapters = _adapters(lines, rng)
    times = [(line.at_s + rng.random() * TICK_S) / load for line in lines]
    order = sorted(range(len(lines)), key=times.__getitem__)
    found = []
    for number, i in enumerate(order):
        line = lines[i]
        session = session_of(line)
        adapter = adapters[session]
        full = line.ids[: line.prompt_tokens // BLOCK]
        found.append(
            TraceRequest(
                number=number,
                arrived=times[i],
                prompt_tokens=line.prompt_tokens,
                output_tokens=line.output_tokens,
                keys=[key(adapter, block) for block in full],
                ids=line.ids,
                adapter=adapter,
                session=session,
                router=rng.randrange(routers),
            )
        )
    return found


def key(adapter: int, block: int) -> int:
    """A block under an adapter: 63 bits, as spread as a hash; the product with an odd number is one to one."""
    return ((adapter << 40 | block) * 0x9E3779B97F4A7C15 + adapter) % (1 << 63)


def session_of(line: TraceLine) -> int:
    """All requests share their first block; the second tells conversations apart."""
    return line.ids[min(1, len(line.ids) - 1)]


def _adapters(lines: list[TraceLine], rng: Random) -> dict[int, int]:
    weights = list(accumulate((rank + 1) ** -ZIPF for rank in range(ADAPTERS)))
    sessions = dict.fromkeys(map(session_of, lines))
    return dict(zip(sessions, rng.choices(range(ADAPTERS), cum_weights=weights, k=len(sessions)), strict=True))
