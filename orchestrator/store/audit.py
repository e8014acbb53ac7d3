"""The audit log: every load, unload and inspection with who asked, why, and what came of it.

One structured log line each, and one entry in the store's history, where each kind keeps its newest ones.
"""

import structlog

from orchestrator.core.plan import WorkerAction
from orchestrator.store.store import NOBODY, IntentStore

log = structlog.get_logger()


class AuditLog:
    """Writes down how actions ended. `asked_by`: lora_id -> who wants it loaded, or gone."""

    def __init__(self, store: IntentStore) -> None:
        self._store = store
        self._asked_by: dict[str, str] = {}

    def asked(self, lora_id: str, by: str) -> None:
        """Who wants this adapter loaded, or gone."""
        self._asked_by[lora_id] = by

    def served(self, lora_id: str) -> None:
        """That is done: what happens to it from now on is the orchestrator's own doing."""
        self._asked_by.pop(lora_id, None)

    def who(self, lora_id: str) -> str:
        """Whoever asked for this adapter last, and is not served yet; else the orchestrator's own policy."""
        return self._asked_by.get(lora_id, NOBODY)

    def ended(
        self, action: WorkerAction, *, who: str, outcome: str, duration_s: float, code: str = "", error: str = ""
    ) -> None:
        """Note the end of an action. outcome: ok, refused, failed, timeout, error or dropped."""
        what = {
            "worker_id": action.worker_id,
            "outcome": outcome,
            "duration_sec": round(duration_s, 3),
            "reason": action.reason,
            "epoch": self._store.epoch,
        }
        what |= {"evict": action.evict} if action.evict else {}
        what |= {"code": code, "error": error} if code else {}
        write = log.info if outcome == "ok" else log.warning
        write(action.operation, lora_id=action.lora_id, asked_by=who, **what)
        if action.operation != "inspect":
            self._store.record(action.operation, action.lora_id, what, who)

    def evicted(self, lora_id: str, worker_id: str, *, made_room_for: str, who: str) -> None:
        """The named victim of a load went with it: an unload that no call of ours of its own made."""
        what = {"worker_id": worker_id, "outcome": "ok", "reason": f"made room for {made_room_for}"}
        log.info("unload", lora_id=lora_id, asked_by=who, **what)
        self._store.record("unload", lora_id, what | {"epoch": self._store.epoch}, who)
