"""The audit log: every load, unload and inspection with its requester, reason and result.

Each is one structured log line and, inspections excepted, one entry in the store's history.
"""

from collections import Counter
from collections.abc import Sequence

import structlog

from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from orchestrator.core.plan import WorkerAction
from orchestrator.store.store import NOBODY, IntentStore
from workers.wire import AdapterOperation, Metadata

log = structlog.get_logger()


class AuditLog:
    """Records how actions ended, and on whose behalf they ran.

    loads  (lora_id, worker_id) -> loads since the ledger took this
    """

    def __init__(self, store: IntentStore) -> None:
        self._store = store
        self.loads: Counter[tuple[str, str]] = Counter()
        self._asked_by: dict[str, str] = {}
        self._recorded: dict[str, tuple[str, int]] = {}  # worker_id -> agent's boot id, last operation recorded

    def note_requester(self, lora_id: str, by: str) -> None:
        """Record who requested a load or deletion of the adapter; actions on it count as theirs from now on."""
        self._asked_by[lora_id] = by

    def forget_requester(self, lora_id: str) -> None:
        """Forget the adapter's requester: the request is met."""
        self._asked_by.pop(lora_id, None)

    def requester(self, lora_id: str) -> str:
        """Who requested the adapter last, until the request is met; else the orchestrator itself."""
        return self._asked_by.get(lora_id, NOBODY)

    def record_action(
        self,
        action: WorkerAction,
        *,
        requester: str,
        outcome: str,
        duration_s: float,
        code: str = "",
        error: str = "",
        note: str = "",
    ) -> None:
        """Log an action's end; store it in the history if it is a load, an unload or a drain.

        outcome  ok, refused, failed, timeout, error or dropped
        note     what the agent says of an adapter that is loaded
        """
        body = {
            "worker_id": action.worker_id,
            "outcome": outcome,
            "duration_sec": round(duration_s, 3),
            "reason": action.reason,
            "epoch": self._store.epoch,
        }
        if action.operation == "load" and outcome == "ok":
            self.loads[action.lora_id, action.worker_id] += 1
        body |= {"evict": action.evict} if action.evict else {}
        body |= {"code": code, "error": error} if code else {}
        body |= {"note": note} if note else {}
        write = log.info if outcome == "ok" else log.warning
        write(action.operation, lora_id=action.lora_id, asked_by=requester, **body)
        if action.operation not in ("inspect", "fetch", "check"):
            self._store.record(action.operation, action.lora_id, body, requester)

    def record_eviction(self, lora_id: str, worker_id: str, *, made_room_for: str, requester: str) -> None:
        """Log and store that a load's victim was unloaded by the agent as part of the load."""
        body = {"worker_id": worker_id, "outcome": "ok", "reason": f"made room for {made_room_for}"}
        log.info("unload", lora_id=lora_id, asked_by=requester, **body)
        self._store.record("unload", lora_id, body | {"epoch": self._store.epoch}, requester)

    def record_agent_operations(self, report: Metadata, operations: Sequence[AdapterOperation]) -> int:
        """Store loads and unloads that an agent did without us, each once; returns the number up to which it has them.

        Nothing is stored while the store cannot be written, which is logged: the agent sends them again.
        """
        boot_id, last = self._recorded.get(report.instance_id, ("", 0))
        last = last if boot_id == report.agent_boot_id else 0
        new = [operation for operation in operations if operation.id > last]
        try:
            with self._store.together():
                for operation in new:
                    body = {
                        "worker_id": report.instance_id,
                        "outcome": "ok" if operation.error is None else "failed",
                        "at": operation.at,
                        "reason": operation.reason,
                        "memory_mb": operation.memory_mb,
                    }
                    body |= {} if operation.duration_s is None else {"duration_sec": round(operation.duration_s, 3)}
                    body |= {} if operation.error is None else {"error": operation.error}
                    self._store.record(operation.operation, operation.lora_id, body, operation.asked_by)
        except (StoreError, OrchestratorUnavailable) as exc:
            log.warning("result of an action not recorded", error=str(exc))
            return last
        loads = [each for each in new if each.operation == "load" and each.error is None]
        self.loads.update((each.lora_id, report.instance_id) for each in loads)
        last = max([last, *(operation.id for operation in new)])
        self._recorded[report.instance_id] = report.agent_boot_id, last
        return last
