"""The history of changes and incidents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from lorafleet.service.times import unix_text
from orchestrator.model.documents import ServiceDocument


def _unix_time(at: object) -> object:
    """Unix seconds of an ISO 8601 text; anything else unchanged. Raises ValueError for a text that is no time."""
    return datetime.fromisoformat(at).timestamp() if isinstance(at, str) else at


UnixTime = Annotated[float, BeforeValidator(_unix_time), PlainSerializer(unix_text)]
"""Unix seconds; ISO 8601 text in an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One entry of the history. `severity` and `next_step` follow from the kind: REST answers them, no store has them.

    id         grows; 0 while it is not stored
    subject    a lora_id, an alias or a worker; "" for the policy and for incidents of the whole fleet
    actor      who asked
    severity   of an incident; null for changes, loads and unloads
    next_step  what to do about an incident; empty: nothing
    """

    id: int = 0
    at: UnixTime
    kind: str
    subject: str
    actor: str
    body: Mapping[str, Any] = field(default_factory=dict)
    severity: Literal["info", "warning", "error"] | None = None
    next_step: str = ""


class HistoryList(ServiceDocument):
    data: tuple[HistoryEntry, ...]
    next: str | None = None
