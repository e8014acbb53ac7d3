"""The audit log: every load, unload and inspection with its requester, reason and result.

Each is one structured log line and, inspections excepted, one entry in the store's history.
"""

import structlog

from orchestrator.core.plan import WorkerAction
from orchestrator.store.store import NOBODY, IntentStore

log = structlog.get_logger()


class AuditLog:
    """Records how actions ended, and on whose behalf they ran."""

    def __init__(self, store: IntentStore) -> None:
        self._store = store
        self._asked_by: dict[str, str] = {}

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
        self, action: WorkerAction, *, requester: str, outcome: str, duration_s: float, code: str = "", error: str = ""
    ) -> None:
        """Log an action's end; store it in the history unless it is an inspection.

        outcome  ok, refused, failed, timeout, error or dropped
        """
        body = {
            "worker_id": action.worker_id,
            "outcome": outcome,
            "duration_sec": round(duration_s, 3),
            "reason": action.reason,
            "epoch": self._store.epoch,
        }
        body |= {"evict": action.evict} if action.evict else {}
        body |= {"code": code, "error": error} if code else {}
        write = log.info if outcome == "ok" else log.warning
        write(action.operation, lora_id=action.lora_id, asked_by=requester, **body)
        if action.operation != "inspect":
            self._store.record(action.operation, action.lora_id, body, requester)

    def record_eviction(self, lora_id: str, worker_id: str, *, made_room_for: str, requester: str) -> None:
        """Log and store that a load's victim was unloaded by the agent as part of the load."""
        body = {"worker_id": worker_id, "outcome": "ok", "reason": f"made room for {made_room_for}"}
        log.info("unload", lora_id=lora_id, asked_by=requester, **body)
        self._store.record("unload", lora_id, body | {"epoch": self._store.epoch}, requester)
