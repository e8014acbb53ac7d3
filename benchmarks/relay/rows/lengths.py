"""Long prompts and other scripts: whether the cost grows with the text, or jumps."""

import json
import time
from statistics import median

from tokenizers import Tokenizer

from benchmarks.relay.bench import RelayBench
from benchmarks.relay.contenders import EXACT, SGLANG, warnings_logged
from benchmarks.relay.fleet import Spec
from benchmarks.relay.prompts import ChatKind, of_length, of_script
from benchmarks.relay.rows.costs import health_s
from benchmarks.relay.rows.scene import RunningContenders, compared, of_ours
from benchmarks.report import ReportRow
from benchmarks.texts import SCRIPTS

# Prompts under way at once.
_CONNECTIONS = 4
_SCRIPT_CHARS = 30_000
# Of the library's time. Where the text is ASCII, or nearly, the word table makes most ids.
_SCRIPT_GOALS = {"English": 0.4, "English, one curly quote": 0.5, "code": 0.6, "JSON": 0.9, "English with emoji": 0.8}
_OTHER_SCRIPTS_GOAL = 1.25


async def length_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """New and seen prompts of growing length; what a kilobyte costs, and how long the loop is held."""
    bench, lengths = scene.bench, scene.bench.size.lengths_kb
    with bench.fleet(Spec(2, lengths_kb=lengths)) as stage, bench.ours(stage) as ours:
        for is_new in (False, True):
            by_name: dict[str, dict[int, float]] = {}
            for kilobytes in lengths:
                ask = of_length(kilobytes, is_new=is_new)
                found = scene.medians(await bench.costs([*ours, *scene.peers_by_cache], ask, _CONNECTIONS))
                for name, value in found.items():
                    by_name.setdefault(name, {})[kilobytes] = value
                what = f"{kilobytes} KB prompt, English, {'new' if is_new else 'seen before'}"
                rows += compared(what, found, "us", beside=SGLANG, goal=None if is_new else 2.0)
            for name in [one.name for one in ours]:
                rows += _per_kilobyte(by_name[name], name, is_new=is_new)
        longest = of_length(lengths[-1], is_new=True)
        lags = {one.name: await health_s(bench, one, longest) * 1e3 for one in [*ours, *scene.peers_by_cache]}
        rows += compared(
            f"event-loop lag, p99: /health beside new prompts of {lengths[-1]} KB", lags, "ms", beside=SGLANG, goal=2.0
        )
        for one in ours:
            logged = warnings_logged(stage, one.name)
            is_held = one.name == EXACT
            rows.append(
                ReportRow(
                    "log lines above info, all lengths",
                    logged,
                    "lines",
                    3 if is_held else None,
                    contender="" if is_held else one.name,
                )
            )


def _per_kilobyte(costs_us: dict[int, float], name: str, *, is_new: bool) -> list[ReportRow]:
    """Rows of the CPU per kilobyte of prompt at each length, as a multiple of that at the shortest length."""
    shortest, *longer = costs_us
    beside = f"{shortest} KB, us", costs_us[shortest] / shortest
    kind = "new" if is_new else "seen before"
    return [
        of_ours(f"a kilobyte of {kilobytes} KB, {kind}", name, costs_us[kilobytes] / kilobytes, "us", beside, 2.0)
        for kilobytes in longer
    ]


async def script_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """The same length in each script, beside what the tokenizers library takes for that text."""
    bench = scene.bench
    # Routers of their own: what these prompts leave behind would be in the memory that later rows measure.
    with bench.ours(scene.stage) as ours:
        for script in SCRIPTS:
            ask = of_script(script, _SCRIPT_CHARS)
            alone_us = _library_us(bench, ask)
            found = scene.medians(await bench.costs(ours, ask, _CONNECTIONS))
            for name, value in found.items():
                what = f"{_SCRIPT_CHARS:,} new characters, {script}"
                goal = _SCRIPT_GOALS.get(script, _OTHER_SCRIPTS_GOAL)
                rows.append(of_ours(what, name, value, "us", ("encode_batch_fast alone, us", alone_us), goal))


def _library_us(bench: RelayBench, ask: ChatKind) -> float:
    """CPU microseconds of encode_batch_fast of one whole prompt of this kind."""
    whole = Tokenizer.from_file(str(bench.model_dir / "tokenizer.json"))
    times = []
    for number in range(bench.size.rounds * 4):
        text, special = bench.tokenizer.prompt_text(json.loads(ask.numbered("m", 10**9 + number)))
        began = time.process_time()
        whole.encode_batch_fast([text], add_special_tokens=special)
        times.append(time.process_time() - began)
    return median(times) * 1e6
