"""How often each adapter was asked for, from the routers' cumulative counts: each request once, over any restart."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from orchestrator.wire import UsageReport
from workers.agent.records import InstalledAdapters

log = structlog.get_logger()

_ROUTERS_KEPT = 256


class AdapterUsage:
    """The counts are in the records; here is how far each router had counted when they were.

    Both are saved together: were one newer than the other, the difference would be counted twice or never.
    """

    def __init__(self, file: Path, records: InstalledAdapters, *, worker_id: str, now: Callable[[], str]) -> None:
        self._file = file
        self._records = records
        self._worker_id = worker_id
        self._now = now
        self._routers: dict[tuple[str, str], tuple[int, dict[str, int]]] = {}
        self._is_saved = True
        if file.exists():
            self._restore()

    def take(self, report: UsageReport) -> list[str] | None:
        """Engine names that were asked for since the router's last report; None for one that was taken before."""
        key = (report.router_id, report.boot_id)
        last_seq, counts = self._routers.get(key, (-1, {}))
        if report.seq <= last_seq:
            return None
        if key not in self._routers and len(self._routers) >= _ROUTERS_KEPT:
            self._routers.pop(next(iter(self._routers)))
        mine = {use.engine_name: use.requests for use in report.uses if use.worker_id == self._worker_id}
        used = []
        for name, requests in mine.items():
            record, before = self._records.get(name), counts.get(name, 0)
            new = requests - before if requests >= before else requests  # a router may count anew
            if record is not None and new > 0:
                self._records.keep(replace(record, request_count=record.request_count + new, last_used=self._now()))
                used.append(name)
        # What a report leaves out has not been counted back to zero. The one that has been silent for longest is first.
        self._routers.pop(key, None)
        self._routers[key] = (report.seq, counts | mine)
        self._is_saved = self._is_saved and not mine
        return used

    def save(self) -> None:
        """Write what changed since the last time; again the next time where the disk does not take it."""
        if self._is_saved:
            return
        counts = {each.engine_name: [each.request_count, each.last_used] for each in self._records.all()}
        routers = [[*key, seq, taken] for key, (seq, taken) in self._routers.items()]
        self._is_saved = self._records.write(self._file, {"adapters": counts, "routers": routers})

    def _restore(self) -> None:
        try:
            saved = json.loads(self._file.read_text())
            routers = {(router, boot): (int(seq), dict(taken)) for router, boot, seq, taken in saved["routers"]}
            counts = {name: (int(count), last) for name, (count, last) in saved["adapters"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            log.warning("the adapters' request counts may be too high: they were not saved", error=repr(exc))
            return
        self._routers = routers
        for record in self._records.all():
            count, last_used = counts.get(record.engine_name, (0, record.last_used))
            self._records.keep(replace(record, request_count=count, last_used=last_used))
