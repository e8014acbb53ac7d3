"""Loads and unloads that no orchestrator asked for, kept until the orchestrator has them in its history."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workers.wire import AdapterOperation, AdapterOperationKind

_KEPT = 1000
_MOST_SENT = 50  # in one heartbeat: about 15 KB


@dataclass(frozen=True, slots=True)
class Requester:
    """Who asked for a load or an unload, and why.

    is_leader  the orchestrator, which has it in its history by itself
    """

    name: str
    reason: str
    is_leader: bool = False


def requester(name: str, *, is_leader: bool) -> Requester:
    """The requester of a call to the agent's REST API."""
    return Requester(name, "asked by the orchestrator" if is_leader else "asked at the agent", is_leader)


def made_room(by: Requester, lora_id: str) -> Requester:
    """The requester of a victim's unload: that of the load that it makes room for."""
    return replace(by, reason=f"made room for {lora_id}")


def gave_back(by: Requester, lora_id: str) -> Requester:
    """The requester of a victim's load: the load that evicted it failed."""
    return replace(by, reason=f"the load of {lora_id}, which took its slot, failed")


_AGENT = "agent"
RESTORING = Requester(_AGENT, "loaded before the restart")
REFETCHING = Requester(_AGENT, "its files were lost")
PRELOADING = Requester(_AGENT, "named in preload_loras")
CORRECTING = Requester(_AGENT, "found by the engine's own list: another client did it")
CHECKING = Requester(_AGENT, "checked whether the engine uses it")
PLUGIN = Requester("downloader plugin", "asked by the downloader plugin")


class AdapterOperationLog:
    """Numbered from 1 at each start of the agent; of many, the newest thousand are kept."""

    def __init__(self, now: Callable[[], str]) -> None:
        self._now = now
        self._kept: deque[AdapterOperation] = deque(maxlen=_KEPT)
        self._last = 0

    def record(
        self,
        operation: AdapterOperationKind,
        by: Requester,
        *,
        lora_id: str,
        digest: str,
        duration_s: float | None = None,
        memory_mb: float = 0.0,
        error: str | None = None,
    ) -> None:
        """Keep one load or unload, unless the leader asked for it. `error`: why it failed; None: it is done."""
        if by.is_leader:
            return
        self._last += 1
        self._kept.append(
            AdapterOperation(
                id=self._last,
                at=self._now(),
                operation=operation,
                lora_id=lora_id,
                digest=digest,
                asked_by=by.name,
                reason=by.reason,
                duration_s=duration_s,
                memory_mb=memory_mb,
                error=error,
            )
        )

    def unrecorded(self) -> tuple[AdapterOperation, ...]:
        """The oldest operations that no orchestrator has recorded: what the next heartbeat sends."""
        return tuple(self._kept)[:_MOST_SENT]

    def forget_recorded(self, sent: Sequence[AdapterOperation], up_to: int | None) -> None:
        """Forget the operations up to this number. None: those that were sent, to an orchestrator that records none.

        Operations that were recorded after `sent` was read stay in both cases.
        """
        last = up_to if up_to is not None else sent[-1].id if sent else 0
        while self._kept and self._kept[0].id <= last:
            self._kept.popleft()
