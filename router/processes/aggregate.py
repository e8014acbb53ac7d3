"""One answer for all processes of a router: whoever is asked asks the others, over unix sockets in their shared folder.

Nothing is shared between requests: a counter stays a plain Python object. (prometheus_client's own multiprocess mode
keeps every sample in a mapped file: 0.76 us an `inc` against 0.27, 1.8 an `observe` against 0.66, and a gone worker's
series could never be removed.)
"""

import asyncio
import contextlib
import fcntl
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

import msgspec
import structlog
from prometheus_client.utils import floatToGoString

from lorafleet.service.files import Stamp, stamp_of

log = structlog.get_logger()

# Gauges that every process has of the same thing: the largest is shown. All other gauges, counters and histograms
# are sums. `router/telemetry/metrics.py` has them all; a test holds the two lists of gauges together.
LARGEST = frozenset(
    f"lorafleet_router_{name}"
    for name in (
        "catalog_age_seconds",
        "slices_age_seconds",
        "catalog_revision",
        "circuit_open",
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
        "client_connections",
        "engine_connections",
        "held_bytes",
        "held_requests",
        "in_flight_requests",
        "kv_bytes",
        "kv_sockets_waiting",
        "token_cache_bytes",
        "waiting_bytes",
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
# A sample's name and labels, as they stand in its line -> its value.
Values = dict[str, float]


class _ProcessMetrics(msgspec.Struct, array_like=True, frozen=True):
    """What one process shows now; `boot` tells it from the one that had its slot before."""

    slot: int
    boot: str
    text: str


class _ShownCounts(msgspec.Struct, array_like=True, frozen=True):
    """What was last shown of the counts of the process in a slot."""

    boot: str
    counts: dict[str, Values]


class _SlotCounts(msgspec.Struct):
    """Counts, by family, that Prometheus has seen: by slot, and of all processes that are gone."""

    shown: dict[int, _ShownCounts] = msgspec.field(default_factory=dict)
    departed: dict[str, Values] = msgspec.field(default_factory=dict)


_decode_said = msgspec.msgpack.Decoder(_ProcessMetrics).decode
_decode_seen = msgspec.msgpack.Decoder(_SlotCounts).decode
_decode_question = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_encode = msgspec.msgpack.encode


class WorkerProcesses:
    """This process's way to the others of the same parent, and theirs to it."""

    def __init__(
        self,
        folder: Path,
        slot: int,
        *,
        metrics: Callable[[], bytes],
        answers: Mapping[str, Answer] = MappingProxyType({}),
        answer_within_s: float = _ANSWER_WITHIN_S,
        lock_tries: int = _LOCK_TRIES,
    ) -> None:
        """Join the others of the folder.

        metrics          this process's own as they are now, in Prometheus' text
        answers          what else this process can be asked, by name
        answer_within_s  seconds that `metrics` waits for the others
        lock_tries       how often `metrics` tries to get the record's lock, every 10 ms
        """
        self._folder = folder
        self._slot = slot
        self._boot = uuid.uuid4().hex
        self._metrics = metrics
        self._answers: dict[str, Answer] = {**answers, _METRICS: self._told_metrics}
        self._server: asyncio.Server | None = None
        self._answer_within_s = answer_within_s
        self._lock_tries = lock_tries
        self._seen = _SlotCounts()
        self._stamp: Stamp | None = None

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

    async def ask(
        self, name: str, question: bytes = b"", *, within_s: float = _ANSWER_WITHIN_S
    ) -> dict[int, bytes | None]:
        """What each of the others answers, by its slot; None: it is gone, or does not answer in time."""
        slots = {int(path.stem): path for path in self._folder.glob("*.sock") if path.stem != str(self._slot)}
        found = await asyncio.gather(*(_asked(path, name, question, within_s) for path in slots.values()))
        return dict(zip(slots, found, strict=True))

    async def metrics(self) -> bytes:
        """Prometheus' text over all processes. Counts never fall: a process that went leaves what it last showed."""
        theirs = await self.ask(_METRICS, within_s=self._answer_within_s)
        said = [self._said(), *(_decode_said(answer) for answer in theirs.values() if answer is not None)]
        pages = [_MetricsPage.read(one.text) for one in said]
        lost = await self._lost(said, pages)
        whole = _MetricsPage.read(_OWN.format(processes=len(said)))
        for page in pages:
            whole.add(page)
        for counts in lost:
            whole.add_values(counts)
        return whole.text().encode()

    def _said(self) -> _ProcessMetrics:
        return _ProcessMetrics(self._slot, self._boot, self._metrics().decode())

    async def _told_metrics(self, _question: bytes) -> bytes:
        return _encode(self._said())

    async def _lost(
        self, said: Sequence[_ProcessMetrics], pages: Sequence["_MetricsPage"]
    ) -> Sequence[Mapping[str, Values]]:
        """Counts that were shown once, of processes that did not answer now; notes what is shown this time.

        Without the folder or its lock (a full disk, no descriptors left) they are as far as this process knows.
        """
        with contextlib.suppress(OSError), (self._folder / "lock").open("w") as lock:
            if await _is_ours(lock, self._lock_tries):
                self._catch_up()
                lost = self._note(said, pages)
                self._save()
                return lost
        return self._note(said, pages)

    def _catch_up(self) -> None:
        """Know what the process knew that wrote last; if that was ourselves, we know as much and more."""
        file = self._folder / "seen"
        if (stamp := stamp_of(file)) is not None and stamp != self._stamp:
            self._seen, self._stamp = _decode_seen(file.read_bytes()), stamp

    def _note(self, said: Sequence[_ProcessMetrics], pages: Sequence["_MetricsPage"]) -> Sequence[Mapping[str, Values]]:
        seen = self._seen
        for one, page in zip(said, pages, strict=True):
            before = seen.shown.get(one.slot)
            if before is not None and before.boot != one.boot:
                for family, values in before.counts.items():
                    _add(seen.departed.setdefault(family, {}), values)
            seen.shown[one.slot] = _ShownCounts(one.boot, page.counts())
        here = {one.slot for one in said}
        return [seen.departed, *(shown.counts for slot, shown in seen.shown.items() if slot not in here)]

    def _save(self) -> None:
        file = self._folder / "seen"
        partial = file.with_suffix(".partial")
        partial.write_bytes(_encode(self._seen))
        partial.replace(file)
        self._stamp = stamp_of(file)

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


_OWN = """# HELP lorafleet_router_processes Processes of this router that answered.
# TYPE lorafleet_router_processes gauge
lorafleet_router_processes {processes}
"""


class _MetricsPage:
    """Prometheus' text, by family: its comment lines, its type, its values. Lines are taken apart no further than
    name with labels, and value: 810 samples of each of 4 processes are added up in 4 ms, as objects in 30."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self._types: dict[str, str] = {}
        self._values: dict[str, Values] = {}

    @classmethod
    def read(cls, text: str) -> "_MetricsPage":
        """A page of what prometheus_client writes: HELP, TYPE, and then the family's samples, without times."""
        page, head = cls(), ""
        values: Values = {}
        for line in text.removesuffix("\n").split("\n"):  # not splitlines: labels may hold other ends of lines
            if line.startswith("# HELP"):
                head = line
            elif line.startswith("# TYPE"):
                _, _, family, kind = line.split(" ")
                page._heads[family], page._types[family] = f"{head}\n{line}\n", kind
                values = page._values.setdefault(family, {})
            else:
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return page

    def add(self, other: "_MetricsPage") -> None:
        """Take another's in: sums, or of what all have of the same thing, the largest."""
        for family, values in other._values.items():
            self._heads.setdefault(family, other._heads[family])
            self._types.setdefault(family, other._types[family])
            mine = self._values.setdefault(family, {})
            if family in LARGEST:
                _merge(mine, values, max)
            elif family.endswith(_CREATED):
                _merge(mine, values, min)
            else:
                _add(mine, values)

    def add_values(self, counts: Mapping[str, Values]) -> None:
        """Add counts of families that are here."""
        for family, values in counts.items():
            if family in self._values:
                _add(self._values[family], values)

    def counts(self) -> dict[str, Values]:
        """What only grows."""
        return {family: values for family, values in self._values.items() if self._types[family] in _ONLY_GROW}

    def text(self) -> str:
        """As it was read."""
        lines = []
        for family, values in self._values.items():
            lines.append(self._heads[family])
            for name, value in values.items():
                lines.append(f"{name} {floatToGoString(value)}\n")  # type: ignore[no-untyped-call]
        return "".join(lines)


def _add(mine: Values, values: Values) -> None:
    for name, value in values.items():
        mine[name] = mine.get(name, 0.0) + value


def _merge(mine: Values, values: Values, choose: Callable[[float, float], float]) -> None:
    for name, value in values.items():
        mine[name] = choose(mine[name], value) if name in mine else value


async def _is_ours(lock: IO[str], tries: int) -> bool:
    """Held for a millisecond or two; one that was stopped while it held it must not stop us."""
    for _ in range(tries):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        await asyncio.sleep(_LOCK_PAUSE_S)
    return False


async def _asked(path: Path, name: str, question: bytes, within_s: float) -> bytes | None:
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
        return None
