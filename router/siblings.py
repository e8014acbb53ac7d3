"""One answer for all processes of a router: whoever is asked asks the others, over unix sockets in their shared folder.

Nothing is shared between requests: a counter stays a plain Python object. (prometheus_client's own multiprocess mode
keeps every sample in a mapped file: 0.76 us an `inc` against 0.27, 1.8 an `observe` against 0.66, and a gone worker's
series could never be removed.)
"""

import asyncio
import contextlib
import fcntl
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import structlog
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

log = structlog.get_logger()

# Gauges that every process has of the same thing: the largest is shown. All other gauges, counters and histograms
# are sums. `router/metrics.py` has them all; a test holds the two lists of gauges together.
LARGEST = frozenset(
    f"lorafleet_router_{name}"
    for name in (
        "catalog_age_seconds",
        "catalog_revision",
        "kv_blocks",
        "kv_degraded",
        "kv_error_share",
        "kv_feeds",
        "kv_lag_seconds",
        "replica_decode_tokens_per_second",
        "replica_prefill_tokens_per_second",
        "replicas",
    )
)
SUMMED = frozenset(
    f"lorafleet_router_{name}"
    for name in (
        "held_requests",
        "in_flight_requests",
        "kv_bytes",
        "kv_sockets_waiting",
        "token_cache_bytes",
        "waiting_requests",
    )
)
_ONLY_GROW = frozenset({"counter", "histogram", "summary"})
_CREATED = "_created"
_METRICS = "metrics"
# The others' loops also serve; one that does not answer in time is left out. Prometheus itself gives up after 10 s.
_ANSWER_WITHIN_S = 2.0
# Before each answer: one that breaks off in the middle is none.
_LENGTH_BYTES = 8
_LOCK_TRIES = 50
_LOCK_PAUSE_S = 0.01

Answer = Callable[[bytes], Awaitable[bytes]]


class _Row(msgspec.Struct, array_like=True, frozen=True):
    """One sample: its family, its own name, its labels, its value."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    @property
    def key(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        return self.family, self.name, self.labels


class _Said(msgspec.Struct, array_like=True, frozen=True):
    """What one process shows now, and which of it only grows; `boot` tells it from the one that had its slot before."""

    slot: int
    boot: str
    rows: tuple[_Row, ...]
    growing: tuple[_Row, ...]


class _Shown(msgspec.Struct, array_like=True, frozen=True):
    """What was last shown of the counts of the process in a slot."""

    boot: str
    growing: tuple[_Row, ...]


class _Seen(msgspec.Struct):
    """What Prometheus has seen: by slot, and of all processes that are gone."""

    shown: dict[int, _Shown] = msgspec.field(default_factory=dict)
    departed: tuple[_Row, ...] = ()


_decode_said = msgspec.msgpack.Decoder(_Said).decode
_decode_seen = msgspec.msgpack.Decoder(_Seen).decode
_decode_question = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_encode = msgspec.msgpack.encode


class Siblings:
    """This process's way to the others of the same parent, and theirs to it."""

    def __init__(
        self,
        folder: Path,
        slot: int,
        *,
        families: Callable[[], Iterable[Metric]],
        answers: Mapping[str, Answer] = MappingProxyType({}),
    ) -> None:
        """`families` is this process's metrics as they are now; `answers` is what else it can be asked, by name."""
        self._folder = folder
        self._slot = slot
        self._boot = uuid.uuid4().hex
        self._families = families
        self._answers: dict[str, Answer] = {**answers, _METRICS: self._told_metrics}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answer the others until `close`."""
        path = self._folder / f"{self._slot}.sock"
        path.unlink(missing_ok=True)  # of the process that had this slot before
        self._server = await asyncio.start_unix_server(self._serve, path=path)

    async def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def ask(self, name: str, question: bytes = b"", *, within_s: float = _ANSWER_WITHIN_S) -> list[bytes]:
        """What each of the others answers; without those that are gone, or do not answer in time."""
        paths = [path for path in self._folder.glob("*.sock") if path.stem != str(self._slot)]
        found = await asyncio.gather(*(_asked(path, name, question, within_s) for path in paths))
        return [answer for answer in found if answer]

    async def metrics(self) -> bytes:
        """Prometheus' text over all processes. Counts never fall: a process that went leaves what it last showed."""
        own = list(self._families())
        said = [self._said(own), *map(_decode_said, await self.ask(_METRICS))]
        lost = await self._lost(said)
        rows = [*itertools.chain.from_iterable(one.rows for one in said), *lost]
        return generate_latest(_Merged(own, rows, processes=len(said)))

    def _said(self, families: Iterable[Metric]) -> _Said:
        rows: list[_Row] = []
        growing: list[_Row] = []
        for family in families:
            for sample in family.samples:
                row = _Row(family.name, sample.name, tuple(sample.labels.items()), sample.value)
                rows.append(row)
                if family.type in _ONLY_GROW and not sample.name.endswith(_CREATED):
                    growing.append(row)
        return _Said(self._slot, self._boot, tuple(rows), tuple(growing))

    async def _told_metrics(self, _question: bytes) -> bytes:
        return _encode(self._said(self._families()))

    async def _lost(self, said: Sequence[_Said]) -> Sequence[_Row]:
        """Counts that were shown once, of processes that did not answer now; notes what is shown this time."""
        with contextlib.suppress(OSError), (self._folder / "lock").open("w") as lock:
            # Held for a millisecond or two; one that was stopped while it held it must not stop us.
            for _ in range(_LOCK_TRIES):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return self._noted(said)
                await asyncio.sleep(_LOCK_PAUSE_S)
        return ()

    def _noted(self, said: Sequence[_Said]) -> Sequence[_Row]:
        file = self._folder / "seen"
        seen = _decode_seen(file.read_bytes()) if file.exists() else _Seen()
        for one in said:
            before = seen.shown.get(one.slot)
            if before is not None and before.boot != one.boot:
                seen.departed = tuple(_summed([*seen.departed, *before.growing]))
            seen.shown[one.slot] = _Shown(one.boot, one.growing)
        partial = file.with_suffix(".partial")
        partial.write_bytes(_encode(seen))
        partial.replace(file)
        here = {one.slot for one in said}
        silent = itertools.chain.from_iterable(s.growing for slot, s in seen.shown.items() if slot not in here)
        return [*seen.departed, *silent]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name, question = _decode_question(await reader.read())
            answer = await self._answers[name](question)
            writer.write(len(answer).to_bytes(_LENGTH_BYTES, "big"))
            writer.write(answer)
            await writer.drain()
        except ConnectionError:
            pass  # it asked no longer than it cared to wait
        except Exception:  # the others get no answer, and leave us out
            log.exception("a sibling got no answer")
        finally:
            writer.close()


class _Merged:
    """Families with the samples of all processes, in the form of a registry."""

    def __init__(self, own: Sequence[Metric], rows: Iterable[_Row], *, processes: int) -> None:
        self._own = own
        self._rows = _summed(rows)
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        by_family: dict[str, list[_Row]] = {}
        for row in self._rows:
            by_family.setdefault(row.family, []).append(row)
        for family in self._own:
            merged = Metric(family.name, family.documentation, family.type)
            merged.samples = [Sample(r.name, dict(r.labels), r.value) for r in by_family.get(family.name, ())]
            yield merged
        processes = Metric("lorafleet_router_processes", "Processes of this router that answered.", "gauge")
        processes.samples = [Sample("lorafleet_router_processes", {}, self._processes)]
        yield processes


def _summed(rows: Iterable[_Row]) -> list[_Row]:
    """One row for each family, name and labels, in the order of their first."""
    found: dict[tuple[str, str, tuple[tuple[str, str], ...]], _Row] = {}
    for row in rows:
        before = found.get(row.key)
        value = row.value if before is None else _both(row, before.value)
        found[row.key] = row if before is None else _Row(row.family, row.name, row.labels, value)
    return list(found.values())


def _both(row: _Row, other: float) -> float:
    if row.name.endswith(_CREATED):
        return min(row.value, other)
    return max(row.value, other) if row.family in LARGEST else row.value + other


async def _asked(path: Path, name: str, question: bytes, within_s: float) -> bytes:
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(_encode((name, question)))
                writer.write_eof()
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                return await reader.readexactly(length)
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError) as exc:
        log.warning("a sibling does not answer", slot=path.stem, error=repr(exc))
        return b""
