"""Poison requests and adapters: those that engines died of are held back, longer each time, and then tried alone.

An engine that dies fails all requests in flight there, and each suspect is retried once, alone (`router.request.run`).
That bounds what one request can do; but clients send again what got a 503. So a request that was in flight at two
engines when they died, without an answer in between, is held back for a while. So are the requests of an adapter that
was in flight at three.

Pure: time is an argument.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf

from router.core.errors import PoisonRequestHeld
from router.core.fleet import Incarnation

_MAX_HOLD_S = 3600.0
# A suspect that is not held back is forgotten so long after the last death.
_FORGET_S = 600.0
# Suspects remembered; the death of one large engine adds some hundred.
_MAX_SUSPECTS = 4096


@dataclass(slots=True)
class _Suspect:
    engines: list[Incarnation] = field(default_factory=list)
    seen_at: float = -inf
    hold_s: float = 0.0
    held_until: float = -inf


class PoisonRequests:
    """Suspects of one kind, by a request's digest or an adapter's name.

    suspects  empty where no engine died lately: then no digest need be computed
    """

    def __init__(self, what: str, *, enough: int, hold_s: float) -> None:
        """
        what    subject of the error message, as in "this request was"
        enough  deaths after which a suspect is held back: one says little, because many other requests were in flight
        hold_s  seconds of the first hold, which doubles with each further death; 0.0: no hold
        """
        self._what = what
        self._enough = enough
        self._hold_s = hold_s
        self.suspects: dict[Hashable, _Suspect] = {}

    def check_held(self, suspect_id: Hashable, now: float) -> bool:
        """Whether a suspect was held back and must now be tried alone; raises PoisonRequestHeld while it is held.

        True also holds it back again, so that the next trial waits for the end of this one.
        """
        suspect = self.suspects.get(suspect_id)
        if suspect is None:
            return False
        left_s = suspect.held_until - now
        if left_s > 0:
            raise PoisonRequestHeld(
                f"{len(suspect.engines)} engines died while {self._what} in them, so that none is given more of it for"
                f" {left_s:.0f} s",
                retry_after_s=left_s,
            )
        # The next trial must wait for this one's end, or as long again.
        suspect.held_until = now + suspect.hold_s
        return suspect.hold_s > 0

    def record_death(self, suspect_id: Hashable, engine: Incarnation, now: float, *, sent_at: float) -> float:
        """Record that an engine died with this suspect in flight; returns for how many seconds it is held back now.

        Forgets the oldest suspect beyond the bound.
        sent_at  when the suspect was sent to that engine. Engines that were lost together with their node count once
        """
        suspect = self.suspects.pop(suspect_id, None) or _Suspect()
        self.suspects[suspect_id] = suspect
        if sent_at >= suspect.seen_at and engine not in suspect.engines:
            suspect.seen_at = now
            suspect.engines.append(engine)
            if len(suspect.engines) >= self._enough:
                suspect.hold_s = min(_MAX_HOLD_S, 2 * suspect.hold_s or self._hold_s)
                suspect.held_until = now + suspect.hold_s
        if len(self.suspects) > _MAX_SUSPECTS:
            del self.suspects[next(iter(self.suspects))]
        return max(0.0, suspect.held_until - now)

    def clear(self, suspect_id: Hashable) -> None:
        """Forget a suspect, because an engine answered it to the end."""
        self.suspects.pop(suspect_id, None)

    def forget(self, now: float) -> None:
        """Drop suspects without a death or hold for ten minutes; call once in a while."""
        old = [
            suspect_id
            for suspect_id, suspect in self.suspects.items()
            if now - max(suspect.seen_at, suspect.held_until) > _FORGET_S
        ]
        for suspect_id in old:
            del self.suspects[suspect_id]
