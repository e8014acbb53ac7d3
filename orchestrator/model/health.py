"""The answer of health checks."""

from orchestrator.model.documents import ServiceDocument
from orchestrator.model.names import WIRE


class Status(ServiceDocument):
    """`GET /health` and `/ready`. `leader`: URL of the leading orchestrator, if known."""

    status: str
    epoch: int
    revision: int
    is_leading: bool = True
    leader: str | None = None
    wire: int = WIRE
