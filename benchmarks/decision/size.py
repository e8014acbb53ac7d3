"""Sizes of a run: replicas, blocks, rounds and seconds of each row, for a full and for a quick one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecisionBenchSize:
    """The amount of work that each row measures. A larger amount gives steadier figures and a longer run.

    rounds   measurements of each row
    calls    calls in each measurement
    prompts  different prompts
    blocks   blocks in the index
    events   KV events that are applied
    stream_s, stream_turns   seconds of requests with and without streamed events, and how often both are measured
    """

    rounds: int
    calls: int
    prompts: int
    blocks: int
    events: int
    stream_s: float
    stream_turns: int


FULL = DecisionBenchSize(
    rounds=15, calls=200, prompts=200, blocks=1_000_000, events=65_536, stream_s=5.0, stream_turns=5
)
QUICK = DecisionBenchSize(rounds=3, calls=20, prompts=20, blocks=50_000, events=2_048, stream_s=0.5, stream_turns=1)
