"""Where engines have room: which queued requests a pass must decide again, because one of those engines may take them.

A request that cannot be sent is decided to no effect but its place in a line. So a pass asks here first, at a tenth of
a decision's cost, and keeps the line of a request that would certainly go to an engine without room.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from router.core.fleet import Replica, Roster
from router.core.kv.index import WorkerId
from router.core.queue.queued_request import QueuedRequest
from router.core.schedule.cost import engine_queue_s, slot_wait_s
from router.core.schedule.load import LoadBook
from router.core.schedule.load_snapshot import FleetLoad
from router.core.schedule.policy import Decision
from router.core.schedule.request import RoutingRequest

# Rounding: a decision's queue comes with the backlog added and taken off again.
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class _ModelRooms:
    """The replicas of one base model with room for a small request, at one moment; in the roster's order."""

    roster: Roster
    loads: FleetLoad
    now: float
    positions: tuple[int, ...]

    def is_at(self, worker: WorkerId | None) -> bool:
        """Whether this replica has room."""
        return worker is not None and self.roster.positions.get(worker) in self.positions


class EngineRooms:
    """The engines with room, by base model, always as of the load book's last change."""

    def __init__(
        self,
        roster: Callable[[str], Roster],
        load: LoadBook,
        late_binding_s: float,
        may_choose: Callable[[QueuedRequest, Sequence[int], Mapping[WorkerId, float], float], bool],
    ) -> None:
        """
        late_binding_s  an engine has room with at most so many seconds of queued work, or with nothing to do
        may_choose      whether this request's decision may be one of these positions, given the backlog ahead of it;
                        False only where it certainly is not. Such a request's likely replica has no room
        """
        self._roster = roster
        self._load = load
        self._limit_s = late_binding_s + _ROUNDING_S
        self._may_choose = may_choose
        self._known: dict[str, _ModelRooms] = {}
        self._seen: dict[str, tuple[Replica, ...]] = {}

    def is_changed(self, base_models: Collection[str]) -> bool:
        """Whether other replicas, or others' adapters, can serve these base models than at the last call."""
        is_changed = False
        for name in base_models:
            replicas = self._roster(name).replicas
            before = self._seen.get(name)
            if before is not replicas:
                self._seen[name] = replicas
                is_changed = is_changed or before is None or not _serve_alike(before, replicas)
        if len(self._seen) > len(base_models):
            self._seen = {name: self._seen[name] for name in base_models}
            self._known.clear()
        return is_changed

    def is_any(self, base_models: Collection[str], now: float) -> bool:
        """Whether any replica of these base models has room."""
        return any(self._rooms(name, now).positions for name in base_models)

    def might_be_sent(self, queued: QueuedRequest, ahead: Mapping[WorkerId, float], now: float) -> bool:
        """Whether the request's decision may be a replica with room; False only where `keeps_line` would be true."""
        rooms = self._rooms(queued.hashed.request.base_model, now)
        is_likely = rooms.is_at(queued.likely_worker)
        if is_likely and not queued.wants_slot:
            return True
        positions = self._positions_for(queued.hashed.request, rooms)
        return bool(positions) and (is_likely or self._may_choose(queued, positions, ahead, now))

    def keeps_line(self, queued: QueuedRequest, decision: Decision, now: float) -> bool:
        """Whether a request that cannot be sent stays in the line of its likely replica, whatever was decided.

        True where the decided replica has no room for it and the likely one has none for anybody, or a slot is all
        that it waits for. Its line keeps no other request from a room then.
        """
        rooms = self._rooms(queued.hashed.request.base_model, now)
        positions = self._positions_for(queued.hashed.request, rooms)
        if rooms.is_at(queued.likely_worker):
            return queued.wants_slot and not positions
        return decision.position not in positions

    def _rooms(self, base_model: str, now: float) -> _ModelRooms:
        """The rooms of a base model; kept until the time or a load changes."""
        roster = self._roster(base_model)
        loads = self._load.fleet_load(base_model, roster.replicas)
        known = self._known.get(base_model)
        if known is None or known.now != now or known.loads is not loads or known.roster is not roster:
            positions = loads.with_room(now, self._limit_s)
            known = self._known[base_model] = _ModelRooms(roster, loads, now, positions)
        return known

    def _positions_for(self, request: RoutingRequest, rooms: _ModelRooms) -> list[int]:
        """The positions with room for this very request: its adapter, its slot and its KV."""
        able, found = rooms.roster.able(request.engine_name), []
        for position in rooms.positions:
            if position in able:
                if rooms.loads.resting[position] is not None:
                    found.append(position)
                    continue
                load = rooms.loads[position]
                wait_s = engine_queue_s(request, load, rooms.now) + slot_wait_s(request, load, rooms.now)
                if wait_s <= self._limit_s or not load.all_in_flight:
                    found.append(position)
        return found


def _serve_alike(before: Sequence[Replica], after: Sequence[Replica]) -> bool:
    """Whether these replicas serve what those before did: mostly they are the same but for their reports."""
    return len(before) == len(after) and all(
        old is new
        or (
            old.incarnation == new.incarnation
            and old.state == new.state
            and old.residents is new.residents
            and old.draining == new.draining
            and old.refusal == new.refusal
        )
        for old, new in zip(before, after, strict=True)
    )
