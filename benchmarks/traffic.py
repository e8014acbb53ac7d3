"""What past traffic costs the orchestrator: CPU of a router's report and of its slices, and bytes on disk.

1,000 adapters by Zipf's law on 100 workers, as many as each one's share of the load asks for; 10 tenants.
"""

import asyncio
import random
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.report import ReportRow, arguments, show
from lorafleet.telemetry.histogram import bucket_of
from orchestrator.core.traffic import GRAINS, SHARE_GRAINS
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts
from orchestrator.traffic.book import TrafficBook
from orchestrator.traffic.file import TrafficFile

ADAPTERS, WORKERS, TENANTS = 1000, 100, 10
REQUESTS_PER_S = 200
BATCH_S = 5
_MOST_BYTES = 2**40


def main() -> None:
    args = arguments(__doc__ or "")
    minutes = 11 if args.quick else 21
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(_rows(Path(folder) / "traffic.db", minutes))
    show(f"past traffic, {ADAPTERS:,} adapters x {WORKERS} workers, {REQUESTS_PER_S} requests/s", rows, args.json)


async def _rows(path: Path, minutes: int) -> list[ReportRow]:
    """Reports of so many minutes, and what they took."""
    now = 1_800_000_000.0
    book = TrafficBook(TrafficFile(path, most_bytes=_MOST_BYTES), readings=list, wall=lambda: now)
    rng, reports_s, writes_s, sizes = random.Random(7), [], [], []
    for number in range(minutes * 60 // BATCH_S):
        batch = CountBatch(number=number + 1, rows=tuple(_traffic(rng)))
        sizes.append(len(batch.rows))
        began = time.process_time()
        book.add_batches([batch])
        reports_s.append(time.process_time() - began)
        now += BATCH_S
        began = time.process_time()
        await book.write_closed()
        writes_s.append(time.process_time() - began)
    book.close()
    rows = [
        ReportRow(f"a report of {median(sizes):.0f} rows, CPU", median(reports_s) * 1e6, "µs"),
        ReportRow("a row of it, CPU", median(reports_s) / median(sizes) * 1e6, "µs"),
        ReportRow("writing slices, CPU of each report", sum(writes_s) / len(writes_s) * 1e6, "µs"),
    ]
    with sqlite3.connect(path) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows += [ReportRow(f"two days of {table} on disk", _two_days(db, table) / 1e6, "MB") for table in tables]
    return rows


def _two_days(db: sqlite3.Connection, table: str) -> float:
    """Bytes of a table's rows when every grain has all slices that it keeps, under the same load."""
    whole = 0.0
    for grain in SHARE_GRAINS if table == "shares" else GRAINS:
        # The last slice of a grain is not whole.
        query = f"SELECT at, sum(length(body) + length(name) + 24) FROM {table} WHERE step = ? GROUP BY at ORDER BY at"
        slices = [size for _, size in db.execute(query, (grain.step_s,))][:-1]
        whole += median(slices) * grain.kept_s / grain.step_s if slices else 0.0
    return whole


def _traffic(rng: random.Random) -> Iterator[CountedRow]:
    """The rows of one batch."""
    counts: dict[tuple[int, int], int] = {}
    weights = [1 / (number + 1) for number in range(ADAPTERS)]
    for adapter in rng.choices(range(ADAPTERS), weights, k=REQUESTS_PER_S * BATCH_S):
        copies = max(1, round(WORKERS * weights[adapter] / sum(weights[:10])))
        key = adapter, (adapter * 37 + rng.randrange(copies)) % WORKERS
        counts[key] = counts.get(key, 0) + 1
    for (adapter, worker), requests in counts.items():
        first_tokens = [bucket_of(rng.lognormvariate(-2, 0.6)) for _ in range(requests)]
        counted = RequestCounts(
            requests=requests,
            sent=requests,
            prompt_tokens=900 * requests,
            output_tokens=200 * requests,
            predicted_tokens=500 * requests,
            cached_tokens=480 * requests,
            compared_tokens=900 * requests,
            waited_s=0.01 * requests,
            first_token={bucket: first_tokens.count(bucket) for bucket in set(first_tokens)},
            whole={bucket + 12: first_tokens.count(bucket) for bucket in set(first_tokens)},
        )
        yield CountedRow(
            adapter=f"team-{adapter % 40}/adapter-{adapter:04}",
            base_model="qwen",
            worker=f"fleet-workers-h100-{worker}",
            tenant=f"team-{adapter % TENANTS}",
            key=f"{adapter % TENANTS:012}",
            counts=counted,
        )


if __name__ == "__main__":
    main()
