"""Request counts of adapters, by what the orchestrator tells of the routers' reports."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from lorafleet.service.state_files import is_missing
from workers.inventory.installed_adapters import InstalledAdapters

log = structlog.get_logger()


class AdapterUsage:
    """Counts requests and the time of the last one in `InstalledAdapters`, and keeps them in a file of their own."""

    def __init__(self, file: Path, installed: InstalledAdapters, *, now: Callable[[], str]) -> None:
        """Read the saved counts from `file` into `installed`; `now` gives the time of a use as the wire has it."""
        self._file = file
        self._installed = installed
        self._now = now
        self._is_saved = True
        if file.exists():
            self._read_saved()

    def count_uses(self, uses: Mapping[str, int]) -> Mapping[str, int]:
        """Add requests by lora_id to the counts in memory, as used now; returns them by engine name."""
        used: dict[str, int] = {}
        for lora_id, count in uses.items():
            # Of several versions the one that was loaded last gets the requests.
            for adapter in sorted(self._installed.versions(lora_id), key=lambda version: version.order)[-1:]:
                self._installed.update_in_memory(
                    replace(adapter, request_count=adapter.request_count + count, last_used=self._now())
                )
                used[adapter.engine_name] = count
        self._is_saved = self._is_saved and not used
        return used

    def save(self) -> None:
        """Write the counts to disk if they changed or their file is gone; the next call repeats a failed write."""
        counts = {
            adapter.engine_name: [adapter.request_count, adapter.last_used]
            for adapter in self._installed.all()
            if adapter.request_count
        }
        if not self._is_saved or (counts and is_missing(self._file)):
            self._is_saved = self._installed.write_json(self._file, counts)

    def _read_saved(self) -> None:
        """Read the saved counts into the installed adapters; a damaged file is logged and ignored."""
        try:
            counts = {name: (int(count), last) for name, (count, last) in json.loads(self._file.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError) as exc:
            log.warning("saved request counts unreadable: they begin anew", error=repr(exc))
            return
        for adapter in self._installed.all():
            count, last_used = counts.get(adapter.engine_name, (0, adapter.last_used))
            self._installed.update_in_memory(replace(adapter, request_count=count, last_used=last_used))
