"""What adapters use without requests: slots of engines, loads, and files that come to workers; into the ledger.

The leader looks at the workers' reports every few seconds. An adapter that is in an engine then has been there since
the look before; one that came or went between two looks counts as much too long as too short.
"""

import secrets
from collections.abc import Callable

import structlog

from lorafleet.identity import DIGEST_DIGITS
from lorafleet.service.loops import forever
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.ledger import hour_of
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.ledger import UsageBatch, UsageKey, UsageRows, UsageSums
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.ledger import Ledger

log = structlog.get_logger()

LOOK_EVERY_S = 5.0
_MOST_APART_S = 60.0  # between two looks: nothing is known of a longer time, in which this process stood still
_HELD = frozenset({"ready", "draining"})


class ResidencyMeter:
    """Counts slot-seconds, loads and fetched bytes while this orchestrator leads, and adds them to the ledger."""

    def __init__(
        self, reconciler: Reconciler, ledger: Ledger, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._reconciler = reconciler
        self._ledger = ledger
        self._clock = clock
        self._wall = wall
        self._source = f"residency-{secrets.token_hex(8)}"
        self._number = 0
        self._rows: UsageRows = {}
        self._unaccepted: UsageBatch | None = None
        self._looked_at: float | None = None

    async def run(self) -> None:
        """Look every `LOOK_EVERY_S`. Ends only by being cancelled."""
        await forever(self.look, name="residency", every_s=LOOK_EVERY_S)

    async def look(self) -> None:
        """Count what the adapters have used since the look before, and add it to the ledger."""
        if not self._reconciler.leadership.is_leading:
            self._forget()
            return
        now = self._clock()
        since_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _MOST_APART_S)
        self._looked_at = now
        hour = hour_of(self._wall() - since_s / 2)
        self._count_slots(hour, since_s)
        self._count_loads(hour)
        self._count_files(hour)
        await self._report()

    def _forget(self) -> None:
        """Drop what another orchestrator counts from now on."""
        self._rows, self._unaccepted, self._looked_at = {}, None, None
        self._reconciler.audit.loads.clear()
        self._reconciler.files.arrived.clear()

    def _sums(self, hour: int, lora_id: str, digest: str | None, base_model: str) -> UsageSums:
        """The sums of an adapter's row. Its tenant is the only one that may use it; else none."""
        adapter = self._reconciler.store.adapters.get(lora_id)
        tenants = None if adapter is None else adapter.tenants
        tenant = tenants[0] if tenants is not None and len(tenants) == 1 else ""
        version = (digest or "")[:DIGEST_DIGITS]
        return self._rows.setdefault(UsageKey(hour, tenant, "", lora_id, version, base_model), UsageSums())

    def _count_slots(self, hour: int, since_s: float) -> None:
        """Count the time since the look before for each adapter in an engine."""
        for entry in self._reconciler.reports.workers.values():
            if entry.reach != "lost":
                for lora in entry.report.lora.loaded_loras:
                    if lora.state in _HELD:
                        base_model = entry.report.model.base_model
                        self._sums(hour, lora.lora_id, lora.digest, base_model).slot_s += since_s

    def _count_loads(self, hour: int) -> None:
        """Count the loads that the history has since the look before."""
        workers = self._reconciler.reports.workers
        for (lora_id, worker_id), count in self._reconciler.audit.loads.items():
            adapter, worker = self._reconciler.store.adapters.get(lora_id), workers.get(worker_id)
            digest = None if adapter is None else adapter.digest
            base_model = (adapter and adapter.base_model) or ("" if worker is None else worker.report.model.base_model)
            self._sums(hour, lora_id, digest, base_model).loads += count
        self._reconciler.audit.loads.clear()

    def _count_files(self, hour: int) -> None:
        """Count the bytes of the files that came to workers' disks since the look before."""
        arrived = self._reconciler.files.arrived
        if not arrived:
            return
        by_digest: dict[str | None, RegisteredAdapter] = {
            adapter.digest: adapter for adapter in self._reconciler.store.adapters.values() if adapter.digest in arrived
        }
        for digest, count in arrived.items():
            if (adapter := by_digest.get(digest)) is not None:
                sums = self._sums(hour, adapter.lora_id, digest, adapter.base_model or "")
                sums.fetched_bytes += count * (adapter.size_bytes or 0)
        arrived.clear()

    async def _report(self) -> None:
        """Add what was counted to the ledger. A batch that is not accepted comes again, unchanged."""
        while self._unaccepted is not None or self._rows:
            if self._unaccepted is None:
                self._number += 1
                self._unaccepted = UsageBatch(source=self._source, number=self._number, rows=self._rows)
                self._rows = {}
            try:
                await self._ledger.add([self._unaccepted])
            except OrchestratorError as exc:
                log.warning("usage not written", error=str(exc))
                return
            self._unaccepted = None
