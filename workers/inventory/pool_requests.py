"""Requests by where the engine found their adapter: in a device slot, in host memory, or on disk."""

from collections.abc import Mapping
from pathlib import Path

from lorafleet.engine.vllm_plugin.engine_reports import PoolMisses, read_pool_misses
from workers.core.slots import AdapterSlots
from workers.metrics import WorkerMetrics


class PoolRequests:
    """Counts requests as hits and misses of the adapter pool, in the agent's metrics.

    An engine that counts its misses is believed; all other requests that routers report were hits. For another engine
    the model of its slots says where the first request of an adapter, of those that came together, found it.
    """

    def __init__(self, metrics: WorkerMetrics, reports: Path) -> None:
        """reports  the folder in which the engine's processes write"""
        self._metrics = metrics
        self._reports = reports
        self._read: Mapping[str, PoolMisses] = {}
        self._unmatched = 0  # misses whose requests no router has reported yet

    def count(self, requests: Mapping[str, int], slots: AdapterSlots) -> None:
        """Count requests, by engine name, that routers have reported; call it before they change the slots."""
        if not self.read_misses():
            for name, number in requests.items():
                self._add(slots.location(name), 1, by="estimate")
                self._add("device", number - 1, by="estimate")
            return
        total = sum(requests.values())
        matched = min(total, self._unmatched)
        self._unmatched -= matched
        self._add("device", total - matched, by="engine")

    def read_misses(self) -> bool:
        """Count the engine's misses since the last call; False for an engine that does not count them."""
        now = read_pool_misses(self._reports)
        for process, misses in now.items():
            before = self._read.get(process, PoolMisses())
            host, disk = misses.host - before.host, misses.disk - before.disk
            if host < 0 or disk < 0:  # another process with the same number
                host, disk = misses.host, misses.disk
            self._add("host", host, by="engine")
            self._add("disk", disk, by="engine")
            self._unmatched += host + disk
        self._read = now
        return bool(now)

    def _add(self, found: str, number: int, *, by: str) -> None:
        if number > 0:
            self._metrics.pool_requests.labels(found, by).inc(number)
