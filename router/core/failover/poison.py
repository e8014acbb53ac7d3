"""What engines died of, requests or adapters: held back for longer each time, and then tried alone.

An engine that dies takes down all that it was computing, and what killed it is sent once more, alone (see
`router.request.run`). That bounds what a request can do, not what its client can: many send again, by themselves,
what got a 503. So what was in two engines when they died, and was not answered in between, is sent to none for a
while; and so are the requests for an adapter of which three died.

Pure: time is an argument.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf

from router.core.errors import PoisonRequestHeld
from router.core.fleet import Incarnation

_MOST_HOLD_S = 3600.0
# Whatever has killed nothing for so long, and is not held back, is as good as any other.
_FORGET_S = 600.0
# Of a large engine some hundred at a time.
_MOST = 4096


@dataclass(slots=True)
class _Suspect:
    engines: list[Incarnation] = field(default_factory=list)
    seen_at: float = -inf
    hold_s: float = 0.0
    held_until: float = -inf


class PoisonRequests:
    """Suspects of one kind, by a digest or a name.

    suspects  empty where no engine has died of late: then nothing need be asked, and no digest made
    """

    def __init__(self, what: str, *, enough: int, hold_s: float) -> None:
        """
        what    in the message
        enough  engines that died of it: one says little, so many other requests were there
        hold_s  for how long it is held back first; 0.0: never
        """
        self._what = what
        self._enough = enough
        self._hold_s = hold_s
        self.suspects: dict[Hashable, _Suspect] = {}

    def check_held(self, which: Hashable, now: float) -> bool:
        """Whether it was held back, and is now to be tried, alone; raises PoisonRequestHeld."""
        suspect = self.suspects.get(which)
        if suspect is None:
            return False
        left_s = suspect.held_until - now
        if left_s > 0:
            raise PoisonRequestHeld(
                f"{len(suspect.engines)} engines died while {self._what} in them, so that none is given more of it for"
                f" {left_s:.0f} s",
                retry_after_s=left_s,
            )
        # The next one not before it is known what came of this one, or as long again.
        suspect.held_until = now + suspect.hold_s
        return suspect.hold_s > 0

    def record_death(self, which: Hashable, engine: Incarnation, now: float, *, sent_at: float) -> float:
        """An engine died with it; for how many seconds it is held back now.

        sent_at  when it was sent there: what was under way in several when they went with their node speaks once
        """
        suspect = self.suspects.pop(which, None) or _Suspect()
        self.suspects[which] = suspect
        if sent_at >= suspect.seen_at and engine not in suspect.engines:
            suspect.seen_at = now
            suspect.engines.append(engine)
            if len(suspect.engines) >= self._enough:
                suspect.hold_s = min(_MOST_HOLD_S, 2 * suspect.hold_s or self._hold_s)
                suspect.held_until = now + suspect.hold_s
        if len(self.suspects) > _MOST:
            del self.suspects[next(iter(self.suspects))]
        return max(0.0, suspect.held_until - now)

    def clear(self, which: Hashable) -> None:
        """An engine answered it, to its end."""
        self.suspects.pop(which, None)

    def forget(self, now: float) -> None:
        """Drop what has killed nothing for long; once in a while."""
        old = [
            which
            for which, suspect in self.suspects.items()
            if now - max(suspect.seen_at, suspect.held_until) > _FORGET_S
        ]
        for which in old:
            del self.suspects[which]
