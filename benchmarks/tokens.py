"""Cost of tokenizing new text in the router, by script and length: CPU a character, largest step, longest hold."""

import argparse
import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks import texts
from benchmarks.report import ReportRow, add_arguments, console, show
from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from router.tokenizing.tokenizers import Tokenizers

_BASE = "base"
# From 1,000 to a million characters, each 1.41 times the one before.
LENGTHS = tuple(round(1000 * 2 ** (step / 2)) for step in range(21))
_MAX_STEP = 2.0
_MAX_HOLD_MS = 5.0
SCRIPTS: Mapping[str, Callable[[int], str]] = texts.SCRIPTS | {
    "JSON without blanks": lambda chars: texts.json_lines(chars * 5 // 4).replace(" ", "")[:chars]
}
# After so many characters of a script its usual words are known.
_WARM_UP_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class SweepSize:
    """How much is measured: lengths in characters, texts of each length, and characters of each length in all."""

    lengths: Sequence[int]
    rounds: int
    chars: int

    @property
    def all_chars(self) -> int:
        """Characters that one script's measurement takes."""
        a_round = sum(length * self.texts(length) for length in self.lengths)
        return _WARM_UP_CHARS + self.rounds * a_round + sum(self.lengths)

    def texts(self, length: int) -> int:
        """Texts of this length in a round."""
        return max(1, self.chars // length)


FULL = SweepSize(LENGTHS, rounds=3, chars=60_000)
QUICK = SweepSize((1_000, 4_000, 16_000, 33_000, 66_000), rounds=2, chars=2_000)


class Cost(dict[int, float]):
    """Nanoseconds a character by length of text."""

    @property
    def largest_step(self) -> tuple[float, int]:
        """The largest ratio between neighbouring lengths, and the longer of these."""
        lengths = sorted(self)
        steps = ((self[length] / self[before], length) for before, length in pairwise(lengths))
        return max(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="a model folder; else the tiny model's tokenizer")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the sweep (.svg; needs matplotlib)")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    with TemporaryDirectory() as folder:
        files = read_files(options.tokenizer or make_model(Path(folder) / "model"))
    costs, held_us = asyncio.run(sweep(files, size))
    table = Table(title="nanoseconds of CPU a character, by length of the text in thousands of characters")
    for column in ("script", *(f"{length / 1000:.3g}" for length in size.lengths)):
        table.add_column(column, justify="right")
    for script, cost in costs.items():
        table.add_row(script, *(f"{cost[length]:.0f}" for length in size.lengths))
    console().print(table)
    rows = []
    for script, cost in costs.items():
        step, _ = cost.largest_step
        rows.append(ReportRow(f"{script}: largest step between neighbouring lengths", step, "x", _MAX_STEP))
    rows += [
        ReportRow(f"{script}: longest step on the event loop", held / 1000, "ms", _MAX_HOLD_MS)
        for script, held in held_us.items()
    ]
    show("tokens of new text: every text's ids are the library's", rows, options.json)
    if options.plot is not None:
        draw(costs, options.plot)


async def sweep(files: Mapping[str, str], size: SweepSize) -> tuple[dict[str, Cost], dict[str, float]]:
    """Cost by script, and the longest step on the event loop in microseconds of CPU; AssertionError for wrong ids.

    All CPU of the process counts, threads included. A warm-up of each script makes its usual words known.
    """
    library = Tokenizer.from_str(files["tokenizer.json"])
    costs, held = {}, {}
    async with httpx.AsyncClient() as client:
        for script, write in SCRIPTS.items():
            chat = ChatTokenizer.from_files(files)
            tokenizers = Tokenizers(client)
            tokenizers.adopt(_BASE, chat)
            new = _NewTexts(write(size.all_chars))
            await _ids(tokenizers, new.take(_WARM_UP_CHARS))
            found: dict[int, list[float]] = {length: [] for length in size.lengths}
            for _ in range(size.rounds):
                for length in size.lengths:
                    taken = [new.take(length) for _ in range(size.texts(length))]
                    began = time.process_time()
                    ids = [await _ids(tokenizers, text) for text in taken]
                    found[length].append((time.process_time() - began) / sum(map(len, taken)) * 1e9)
                    own = library.encode_batch_fast([taken[0]])[0].ids
                    assert ids[0].tolist() == own, f"{script}, {length}: other ids"
            costs[script] = Cost({length: median(times) for length, times in found.items()})
            held[script] = max(_longest_step_us(chat, new.take(length)) for length in size.lengths)
            tokenizers.close()
    return costs, held


class _NewTexts:
    """A long text, of which each part is taken once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def take(self, length: int) -> str:
        """The next so many characters."""
        self._at += length
        return self._text[self._at - length : self._at]


async def _ids(tokenizers: Tokenizers, text: str) -> "array[int]":
    tokens = await tokenizers.ids({"prompt": text}, base_model=_BASE, engine_url="")
    assert tokens.ids is not None
    return tokens.ids


def _longest_step_us(chat: ChatTokenizer, text: str) -> float:
    """CPU microseconds of the longest step that the event loop takes for this text."""
    steps = chat.encoding_steps([text], add_special_tokens=True)
    longest, result = 0.0, None
    while True:
        began = time.thread_time()
        try:
            work = next(steps) if result is None else steps.send(result)
        except StopIteration:
            return longest
        finally:
            longest = max(longest, (time.thread_time() - began) * 1e6)
        result = None if work is None else work.run()


def draw(costs: Mapping[str, Cost], into: Path) -> None:
    """Draw cost by length, one line a script. Raises ImportError without matplotlib."""
    from matplotlib import rc_context  # noqa: PLC0415  (only this function needs it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", yscale="log", xlabel="characters of a new text", ylabel="ns of CPU a character"
    )
    for script, cost in costs.items():
        axes.plot(list(cost), list(cost.values()), label=script, linewidth=1.2, marker=".", markersize=4)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize="small", ncols=2)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(into, metadata={"Date": None})


if __name__ == "__main__":
    main()
