"""The bytes of request bodies that a server holds, in all and for each tenant, and when there is room for another one.

Pure: time is an argument.
"""

from collections import Counter
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

# Over how long the bodies' stay is measured. A guess, nothing measured: some answers, and not a day's.
_HORIZON_S = 60.0
# Of the held bytes, the share that counts as answered where less was: a stay is taken for at most four times as long as
# it was seen to be.
_LEAST_ANSWERED = 0.25
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
_MOST_LINES = 1000
# The line of all tenants together. No tenant is named so: names in key files are not None.
_ALL = None

_Line = str | None


class BodyRefusal(NamedTuple):
    """Why a body does not fit, and the seconds after which it should."""

    why: str
    retry_s: float


@dataclass(slots=True)
class _Stay:
    """How long bodies are held, by their bytes; older ones fade. `byte_s` / `answered_bytes` is the mean stay."""

    byte_s: float = 0.0
    answered_bytes: float = 0.0

    def advance(self, held_bytes: int, answered_bytes: int, passed_s: float) -> None:
        """Add `passed_s` in which so many bytes were held, and so many were answered."""
        fading = exp(-passed_s / _HORIZON_S)
        self.byte_s = self.byte_s * fading + held_bytes * passed_s
        self.answered_bytes = self.answered_bytes * fading + answered_bytes

    def seconds(self, held_bytes: int) -> float:
        """The mean stay of a byte among so many."""
        return self.byte_s / max(self.answered_bytes, _LEAST_ANSWERED * held_bytes, 1.0)


class BodyRoom:
    """Counts the bytes of bodies from their arrival to the end of their answer, within two bounds.

    held_bytes      of all
    held_of_tenant  of each tenant that has any; empty without a bound for tenants
    """

    def __init__(self, most_bytes: int, tenant_bytes: int | None = None) -> None:
        """most_bytes: of all bodies; tenant_bytes: of one tenant's, None: no bound"""
        self.held_bytes = 0
        self.held_of_tenant: Counter[str] = Counter()
        self._most_bytes = most_bytes
        self._tenant_bytes = tenant_bytes
        self._answered: Counter[_Line] = Counter()
        self._stays: dict[_Line, _Stay] = {}
        self._promised: dict[_Line, float] = {}
        self._at: float | None = None

    @property
    def measured_lines(self) -> int:
        """Lines whose stay is remembered: tenants, and all together."""
        return len(self._stays)

    def hold(self, tenant: str, size_bytes: int) -> bool:
        """Count bytes until `release`; whether all are within the bounds."""
        self.held_bytes += size_bytes
        if self._tenant_bytes is None:
            return self.held_bytes <= self._most_bytes
        self.held_of_tenant[tenant] += size_bytes
        return self.held_bytes <= self._most_bytes and self.held_of_tenant[tenant] <= self._tenant_bytes

    def release(self, tenant: str, size_bytes: int, *, is_answered: bool) -> None:
        """Count bytes no longer. `is_answered`: of a whole body, not of one that was refused or broken off."""
        self.held_bytes -= size_bytes
        if is_answered:
            self._answered[_ALL] += size_bytes
        if self._tenant_bytes is None:
            return
        self.held_of_tenant[tenant] -= size_bytes
        if not self.held_of_tenant[tenant]:
            del self.held_of_tenant[tenant]
        if is_answered:
            self._answered[tenant] += size_bytes

    def advance(self, now: float) -> None:
        """Measure the time since the last call, at least once a second; forget lines without bytes for long."""
        passed_s = 0.0 if self._at is None else min(max(0.0, now - self._at), _HORIZON_S)
        self._at = now
        for line in {_ALL, *self.held_of_tenant, *self._answered, *self._stays}:
            stay = self._stays.setdefault(line, _Stay())
            held = self.held_bytes if line is _ALL else self.held_of_tenant.get(line, 0)
            stay.advance(held, self._answered[line], passed_s)
            if not held and stay.byte_s < 1.0:
                del self._stays[line]
        self._answered.clear()
        if len(self._promised) > _MOST_LINES:
            self._promised = {line: until for line, until in self._promised.items() if until > now}

    def refusal(self, tenant: str, own_bytes: int, whole_bytes: int, now: float) -> BodyRefusal:
        """Why a body does not fit, and the seconds after which it should, behind those that were refused before.

        own_bytes    of the body, held already
        whole_bytes  of the whole body
        """
        self.advance(now)
        own = "of requests"
        retry_s = 0.0
        if self.held_bytes > self._most_bytes:
            retry_s = self._retry_s(_ALL, self.held_bytes - own_bytes, self._most_bytes, whole_bytes, now)
        if self._tenant_bytes is not None and (held := self.held_of_tenant[tenant]) > self._tenant_bytes:
            own = own if retry_s else "of your requests"
            of_tenant_s = self._retry_s(tenant, held - own_bytes, self._tenant_bytes, whole_bytes, now)
            retry_s = max(retry_s, of_tenant_s)
        return BodyRefusal(f"this server holds as many bytes {own} as it may", retry_s)

    def _retry_s(self, line: _Line, others_bytes: int, most_bytes: int, whole_bytes: int, now: float) -> float:
        """Seconds until a body of `whole_bytes` fits beside the others of its line; remembered as promised."""
        stay = self._stays.get(line, _Stay())
        byte_s = stay.seconds(others_bytes) / max(others_bytes, 1)
        first_s = max(_LEAST_RETRY_S, byte_s * (others_bytes + whole_bytes - most_bytes))
        until = max(now + first_s, self._promised.get(line, 0.0) + byte_s * whole_bytes)
        self._promised[line] = until = min(until, now + _MOST_RETRY_S)
        return until - now
