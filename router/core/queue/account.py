"""The account of a key or tenant that has limits: its token buckets, what runs, and this router's shares of them. Pure.

Requests, tokens and bytes a minute are token buckets that hold a minute's worth, so that a burst may take it all at
once. A bucket may go into debt, which is paid off first. Of each limit a router has a share, which the leader leases to
it (orchestrator/core/limit_leases.py): the whole one where it is alone. A share that grows lets the bucket fill faster;
it does not fill it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import exp, floor, inf
from typing import NamedTuple, Protocol

from orchestrator.model.limits import AccountLimits
from orchestrator.model.usage import LimitShares, LimitUse

MINUTE_S = 60.0
ROUNDING = 1e-6
"""A client that comes back exactly at its Retry-After is not refused for a rounding error."""
# A share that is too small for a request has grown by then where the limit has room elsewhere: reports are a second
# apart, and a share moves in three of them.
_MOVED_S = 3.0
# Demand is weighted over this time.
_DEMAND_WINDOW_S = 2.0
# A demand below this is none.
_NO_DEMAND = 0.01


class AccountState(NamedTuple):
    """An account as one process left it.

    turn      orders writes of the same moment
    requests, tokens, body_bytes   levels of the buckets; inf without that limit
    running   requests of this process
    """

    at: float
    turn: int
    requests: float
    tokens: float
    running: int
    body_bytes: float = inf


class SharedAccountStates(Protocol):
    """The account states that the processes of one port share (processes/shared_quotas.py); one clock for all."""

    @property
    def processes(self) -> int:
        """Processes that share them."""

    def states(self, account_id: str) -> Iterable[AccountState]:
        """The states of an account in the other processes."""

    def publish(self, account_id: str, state: AccountState) -> None:
        """Write this process's state of an account, for the others to read."""


@dataclass(slots=True)
class TokenBucket:
    """A token bucket that fills in a minute. `level` as of `at`; below zero it is a debt.

    limit   a minute, of which this router has the `share`
    taken   since the last report of its use
    """

    limit: float
    share: float
    level: float
    at: float
    taken: float = 0.0

    @property
    def size(self) -> float:
        """What the full bucket holds: of the smallest share one request."""
        return max(1.0, self.limit * self.share)

    def fill(self, now: float) -> float:
        """Fill the bucket for the time since the last call; returns its level."""
        self.level = min(self.size, self.level + max(0.0, now - self.at) * self.limit * self.share / MINUTE_S)
        self.at = max(self.at, now)
        return self.level

    def take(self, amount: float) -> None:
        """Take an amount out, which may leave a debt; below 0 it is given back."""
        self.level -= amount
        self.taken += amount

    def seconds_until(self, level: float, now: float) -> float:
        """Seconds until the bucket reaches this level, or until its share has grown. Fills it up to now first."""
        missing = level - self.fill(now)
        whole_s = missing * MINUTE_S / self.limit
        return whole_s if self.share >= 1 else min(missing * MINUTE_S / self._rate(), max(whole_s, _MOVED_S))

    def _rate(self) -> float:
        """What flows in a minute; more than 0, so that a time can be told."""
        return max(self.limit * self.share, 1e-9)

    def resize(self, limit: float, now: float) -> None:
        """Change the limit. Keeps what was taken; a debt takes as long to pay off as before."""
        level, before = self.fill(now), self.size
        self.limit = limit
        self.level = max(0.0, level + self.size - before) if level >= 0 else level * self.size / before

    def set_share(self, share: float, now: float) -> None:
        """Change the share. Nothing flows in by it, and what is beyond the new size is lost."""
        self.fill(now)
        self.share = share
        self.fill(now)


@dataclass(slots=True)
class Account:
    """The account of a key or tenant.

    running, elsewhere   requests that run in this process, and in others
    concurrent_share     this router's share of the requests at once
    least_at_once        requests that may run at once however small the share is
    at, turn             when any process last changed it
    granted, refused     requests since the last report of its use; `most_running` of them at a time, or tried
    demands              limit -> its demand, weighted over `_DEMAND_WINDOW_S`
    """

    id: str
    limits: AccountLimits
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    body_bytes: TokenBucket | None = None
    running: int = 0
    elsewhere: int = 0
    concurrent_share: float = 1.0
    least_at_once: int = 1
    at: float = -inf
    turn: int = 0
    granted: int = 0
    refused: int = 0
    most_running: int = 0
    demands: dict[str, float] = field(default_factory=dict)

    def buckets(self) -> Iterator[tuple[str, TokenBucket]]:
        """The buckets that there are, by the names of their limits."""
        for limit, bucket in (
            ("requests_per_minute", self.requests),
            ("tokens_per_minute", self.tokens),
            ("bytes_per_minute", self.body_bytes),
        ):
            if bucket is not None:
                yield limit, bucket

    def room_at_once(self) -> float:
        """Further requests that may run now; inf without that limit."""
        most = self.limits.concurrent_requests
        if most is None:
            return inf
        return max(self.least_at_once, floor(most * self.concurrent_share + ROUNDING)) - self.running - self.elsewhere

    def begin(self, requests: int, *, slots: int) -> None:
        """Count requests as granted, of which `slots` run at a time. Their bucket has been filled."""
        if self.requests is not None:
            self.requests.take(requests)
        self.granted += requests
        self.running += slots
        self.most_running = max(self.most_running, self.running)

    def give_back(self, requests: int, now: float) -> None:
        """Put requests back that were taken and did not begin."""
        if self.requests is not None:
            self.requests.fill(now)
            self.requests.take(-requests)
            self.requests.fill(now)

    def state(self, now: float) -> AccountState:
        """This account, for other processes."""
        return AccountState(
            self.at,
            self.turn,
            inf if self.requests is None else self.requests.fill(now),
            inf if self.tokens is None else self.tokens.fill(now),
            self.running,
            inf if self.body_bytes is None else self.body_bytes.fill(now),
        )

    def read(self, states: Iterable[AccountState]) -> None:
        """Note what other processes run, and take the levels of the buckets over where theirs are newer."""
        last, self.elsewhere = None, 0
        for left in states:
            self.elsewhere += left.running
            if (left.at, left.turn) > (self.at, self.turn):
                last, self.at, self.turn = left, left.at, left.turn
        if last is not None:
            for bucket, level in (
                (self.requests, last.requests),
                (self.tokens, last.tokens),
                (self.body_bytes, last.body_bytes),
            ):
                if bucket is not None:
                    bucket.level, bucket.at = level, last.at

    def set_shares(self, shares: LimitShares, now: float) -> None:
        """Go by these shares from now on."""
        for limit, bucket in self.buckets():
            if (share := shares.of(limit_name(limit, self.id))) != bucket.share:
                bucket.set_share(share, now)
        self.set_concurrent_share(shares)

    def set_concurrent_share(self, shares: LimitShares) -> None:
        """Go by this share of the requests at once. One may run until the limit is shared out by demand."""
        limit = limit_name("concurrent_requests", self.id)
        self.concurrent_share = shares.of(limit)
        self.least_at_once = 0 if limit in shares.shares else 1

    def uses(self, over_s: float) -> Iterator[tuple[str, LimitUse]]:
        """The use of each limit by its name, over these seconds. Begins to count anew.

        Where some requests were refused, the demand is what all would have used.
        """
        granted = max(0, self.granted)
        scale = (granted + self.refused) / granted if granted else 1.0
        least = 1.0 if self.refused and not granted else 0.0
        weight = 1 - exp(-over_s / _DEMAND_WINDOW_S)
        for limit, bucket in self.buckets():
            used, bucket.taken = max(0.0, bucket.taken) * MINUTE_S / over_s / bucket.limit, 0.0
            yield self._use(limit, max(least, used * scale), weight, bucket.share)
        most = self.limits.concurrent_requests
        if most is not None:
            used = max(self.most_running, self.running) / most
            share = min(1.0, max(self.concurrent_share, (self.running + self.elsewhere) / most))
            yield self._use("concurrent_requests", max(least, used * scale), weight, share, 1 / most)
        self.granted = self.refused = self.most_running = 0

    def _use(self, limit: str, demand: float, weight: float, share: float, unit: float = 0.0) -> tuple[str, LimitUse]:
        """The use of one limit by its name; notes its weighted demand."""
        before = self.demands.get(limit, 0.0)
        self.demands[limit] = weighted = before + (demand - before) * weight
        return limit_name(limit, self.id), LimitUse(demand=weighted, share=share, unit=unit)

    def is_in_demand(self) -> bool:
        """Whether it was used since the last report, or a while ago."""
        return self.granted > 0 or self.refused > 0 or any(demand > _NO_DEMAND for demand in self.demands.values())

    def is_idle(self, now: float) -> bool:
        """Whether there are no requests in flight, and the buckets are full."""
        return not self.running and all(bucket.fill(now) >= bucket.size for _, bucket in self.buckets())


def limit_name(limit: str, account: str) -> str:
    """A limit of an account, as it is named in reports."""
    return f"{limit} {account}"


def account_of(limit: str) -> str:
    """The account of a limit that is named as in reports."""
    return limit.partition(" ")[2]
