"""What happened to the engine and the disk by itself, kept until the orchestrator has it in its history."""

from collections import deque
from collections.abc import Callable, Sequence

from workers.wire import AgentIncident, AgentIncidentKind

_KEPT = 200
_MOST_SENT = 20  # in one heartbeat
# Characters of a cause: its beginning, which names it, and the end of the engine's output.
_MOST_HEAD, _MOST_TAIL = 300, 700


class AgentIncidentLog:
    """Numbered from 1 at each start of the agent; of many, the newest two hundred are kept."""

    def __init__(self, now: Callable[[], str]) -> None:
        self._now = now
        self._kept: deque[AgentIncident] = deque(maxlen=_KEPT)
        self._last = 0

    def record(
        self, kind: AgentIncidentKind, cause: str = "", *, seconds: float | None = None, adapters: int | None = None
    ) -> None:
        """Keep one incident.

        seconds   how long it took or lasted
        adapters  adapters that the engine has again
        """
        self._last += 1
        self._kept.append(
            AgentIncident(
                id=self._last,
                at=self._now(),
                kind=kind,
                cause=shortened(cause),
                seconds=seconds,
                adapters=adapters,
            )
        )

    def unrecorded(self) -> tuple[AgentIncident, ...]:
        """The oldest incidents that no orchestrator has recorded: what the next heartbeat sends."""
        return tuple(self._kept)[:_MOST_SENT]

    def forget_recorded(self, sent: Sequence[AgentIncident], up_to: int | None) -> None:
        """Forget the incidents up to this number. None: those that were sent, to an orchestrator that records none."""
        last = up_to if up_to is not None else sent[-1].id if sent else 0
        while self._kept and self._kept[0].id <= last:
            self._kept.popleft()


def shortened(cause: str) -> str:
    """The beginning and the end of a long cause; a short one as it is."""
    if len(cause) <= _MOST_HEAD + _MOST_TAIL:
        return cause
    return f"{cause[:_MOST_HEAD]}\n...\n{cause[-_MOST_TAIL:]}"
