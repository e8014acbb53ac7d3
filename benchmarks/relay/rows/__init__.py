"""The rows of `benchmarks.relay`: what each measures, what it is compared with, and the goal.

A row is a function of the running contenders that adds its figures to a list. Goals that depend on the machine are
multiples of a named peer's figure in the same run. `GROUPS` has the names that `--rows` takes.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.relay.rows.costs import eventless_rows, long_rows, new_rows, short_rows
from benchmarks.relay.rows.lengths import length_rows, script_rows
from benchmarks.relay.rows.scene import RunningContenders
from benchmarks.relay.rows.states import growth_rows, idle_rows, memory_rows, queue_rows
from benchmarks.relay.rows.streams import burst_rows, chunk_rows, first_rows, latency_rows, open_rows
from benchmarks.report import ReportRow


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are measured together.

    what     in a sentence, for `--help`
    fixed_s, each_s   how long they take: altogether, and for each contender more
    """

    measure: Callable[[RunningContenders, list[ReportRow]], Awaitable[None]]
    what: str
    fixed_s: float
    each_s: float

    def about_s(self, contenders: int) -> float:
        return self.fixed_s + self.each_s * contenders


GROUPS = {
    "short": RowGroup(short_rows, "a chat of 1 KB; all of it new; and the relay alone", 60, 9),
    "long": RowGroup(long_rows, "32 KB that were seen before, and a new question", 20, 9),
    "new": RowGroup(new_rows, "32 KB never seen: tokenization, the request, the event loop beside it", 45, 0),
    "lengths": RowGroup(length_rows, "prompts of 32, 33, 100 and 400 KB, new and seen before", 250, 30),
    "scripts": RowGroup(script_rows, "new prompts in English, code, JSON, German, Chinese, with emoji", 220, 0),
    "eventless": RowGroup(eventless_rows, "30 and 300 KB seen before, at engines without KV events", 60, 8),
    "queue": RowGroup(queue_rows, "64 requests of which most wait for room", 65, 2),
    "chunk": RowGroup(chunk_rows, "a streamed chunk: in bursts, and paced", 15, 50),
    "latency": RowGroup(latency_rows, "one request at a time, beyond the engine's own answer", 5, 5),
    "first": RowGroup(first_rows, "first chunk of 64 streams begun at once, kept connections", 5, 15),
    "burst": RowGroup(burst_rows, "first chunk of 64 streams begun at once, new connections", 5, 13),
    "open": RowGroup(open_rows, "2,000 open streams: whole, memory, share of the core", 5, 7),
    "idle": RowGroup(idle_rows, "with nothing to do, in front of 64 replicas", 65, 1),
    "memory": RowGroup(memory_rows, "resident: idle, loaded, after large prompts", 85, 4),
    "growth": RowGroup(growth_rows, "the short chat again: 64 replicas, 10,000 adapters", 110, 0),
}
