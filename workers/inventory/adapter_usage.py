"""Request counts of adapters, from the counts that routers report: each request counts once."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from lorafleet.service.state_files import is_missing
from orchestrator.model.usage import UsageReport
from workers.inventory.installed_adapters import InstalledAdapters

log = structlog.get_logger()

_ROUTERS_KEPT = 256


class ReportedAdapterUsage:
    """The last report and batch of each router that were counted; the totals are in `InstalledAdapters`.

    Both are saved in one file: if one were newer than the other, requests would count twice or never.
    """

    def __init__(self, file: Path, installed: InstalledAdapters, *, worker_id: str, now: Callable[[], str]) -> None:
        """Read the saved counts from `file` into `installed`; `now` gives the time of a use as the wire has it."""
        self._file = file
        self._installed = installed
        self._worker_id = worker_id
        self._now = now
        self._routers: dict[tuple[str, str], tuple[int, int]] = {}
        self._is_saved = True
        if file.exists():
            self._read_saved()

    def count_uses(self, report: UsageReport) -> Mapping[str, int] | None:
        """Add a router's report to the adapters' counts in memory; returns engine name -> requests since its last one.

        Sets when they were last used. Forgets the router heard of longest ago beyond the bound. None if the report was
        counted before.
        """
        key = (report.router_id, report.boot_id)
        last_seq, last_batch = self._routers.get(key, (-1, -1))
        if report.seq <= last_seq:
            return None
        if key not in self._routers and len(self._routers) >= _ROUTERS_KEPT:
            self._routers.pop(next(iter(self._routers)))
        requests = Counter[str]()
        for batch in report.batches:
            if batch.number > last_batch:
                last_batch = batch.number
                for row in batch.rows:
                    if row.worker == self._worker_id and row.adapter and row.counts.sent:
                        requests[row.adapter] += row.counts.sent
        used: dict[str, int] = {}
        for lora_id, count in requests.items():
            # Of several versions the one that was loaded last gets the requests.
            for adapter in sorted(self._installed.versions(lora_id), key=lambda version: version.order)[-1:]:
                self._installed.update_in_memory(
                    replace(adapter, request_count=adapter.request_count + count, last_used=self._now())
                )
                used[adapter.engine_name] = count
        self._routers.pop(key, None)  # the router that reported longest ago comes first
        self._routers[key] = (report.seq, last_batch)
        self._is_saved = self._is_saved and not used
        return used

    def save(self) -> None:
        """Write the counts to disk if they changed or their file is gone; the next call repeats a failed write."""
        if self._is_saved and not (self._routers and is_missing(self._file)):
            return
        counts = {adapter.engine_name: [adapter.request_count, adapter.last_used] for adapter in self._installed.all()}
        routers = [[*key, *last] for key, last in self._routers.items()]
        self._is_saved = self._installed.write_json(self._file, {"adapters": counts, "routers": routers})

    def _read_saved(self) -> None:
        """Read the saved counts into memory, also into the installed adapters; a damaged file is logged and ignored."""
        try:
            saved = json.loads(self._file.read_text())
            routers = {(router, boot): (int(seq), int(batch)) for router, boot, seq, batch in saved["routers"]}
            counts = {name: (int(count), last) for name, (count, last) in saved["adapters"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            log.warning("saved request counts unreadable: new counts may be too high", error=repr(exc))
            return
        self._routers = routers
        for adapter in self._installed.all():
            count, last_used = counts.get(adapter.engine_name, (0, adapter.last_used))
            self._installed.update_in_memory(replace(adapter, request_count=count, last_used=last_used))
