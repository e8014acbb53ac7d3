"""The history of changes and incidents."""

from typing import Any, Literal

from orchestrator.model.documents import ServiceDocument


class HistoryItem(ServiceDocument):
    """One entry of the history.

    subject    a lora_id, an alias or a worker; "" for the policy and for incidents of the whole fleet
    severity   of an incident; null for changes, loads and unloads
    next_step  what to do about an incident; empty: nothing
    """

    id: int
    at: str
    kind: str
    subject: str
    actor: str
    body: dict[str, Any]
    severity: Literal["info", "warning", "error"] | None = None
    next_step: str = ""


class HistoryList(ServiceDocument):
    data: tuple[HistoryItem, ...]
    next: str | None = None
