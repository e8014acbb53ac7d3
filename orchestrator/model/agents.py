"""Heartbeats of agents, and their answers."""

from typing import Annotated

from pydantic import FailFast, Field

from orchestrator.model.documents import ServiceDocument
from orchestrator.model.names import WIRE
from workers.wire import AdapterOperation, AgentIncident, HeldFiles, Metadata


class Heartbeat(ServiceDocument):
    """`POST /v1/workers/register`: an agent's heartbeat.

    operations  the oldest loads and unloads that no orchestrator asked for and that none has recorded
    incidents   the oldest incidents that no orchestrator has recorded
    agents_digest  of the list of agents that it has; the answer has the list if it is another
    uses_seen   the `uses_number` of the last answer
    """

    metadata: Metadata
    files: HeldFiles
    agents_digest: str = ""
    uses_seen: int = 0
    operations: Annotated[tuple[AdapterOperation, ...], FailFast()] = Field(default=(), max_length=1000)
    incidents: Annotated[tuple[AgentIncident, ...], FailFast()] = Field(default=(), max_length=1000)
    wire: int = WIRE


class HeartbeatAnswer(ServiceDocument):
    """The answer to a heartbeat.

    interval_s  when to send the next one
    is_warm     the worker need load nothing more before it is ready
    in_flight   requests of routers at its engine
    uses        requests that routers have sent to it since the answer with `uses_seen`, by adapter; `uses_number`: of
                this answer, the same while there is nothing new
    recorded    `id` up to which the agent's operations are in the history; `recorded_incidents`: its incidents
    files_seen  number up to which the changes of its files are known
    agents      URLs of the fleet's agents, so that it can fetch from them by itself; null: as in `agents_digest`
    """

    epoch: int
    revision: int
    interval_s: float
    recorded: int = 0
    recorded_incidents: int = 0
    is_warm: bool = True
    in_flight: int = 0
    uses: dict[str, int] = Field(default_factory=dict)
    uses_number: int = 0
    files_seen: int = 0
    agents: tuple[str, ...] | None = None
    agents_digest: str = ""
    wire: int = WIRE
