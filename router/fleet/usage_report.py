"""Usage reports to the orchestrator: demand for each adapter, and its requests in flight on each worker."""

import itertools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx

from lorafleet.identity import lora_id_of
from orchestrator.model.usage import AdapterHold, AdapterUse, UsageReport
from router.core.kv.index import WorkerId
from router.core.schedule.load import LoadBook
from router.fleet.traffic import TrafficLog

# Unused entries are dropped after this time. Demand is computed from the last minute.
_FORGET_AFTER_S = 900.0
# Those of adapters that were deleted: a trainer's old versions would make each report longer for a quarter of an hour.
_FORGET_DELETED_AFTER_S = 30.0


@dataclass(slots=True)
class UseCounts:
    """Counts of one engine name on one worker. Fields as in wire.AdapterUse.

    last_at   when a request was last sent there
    ended_at  when a request there last ended
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    work_s: float = 0.0
    errors: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0

    def record_end(
        self, work_s: float, output_tokens: int, first_token_s: float | None, now: float, is_error: bool
    ) -> None:
        """Add one ended request to the sums; `first_token_s` is None if no first token was seen."""
        self.ended_at = now
        self.work_s += work_s
        self.output_tokens += output_tokens
        self.errors += is_error
        if first_token_s is not None:
            self.first_tokens += 1
            self.first_token_s += first_token_s


@dataclass(slots=True)
class _HoldCounts:
    held: int = 0
    hold_s: float = 0.0
    sheds: int = 0
    waiting: int = 0
    last_at: float = 0.0


@dataclass(slots=True)
class HeldRequests:
    """Per adapter, requests that waited or were rejected here; requests for the base model are not counted."""

    _holds: dict[str, _HoldCounts] = field(default_factory=dict)

    def record_hold(self, lora_id: str, hold_s: float, now: float) -> None:
        """Count one request for an adapter whose wait here has ended, after `hold_s`.

        Ignored without an adapter ("").
        """
        if lora_id:
            hold = self._counts_of(lora_id, now)
            hold.held += 1
            hold.hold_s += hold_s

    def start_wait(self, lora_id: str, now: float) -> None:
        """Count one more request that waits in the queue. Ignored without an adapter ("")."""
        if lora_id:
            self._counts_of(lora_id, now).waiting += 1

    def end_wait(self, lora_id: str, hold_s: float, now: float) -> None:
        """Count a request that waits in the queue no longer, and its wait. Ignored without an adapter ("")."""
        if lora_id:
            self._counts_of(lora_id, now).waiting -= 1
            self.record_hold(lora_id, hold_s, now)

    def record_shed(self, lora_id: str, now: float) -> None:
        """Count one request for an adapter that was rejected."""
        if lora_id:
            self._counts_of(lora_id, now).sheds += 1

    def report(self, now: float, is_registered: Callable[[str], bool] = lambda _: True) -> tuple[AdapterHold, ...]:
        """All counts so far; drops adapters that were unused for 15 minutes, or that were deleted."""
        old = [
            name
            for name, hold in self._holds.items()
            if not hold.waiting and now - hold.last_at > _kept_s(is_registered(name))
        ]
        for lora_id in old:
            del self._holds[lora_id]
        return tuple(
            AdapterHold(lora_id=lora_id, held=hold.held, hold_s=hold.hold_s, sheds=hold.sheds, waiting=hold.waiting)
            for lora_id, hold in self._holds.items()
        )

    def _counts_of(self, lora_id: str, now: float) -> _HoldCounts:
        """The adapter's counts, marked as used now; added where there are none."""
        hold = self._holds.setdefault(lora_id, _HoldCounts())
        hold.last_at = now
        return hold


@dataclass(slots=True)
class UsageCounts:
    """Cumulative counts per (worker, engine name) since this router's boot.

    waits_s, running_in_pause  as in wire.UsageReport
    is_registered              whether a lora_id is in the catalog
    """

    router_id: str
    load: LoadBook
    holds: HeldRequests = field(default_factory=HeldRequests)
    traffic: TrafficLog = field(default_factory=TrafficLog)
    waits_s: Callable[[], Mapping[WorkerId, float]] = dict
    running_in_pause: Callable[[], Mapping[str, int]] = dict
    is_registered: Callable[[str], bool] = lambda _: True
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _uses: dict[tuple[WorkerId, str], UseCounts] = field(default_factory=dict)
    _seq: "itertools.count[int]" = field(default_factory=itertools.count)

    def record_dispatch(self, worker: WorkerId, engine_name: str, prompt_tokens: int, now: float) -> UseCounts:
        """Count one request that is about to be sent; call `record_end` of the result when it has ended."""
        use = self._uses.get((worker, engine_name))
        if use is None:
            use = self._uses[worker, engine_name] = UseCounts()
        use.requests += 1
        use.prompt_tokens += prompt_tokens
        use.last_at = now
        return use

    def forget(self, worker: WorkerId) -> None:
        """Drop a gone worker's counts."""
        for key in [key for key in self._uses if key[0] == worker]:
            del self._uses[key]

    def report(self, revision_seen: int, now: float, *, is_last: bool = False) -> UsageReport:
        """All counts so far, numbered; drops entries that were unused for 15 minutes, and soon those of deleted
        adapters. `is_last`: the router stops.

        The receiver takes differences, so a lost report loses nothing.
        """
        in_flight = {(worker, name): count for worker, name, count in self.load.counts_by_name()}
        # An entry that is dropped and used again starts at zero, as a new one does.
        for key, use in list(self._uses.items()):
            kept_s = _kept_s(self.is_registered(lora_id_of(key[1])))
            if key not in in_flight and now - max(use.last_at, use.ended_at) > kept_s:
                del self._uses[key]
        uses = tuple(
            AdapterUse(
                worker_id=worker,
                engine_name=name,
                requests=use.requests,
                prompt_tokens=use.prompt_tokens,
                output_tokens=use.output_tokens,
                work_s=use.work_s,
                errors=use.errors,
                first_tokens=use.first_tokens,
                first_token_s=use.first_token_s,
                in_flight=in_flight.get((worker, name), 0),
                last_dispatch_age_s=now - use.last_at,
            )
            for (worker, name), use in self._uses.items()
        )
        return UsageReport(
            router_id=self.router_id,
            boot_id=self.boot_id,
            seq=next(self._seq),
            revision_seen=revision_seen,
            uses=uses,
            holds=self.holds.report(now, self.is_registered),
            waits_s={str(worker): round(wait_s, 3) for worker, wait_s in self.waits_s().items()},
            is_last=is_last,
            traffic=self.traffic.batches(now, is_last=is_last),
            now=self.traffic.now_of(),
            running_in_pause=dict(self.running_in_pause()),
        )


def _kept_s(is_registered: bool) -> float:
    """Seconds for which an adapter's unused counts are kept."""
    return _FORGET_AFTER_S if is_registered else _FORGET_DELETED_AFTER_S


async def send_usage(
    client: httpx.AsyncClient,
    url: str,
    usage: UsageCounts,
    revision: Callable[[], int],
    now: Callable[[], float],
    *,
    is_last: bool = False,
) -> None:
    """Send one report to the orchestrator; raises httpx.HTTPError if it does not arrive.

    is_last  the router stops
    """
    report = usage.report(revision(), now(), is_last=is_last)
    body = report.model_dump_json()
    answer = await client.post(f"{url}/v1/usage", content=body, headers={"content-type": "application/json"})
    answer.raise_for_status()
    usage.traffic.accept(report.traffic)
