"""How many connections to open to each engine ahead of the next burst of requests. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from router.http.engine_connection import Origin

# Seconds for which a spare connection is kept, and for which the most that were in use is remembered.
_KEEP_S = 60.0


@dataclass(slots=True)
class SpareBook:
    """The connections that were in use at each engine lately, and so many are to be open.

    An engine closes a connection soon after an answer (vLLM 0.32 after 5 s), but not one that had no request yet. So
    after a burst its connections are replaced by unused ones, and the next burst need not connect: 64 connections take
    a router 5 to 10 ms of CPU.

    most    spare connections per engine at most; 0: none
    """

    most: int
    keep_s: float = _KEEP_S
    _peaks: dict[Origin, tuple[int, float]] = field(default_factory=dict)
    _none_until: dict[Origin, float] = field(default_factory=dict)

    def record_used(self, used: Mapping[Origin, int], now: float) -> None:
        """Record the open connections that have had a request: as many as were in use at once in the last seconds."""
        for origin in [*self._peaks, *used]:
            count, at = self._peaks.get(origin, (0, now))
            current = used.get(origin, 0)
            if current >= count or now - at > self.keep_s:
                count, at = current, now
            if count:
                self._peaks[origin] = count, at
            else:
                self._peaks.pop(origin, None)

    def record_closed(self, origin: Origin, now: float, deadline: float) -> None:
        """Record that a spare connection is closed: if before its deadline, its engine gets none for a while."""
        if now < deadline:
            self._none_until[origin] = now + self.keep_s

    def missing(
        self, used: Mapping[Origin, int], spare: Mapping[Origin, int], now: float, *, at_most: int
    ) -> Iterator[Origin]:
        """The origin of each connection to open now, in turns of the engines, `at_most` in all."""
        self._none_until = {origin: until for origin, until in self._none_until.items() if until > now}
        left = {
            origin: min(count, self.most) - used.get(origin, 0) - spare.get(origin, 0)
            for origin, (count, _) in self._peaks.items()
            if origin not in self._none_until
        }
        while at_most > 0 and (wanting := [origin for origin, count in left.items() if count > 0]):
            for origin in wanting[:at_most]:
                left[origin] -= 1
                yield origin
            at_most -= len(wanting)
