"""What the agent tells others: events for readers that follow it, and the history that the orchestrator is to record.

All of it is numbered from 1 at each start of the agent, and bounded.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from lorafleet.service.numbered_log import NumberedLog
from workers.core.errors import AgentRequestError
from workers.wire import (
    AdapterOperation,
    AdapterOperationKind,
    AgentEvent,
    AgentEventType,
    AgentIncident,
    AgentIncidentKind,
)

_OPERATIONS_KEPT, _INCIDENTS_KEPT = 1000, 200
# In one heartbeat; of operations about 15 KB.
_MOST_OPERATIONS_SENT, _MOST_INCIDENTS_SENT = 50, 20
# Characters of a cause: its beginning, which names it, and the end of the engine's output.
_MOST_HEAD, _MOST_TAIL = 300, 700


class AgentEventLog:
    """One writer, many readers. The stream of a reader that falls out of the log ends."""

    def __init__(
        self,
        *,
        boot_id: str,
        instance_id: str = "",
        size: int,
        now: Callable[[], str],
        on_event: Callable[[AgentEvent], None] = lambda _: None,
    ) -> None:
        """Keep the last `size` events.

        `on_event` is called with each event in the event loop; it must return at once and raise nothing.
        """
        self._boot_id = boot_id
        self._instance_id = instance_id
        self._now = now
        self._on_event = on_event
        self._events = NumberedLog[AgentEvent](size)
        self._is_closed = False

    def add(
        self,
        kind: AgentEventType,
        *,
        lora_id: str | None = None,
        digest: str | None = None,
        engine_name: str | None = None,
        error: str | None = None,
        source: str | None = None,
        done_bytes: int | None = None,
        total_bytes: int | None = None,
    ) -> None:
        """Number an event, keep it, wake the streams and call `on_event`."""
        now = self._now()
        event = AgentEvent(
            id=self._events.next_number,
            type=kind,
            at=now,
            timestamp=now,
            instance_id=self._instance_id,
            lora_id=lora_id,
            digest=digest,
            engine_name=engine_name,
            error=error,
            source=source,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )
        self._events.add(event)
        self._on_event(event)

    def close(self) -> None:
        """End every stream once it has sent the events so far, for good: later readers get none."""
        self._is_closed = True
        self._events.changed.notify()

    def position_after(self, last_event_id: str | None) -> int:
        """The event number in a Last-Event-ID header, to go on after; without the header the newest number.

        raises  AgentRequestError `events_gone` if the id is of another boot, or no longer in the log
        """
        if not last_event_id:
            return self._events.last
        boot, _, number = last_event_id.rpartition(":")
        is_number = number.isascii() and number.isdigit() and len(number) < 20  # int() refuses thousands of digits
        is_ours = boot in {"", self._boot_id} and is_number
        if not is_ours or not self._events.has_all_after(int(number)):
            raise AgentRequestError(
                "events_gone",
                f"no events after {last_event_id[:100]!r} here (this boot's {self._events.oldest} to"
                f" {self._events.last} are kept); read /metadata, then connect without Last-Event-ID",
                param="last-event-id",
            )
        return int(number)

    async def stream(self, after: int, *, keep_alive_s: float, with_files: bool = True) -> AsyncIterator[str]:
        """Server-sent events after a number, until `close` or until the reader falls behind the log.

        Sends a comment every `keep_alive_s`. Ids are `boot_id:number`.

        with_files  False leaves out the events that are about files on the disk alone
        """
        yield ": connected\n\n"
        async for events in self._events.follow(after, idle_s=keep_alive_s, is_over=lambda: self._is_closed):
            for event in events if with_files else filter(_is_of_engine, events):
                yield f"id: {self._boot_id}:{event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"
            if not events:
                yield ": keep-alive\n\n"


def _is_of_engine(event: AgentEvent) -> bool:
    """Whether the event says more than what has become of files on the disk."""
    return event.type not in ("DOWNLOADING", "DOWNLOADED_TO_DISK", "DELETED_FROM_DISK")


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
VERIFYING = Requester(_AGENT, "its files break a rule that it was not held to at its load")
CHECKING = Requester(_AGENT, "checked whether the engine uses it")
PLUGIN = Requester("downloader plugin", "asked by the downloader plugin")


class UnrecordedHistory:
    """What happened on this worker by itself, until the orchestrator has it in its history."""

    def __init__(self, now: Callable[[], str]) -> None:
        self._now = now
        self._operations = NumberedLog[AdapterOperation](_OPERATIONS_KEPT)
        self._incidents = NumberedLog[AgentIncident](_INCIDENTS_KEPT)

    def record_operation(
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
        self._operations.add(
            AdapterOperation(
                id=self._operations.next_number,
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

    def record_incident(
        self, kind: AgentIncidentKind, cause: str = "", *, seconds: float | None = None, adapters: int | None = None
    ) -> None:
        """Keep one incident of the engine or the disk.

        seconds   how long it took or lasted
        adapters  adapters that the engine has again
        """
        self._incidents.add(
            AgentIncident(
                id=self._incidents.next_number,
                at=self._now(),
                kind=kind,
                cause=shortened(cause),
                seconds=seconds,
                adapters=adapters,
            )
        )

    def operations(self) -> tuple[AdapterOperation, ...]:
        """The oldest unrecorded operations: what the next heartbeat sends."""
        return tuple(self._operations.after(0, most=_MOST_OPERATIONS_SENT))

    def incidents(self) -> tuple[AgentIncident, ...]:
        """The oldest unrecorded incidents: what the next heartbeat sends."""
        return tuple(self._incidents.after(0, most=_MOST_INCIDENTS_SENT))

    def forget_recorded(self, *, operations: int, incidents: int) -> None:
        """Forget the operations and the incidents up to these numbers."""
        self._operations.forget_up_to(operations)
        self._incidents.forget_up_to(incidents)


def shortened(cause: str) -> str:
    """The beginning and the end of a long cause; a short one as it is."""
    if len(cause) <= _MOST_HEAD + _MOST_TAIL:
        return cause
    return f"{cause[:_MOST_HEAD]}\n...\n{cause[-_MOST_TAIL:]}"
