"""Answers that cover all worker processes of a router: the process that is asked asks the others over unix sockets.

For metrics it asks twice: for the recent use of adapters, from which it chooses the adapters with series of their own,
and for each process's counts by those labels. So a series is never the sum of some processes only.

Counters stay plain Python objects in each process. prometheus_client's multiprocess mode is not used: it keeps every
sample in a mapped file, which makes counting about three times slower, and a removed worker's series would stay.
"""

import asyncio
import contextlib
import fcntl
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

import msgspec
import structlog
from prometheus_client.utils import floatToGoString

from lorafleet.service.files import Stamp, stamp_of
from lorafleet.telemetry.adapter_labels import OTHER, AgreedLabels, RecentUse, agree
from lorafleet.telemetry.repeats import RepeatLimiter

log = structlog.get_logger()

# Gauges that describe the same thing in every process: the largest is shown. All other gauges, counters and histograms
# are summed. A test compares the two lists with the gauges of `router/telemetry/metrics.py`.
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
        "pauses",
        "replica_decode_tokens_per_second",
        "replica_prefill_tokens_per_second",
        "replicas",
        "tls_expiry_timestamp_seconds",
        "tls_files_current",
        "tokenizer_distrusted",
    )
) | {"lorafleet_issuer_keys_age_seconds", "lora_cache_hit_rate"}  # the asked process computes this of all
SUMMED = frozenset(
    f"lorafleet_router_{name}"
    for name in (
        "client_connections",
        "engine_connections",
        "held_bytes",
        "held_from_zero_requests",
        "held_requests",
        "in_flight_requests",
        "kv_bytes",
        "kv_sockets_waiting",
        "paused_requests",
        "token_cache_bytes",
        "waiting_bytes",
        "waiting_requests",
    )
)
_ONLY_GROW = frozenset({"counter", "histogram", "summary"})
_CREATED = "_created"
_RECENT_USE = "recent use"
_METRICS = "metrics"
# The adapter of a sample; `lora_id` is the first label of each metric that has it.
_LORA_ID = re.compile(r'\w+\{lora_id="((?:[^"\\]|\\.)*)"')
# A process that does not answer in time is left out. Prometheus' own timeout is 10 s.
_ANSWER_TIMEOUT_S = 2.0
# Length prefix of each answer, so that a truncated answer is recognised.
_LENGTH_BYTES = 8
_LOCK_TRIES = 50
_LOCK_PAUSE_S = 0.01

Answer = Callable[[bytes], Awaitable[bytes]]
# A sample's name and labels, as in the text -> its value.
Values = dict[str, float]


class LabelledSeries(Protocol):
    """The series by adapter of one process.

    most_labels  adapters with series of their own
    """

    most_labels: int

    def recent_use(self) -> RecentUse:
        """The recent use of adapters in this process, and its present labels."""

    def show(self, agreed: AgreedLabels) -> None:
        """Count by these labels from now on, and add what was counted until `recent_use` to the series."""


class _ProcessMetrics(msgspec.Struct, array_like=True, frozen=True):
    """One process's metrics now. `boot` distinguishes it from the process that had its slot before."""

    slot: int
    boot: str
    text: str


class _ShownCounts(msgspec.Struct, array_like=True, frozen=True):
    """The last counts that were shown of the process in a slot."""

    boot: str
    counts: dict[str, Values]


class _SlotCounts(msgspec.Struct):
    """Counts that Prometheus has seen, by family: of each slot's process, and of all ended processes together."""

    shown: dict[int, _ShownCounts] = msgspec.field(default_factory=dict)
    departed: dict[str, Values] = msgspec.field(default_factory=dict)


_decode_use = msgspec.msgpack.Decoder(RecentUse).decode
_decode_labels = msgspec.msgpack.Decoder(AgreedLabels).decode
_decode_report = msgspec.msgpack.Decoder(_ProcessMetrics).decode
_decode_record = msgspec.msgpack.Decoder(_SlotCounts).decode
_decode_question = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_encode = msgspec.msgpack.encode


class WorkerProcesses:
    """Asks the other worker processes of the same parent, and answers them."""

    def __init__(
        self,
        folder: Path,
        slot: int,
        *,
        metrics: Callable[[], bytes],
        adapters: LabelledSeries,
        answers: Mapping[str, Answer] = MappingProxyType({}),
        answer_within_s: float = _ANSWER_TIMEOUT_S,
        lock_tries: int = _LOCK_TRIES,
    ) -> None:
        """
        folder           shared by the processes of this parent; holds their sockets and the record of counts
        metrics          returns this process's own metrics in Prometheus' text format
        adapters         the series by adapter among them
        answers          further questions that this process answers, by name
        answer_within_s  seconds that `metrics` waits for the others
        lock_tries       attempts to lock the record of counts, 10 ms apart
        """
        self._folder = folder
        self._slot = slot
        self._boot = uuid.uuid4().hex
        self._metrics = metrics
        self._adapters = adapters
        self._answers: dict[str, Answer] = {
            **answers,
            _RECENT_USE: self._answer_recent_use,
            _METRICS: self._answer_metrics,
        }
        self._server: asyncio.Server | None = None
        self._silences = RepeatLimiter()
        self._answer_within_s = answer_within_s
        self._lock_tries = lock_tries
        self._record = _SlotCounts()
        self._record_stamp: Stamp | None = None

    async def start(self) -> None:
        """Listen on a unix socket and answer the other processes, until `close`."""
        path = self._folder / f"{self._slot}.sock"
        path.unlink(missing_ok=True)  # left by the slot's previous process
        self._server = await asyncio.start_unix_server(self._serve, path=path)

    async def close(self) -> None:
        """Close the socket: the other processes get no more answers."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def ask(
        self,
        name: str,
        question: bytes = b"",
        *,
        within_s: float = _ANSWER_TIMEOUT_S,
        only: Collection[int] | None = None,
    ) -> dict[int, bytes | None]:
        """Ask the other processes, all or those in `only` these slots.

        Returns the answer by slot, or None from a process that does not answer in time.
        """
        slots = {int(path.stem): path for path in self._folder.glob("*.sock") if path.stem != str(self._slot)}
        asked = {slot: path for slot, path in slots.items() if only is None or slot in only}
        found = await asyncio.gather(*(self._ask_process(path, name, question, within_s) for path in asked.values()))
        return dict(zip(asked, found, strict=True))

    async def _ask_process(self, path: Path, name: str, question: bytes, within_s: float) -> bytes | None:
        """One process's answer over its unix socket; None, logged now and then, if it is not in time."""
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
            if failures := self._silences.count(path.stem):
                log.warning("a worker process does not answer", slot=path.stem, error=repr(exc), failures=failures)
            return None

    async def metrics(self) -> bytes:
        """Ask all processes, and sum their metrics as Prometheus' text. Counts of ended processes are kept."""
        uses = await self.ask(_RECENT_USE, within_s=self._answer_within_s)
        present = {slot: _decode_use(use) for slot, use in uses.items() if use is not None}
        agreed = agree([self._adapters.recent_use(), *present.values()], self._adapters.most_labels)
        question = _encode(msgspec.structs.replace(agreed, hit_rates={}))
        # Asked before this process shows them: the others are to have the labels even if this one is cancelled.
        answers = await self.ask(_METRICS, question, within_s=self._answer_within_s, only=present)
        self._adapters.show(agreed)
        reports = [self._own_metrics(), *(_decode_report(answer) for answer in answers.values() if answer is not None)]
        pages = [_MetricsPage.read(report.text) for report in reports]
        shown = _escaped_labels({*agreed.adapters, OTHER})
        missing = await self._counts_of_missing(reports, pages, shown)
        whole = _MetricsPage.read(PROCESSES_GAUGE.format(processes=len(reports)))
        for page in pages:
            whole.add(page)
        for counts in missing:
            whole.add_values(counts)
        return whole.text().encode()

    def _own_metrics(self) -> _ProcessMetrics:
        """This process's metrics now."""
        return _ProcessMetrics(self._slot, self._boot, self._metrics().decode())

    async def _answer_recent_use(self, _question: bytes) -> bytes:
        """This process's recent use of adapters, encoded as the answer to another process."""
        return _encode(self._adapters.recent_use())

    async def _answer_metrics(self, question: bytes) -> bytes:
        """This process's metrics by the labels in the question, encoded as the answer to another process."""
        self._adapters.show(_decode_labels(question))
        return _encode(self._own_metrics())

    async def _counts_of_missing(
        self, reports: Sequence[_ProcessMetrics], pages: Sequence["_MetricsPage"], adapters: Set[str]
    ) -> Sequence[Mapping[str, Values]]:
        """Counts shown before, of processes that have ended or did not answer now; records the counts shown now.

        Counts of adapters that are not in `adapters` any more are forgotten, as the processes that answer forget them.
        Without the folder or its lock (a full disk, no descriptors) only this process's own record is used.
        """
        with contextlib.suppress(OSError), (self._folder / "lock").open("w") as lock:
            if await _try_lock(lock, self._lock_tries):
                self._load_record()
                missing = self._record_counts(reports, pages, adapters)
                self._save_record()
                return missing
        return self._record_counts(reports, pages, adapters)

    def _load_record(self) -> None:
        """Read the record from disk, if another process wrote it last."""
        file = self._folder / "seen"
        if (stamp := stamp_of(file)) is not None and stamp != self._record_stamp:
            self._record, self._record_stamp = _decode_record(file.read_bytes()), stamp

    def _record_counts(
        self, reports: Sequence[_ProcessMetrics], pages: Sequence["_MetricsPage"], adapters: Set[str]
    ) -> Sequence[Mapping[str, Values]]:
        """Record the counts shown now, without those of other adapters; returns those of ended or silent processes."""
        record = self._record
        for report, page in zip(reports, pages, strict=True):
            before = record.shown.get(report.slot)
            if before is not None and before.boot != report.boot:
                for family, values in before.counts.items():
                    _add_sample_values(record.departed.setdefault(family, {}), values)
            record.shown[report.slot] = _ShownCounts(report.boot, page.counts())
        present_slots = {report.slot for report in reports}
        missing = [
            record.departed,
            *(shown.counts for slot, shown in record.shown.items() if slot not in present_slots),
        ]
        for counts in missing:
            _forget_adapters(counts, adapters)
        return missing

    def _save_record(self) -> None:
        """Write the record of counts to disk."""
        file = self._folder / "seen"
        partial = file.with_suffix(".partial")
        partial.write_bytes(_encode(self._record))
        partial.replace(file)
        self._record_stamp = stamp_of(file)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one question of another process, answer it and close the connection. Errors are logged."""
        try:
            name, question = _decode_question(await reader.read())
            answer = await self._answers[name](question)
            writer.write(len(answer).to_bytes(_LENGTH_BYTES, "big"))
            writer.write(answer)
            await writer.drain()
        except ConnectionError:
            pass  # the other process has stopped waiting
        except Exception:  # without an answer the other process leaves this one out
            log.exception("another worker process got no answer")
        finally:
            writer.close()


PROCESSES_GAUGE = """# HELP lorafleet_router_processes Processes of this router that answered.
# TYPE lorafleet_router_processes gauge
lorafleet_router_processes {processes}
"""


class _MetricsPage:
    """Prometheus' text by family: comment lines, type and values.

    A line is split only into its name with labels, and its value. That is about seven times faster than sample objects.
    """

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self._types: dict[str, str] = {}
        self._values: dict[str, Values] = {}

    @classmethod
    def read(cls, text: str) -> "_MetricsPage":
        """Parse what prometheus_client writes: HELP, TYPE, then the family's samples, without timestamps."""
        page, head = cls(), ""
        values: Values = {}
        for line in text.removesuffix("\n").split("\n"):  # not splitlines: labels may contain other line separators
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
        """Merge another process's page into this one by summing the values.

        Of a gauge in LARGEST the largest value stays, of a creation time the earliest.
        """
        for family, values in other._values.items():
            self._heads.setdefault(family, other._heads[family])
            self._types.setdefault(family, other._types[family])
            values_here = self._values.setdefault(family, {})
            if family in LARGEST:
                _merge_by(values_here, values, max)
            elif family.endswith(_CREATED):
                _merge_by(values_here, values, min)
            else:
                _add_sample_values(values_here, values)

    def add_values(self, counts: Mapping[str, Values]) -> None:
        """Add counts of the families on this page."""
        for family, values in counts.items():
            if family in self._values:
                _add_sample_values(self._values[family], values)

    def counts(self) -> dict[str, Values]:
        """Counters, histograms and summaries by family."""
        return {family: values for family, values in self._values.items() if self._types[family] in _ONLY_GROW}

    def text(self) -> str:
        """The page in Prometheus' text format."""
        lines = []
        for family, values in self._values.items():
            lines.append(self._heads[family])
            for name, value in values.items():
                lines.append(f"{name} {floatToGoString(value)}\n")  # type: ignore[no-untyped-call]
        return "".join(lines)


def _add_sample_values(values_here: Values, values: Values) -> None:
    """Add each value to the one of the same sample in `values_here`."""
    for name, value in values.items():
        values_here[name] = values_here.get(name, 0.0) + value


def _escaped_labels(names: Set[str]) -> set[str]:
    """The names as label values in Prometheus' text format."""
    return {name.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for name in names}


def _forget_adapters(counts: Mapping[str, Values], adapters: Set[str]) -> None:
    """Remove the samples of adapters that are not among these escaped names."""
    for values in counts.values():
        for sample in [name for name in values if (of := _LORA_ID.match(name)) and of[1] not in adapters]:
            del values[sample]


def _merge_by(values_here: Values, values: Values, choose: Callable[[float, float], float]) -> None:
    """Put each value into `values_here`; of two values of one sample, the one that `choose` returns."""
    for name, value in values.items():
        values_here[name] = choose(values_here[name], value) if name in values_here else value


async def _try_lock(lock: IO[str], tries: int) -> bool:
    """Lock the record within `tries` attempts; whether that succeeded. A stopped process may hold the lock for long."""
    for _ in range(tries):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        await asyncio.sleep(_LOCK_PAUSE_S)
    return False
