"""Twenty interleaved sessions at two engines with few KV blocks, with and without the price of evictions.

python -m benchmarks.sessions [--engine sim|vllm] [--blocks N] [--seeds N] [--quick] [--json FILE]

The sessions' prompts need more blocks than both engines have. Each weight of the price (`eviction` in the router's
costs) gets a fleet of its own, and the same turns in the same order, four at a time. Rows: the share of prompt tokens
that the engines report as cached, and by how much the router's predicted first tokens were off.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

import aiohttp

from benchmarks.local_fleets import local_fleet
from benchmarks.report import ReportRow, add_arguments, show
from benchmarks.texts import english_words
from benchmarks.trace.measure import percentile

SESSIONS, ENGINES, AT_ONCE = 20, 2, 4
BLOCK, MOST_TOKENS, ANSWER = 32, 2048, 16
_TURNS, _FIRST_WORDS, _TURN_WORDS = (2, 10), (400, 800), (30, 110)
_MOST_WORDS = 1500
"""Words of a prompt at most: about 1.25 tokens each."""
_TIMEOUT_S, _WARMING = 300.0, 4
WEIGHTS = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One request of a session: the prompt is the one before, and more."""

    session: str
    prompt: str


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer to one turn. `predicted_s`: seconds to the first token, as the router's header predicted them."""

    prompt_tokens: int
    cached_tokens: int
    first_s: float
    predicted_s: float

    @property
    def off(self) -> float:
        """By how much the prediction was off, as a share of the measured."""
        return abs(self.predicted_s - self.first_s) / self.first_s


def turns(seed: int, sessions: int = SESSIONS) -> list[SessionTurn]:
    """The turns of all sessions in the order in which they are sent: shuffled, each session's own in their order."""
    rng, words = Random(seed), english_words()
    texts = {f"{seed}-{n}": rng.choices(words, k=rng.randint(*_FIRST_WORDS)) for n in range(sessions)}
    order = [name for name in texts for _ in range(rng.randint(*_TURNS))]
    rng.shuffle(order)
    found = []
    for name in order:
        found.append(SessionTurn(name, f"{name} {' '.join(texts[name][:_MOST_WORDS])}"))
        texts[name] += rng.choices(words, k=rng.randint(*_TURN_WORDS))
    return found


async def play(router: str, model: str, wanted: Sequence[SessionTurn]) -> list[TurnAnswer]:
    """Send the turns in their order, four at a time; a turn waits for the one before of its session."""
    line = iter(wanted)
    ends = {turn.session: asyncio.Lock() for turn in wanted}
    found: list[TurnAnswer] = []
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(router, timeout=timeout) as client, asyncio.TaskGroup() as group:

        async def sender() -> None:
            for turn in line:
                async with ends[turn.session]:
                    found.append(await _ask(client, model, turn))

        for _ in range(AT_ONCE):
            group.create_task(sender())
    return found


async def _ask(client: aiohttp.ClientSession, model: str, turn: SessionTurn) -> TurnAnswer:
    body = {
        "model": model, "prompt": turn.prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first_s, usage = time.perf_counter(), -1.0, {}
    async with client.post("/v1/completions", json=body, headers={"x-session-id": turn.session}) as answer:
        if answer.status != 200:
            raise SystemExit(f"{answer.status} {(await answer.text())[:300]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first_s = first_s if first_s >= 0 else time.perf_counter() - began
                usage = json.loads(line[6:]).get("usage") or usage
        predicted_s = float(answer.headers["x-lorafleet-first-token-s"])
    details = usage.get("prompt_tokens_details") or {}
    return TurnAnswer(usage["prompt_tokens"], details.get("cached_tokens", 0), first_s, predicted_s)


def measure(engine: str, blocks: int, seeds: Sequence[int], weight: float) -> list[list[TurnAnswer]]:
    """The answers of each seed's turns, in a fleet of its own whose router gives the price this weight."""
    flags = ("--num-gpu-blocks-override", str(blocks), "--block-size", str(BLOCK), "--max-model-len", str(MOST_TOKENS))
    costs = {"LORAFLEET_ROUTER_COSTS": json.dumps({"eviction": weight})}
    with (
        tempfile.TemporaryDirectory() as folder,
        local_fleet(Path(folder), engine, *flags, workers=ENGINES, environment=costs) as (urls, _),
    ):
        return asyncio.run(_played(urls["router"], seeds))


async def _played(router: str, seeds: Sequence[int]) -> list[list[TurnAnswer]]:
    async with aiohttp.ClientSession(router) as client, client.get("/v1/models") as answer:
        model = (await answer.json())["data"][0]["id"]
    await play(router, model, turns(0, _WARMING))  # an engine's first requests compile kernels
    return [await play(router, model, turns(seed)) for seed in seeds]


def rows(found: Sequence[Sequence[TurnAnswer]], weight: float, case: str) -> Iterator[ReportRow]:
    """The figures of one weight: means over seeds, and the errors of all predictions."""
    cached = [sum(each.cached_tokens for each in run) / sum(each.prompt_tokens for each in run) for run in found]
    of = f"eviction {weight:g}, {case}"
    yield ReportRow(f"cached prompt tokens, {of}", 100 * mean(cached), "% of all")
    for seed, share in enumerate(cached, start=1):
        yield ReportRow(f"cached prompt tokens, {of}, seed {seed}", 100 * share, "% of all")
    answers = [each for run in found for each in run]
    yield ReportRow(f"first token, mean, {of}", 1000 * mean(each.first_s for each in answers), "ms")
    off = sorted(each.off for each in answers)
    yield ReportRow(f"predicted first token off, median, {of}", 100 * percentile(off, 0.5), "% of the measured")
    yield ReportRow(f"predicted first token off, p90, {of}", 100 * percentile(off, 0.9), "% of the measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--blocks", type=int, default=300, help=f"KV blocks of {BLOCK} tokens at each engine")
    parser.add_argument("--seeds", type=int, help="how many; each draws sessions of its own")
    add_arguments(parser)
    options = parser.parse_args()
    seeds = range(1, 1 + (options.seeds or (1 if options.quick else 3)))
    case = f"{SESSIONS} sessions, {ENGINES} engines of {options.blocks} blocks, {options.engine}"
    found = [
        row for weight in WEIGHTS for row in rows(measure(options.engine, options.blocks, seeds, weight), weight, case)
    ]
    show("sessions", found, options.json)


if __name__ == "__main__":
    main()
