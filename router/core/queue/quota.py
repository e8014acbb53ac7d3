"""What each key has left of its own limits. Pure: time is an argument.

Requests and tokens a minute are token buckets that hold a minute's worth: full after a minute's rest, so that a burst
may take it all at once. Tokens are charged when they are known: the prompt's before it is sent, the answer's when it is
over, which may leave a debt that is paid off first. A request that needs more than a whole minute's tokens goes when
all of them are there: in the mean the limit holds, and nothing is impossible.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import NamedTuple, Protocol

from router.core.errors import RateLimited

MINUTE_S = 60.0
# Idle keys are looked for when there are so many, and twice as many as were left the last time.
_SWEEP_FROM = 1024
# How soon somebody else's request of the same key may have ended: a guess.
_CONCURRENT_RETRY_S = 1.0
# Who comes back exactly when it was told to is not sent away for the last digit.
_ROUNDING = 1e-6
_NAMES = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "concurrent_requests": "requests at once",
}


class RateLimits(Protocol):
    """A key's own; None is no limit."""

    @property
    def requests_per_minute(self) -> float | None: ...
    @property
    def tokens_per_minute(self) -> float | None: ...
    @property
    def concurrent_requests(self) -> int | None: ...


class AccountState(NamedTuple):
    """How a process left a key's account: what was there of each limit, `inf` where there is none, and what it has
    under way itself. `turn` orders what happened at one moment.
    """

    at: float
    turn: int
    requests: float
    tokens: float
    running: int


class SharedAccountStates(Protocol):
    """What the processes of one port know of each other's keys, by the same clock (processes/shared_quotas.py)."""

    def states(self, key_id: str) -> Iterable[AccountState]: ...

    def publish(self, key_id: str, state: AccountState) -> None: ...


@dataclass(slots=True)
class _TokenBucket:
    """`level` at `at`; below zero it is a debt."""

    size: float
    level: float
    at: float

    def now(self, now: float) -> float:
        """The level now."""
        self.level = min(self.size, self.level + max(0.0, now - self.at) * self.size / MINUTE_S)
        self.at = max(self.at, now)
        return self.level

    def until(self, level: float, now: float) -> float:
        """Seconds until it has risen to this level, which it has not reached, or has just."""
        return (level - self.now(now)) * MINUTE_S / self.size

    def resize(self, size: float, now: float) -> None:
        """Another size, with as much taken out of it as before; a debt comes of what was asked for, never of this, and
        is paid off in the same time.
        """
        level = self.now(now)
        self.level = max(0.0, level + size - self.size) if level >= 0 else level * size / self.size
        self.size = size


@dataclass(slots=True)
class _KeyAccount:
    """`elsewhere`: what runs in the other processes; `at` and `turn`: when one of all was the last to touch it."""

    key_id: str
    limits: RateLimits
    requests: _TokenBucket | None
    tokens: _TokenBucket | None
    running: int = 0
    elsewhere: int = 0
    at: float = -inf
    turn: int = 0


@dataclass(slots=True, eq=False)
class QuotaGrant:
    """One request that may go on; to be given to `settle` when it is over, however it ended.

    slots  of its key's requests at once that it takes: a batch's are the batch's
    """

    account: _KeyAccount
    charged_tokens: int = 0
    is_settled: bool = False
    slots: int = 1


@dataclass(slots=True, eq=False)
class BatchQuotaGrant:
    """Requests that may go on together, `at_once` of them at a time; each is settled, and the batch ended after all."""

    account: _KeyAccount
    items: tuple[QuotaGrant, ...]
    at_once: int
    is_ended: bool = False


@dataclass(slots=True)
class Quotas:
    """The accounts of all keys that have limits and were used lately.

    others  the processes that these accounts are shared with; None: they are ours alone
    """

    others: SharedAccountStates | None = None
    accounts: dict[str, _KeyAccount] = field(default_factory=dict)
    _sweep_at: int = _SWEEP_FROM

    def __len__(self) -> int:
        """Keys remembered."""
        return len(self.accounts)

    def take(self, key_id: str, limits: RateLimits, now: float, tokens: int = 0) -> QuotaGrant:
        """Count one request, with the tokens that it is known to need; more may be charged later.

        raises  RateLimited; nothing has been counted then
        """
        account = self._account(key_id, limits, now)
        self._check(account, tokens, now)
        if account.requests is not None:
            account.requests.level -= 1
        account.running += 1
        granted = QuotaGrant(account)
        self._charge(granted, tokens)
        self._leave(account, now)
        return granted

    def check(self, key_id: str, limits: RateLimits, now: float) -> None:
        """Raises RateLimited where no request would go on, however little it asks for; counts nothing."""
        self._check(self._account(key_id, limits, now), 0, now)

    def take_batch(self, key_id: str, limits: RateLimits, now: float, items: int, *, at_once: int) -> BatchQuotaGrant:
        """Count so many requests, of which `at_once` may be under way at a time, or as many as the key may have yet.

        raises  RateLimited; nothing has been counted then
        """
        account = self._account(key_id, limits, now)
        at_once = min(at_once, items)
        most = limits.concurrent_requests
        if most is not None:
            at_once = min(at_once, most - account.running - account.elsewhere)
            if at_once < 1:
                self._refuse(account, "concurrent_requests", _CONCURRENT_RETRY_S, now)
        requests = account.requests
        if requests is not None and requests.now(now) < items - _ROUNDING:
            self._refuse(account, "requests_per_minute", requests.until(items, now), now, items)
        self._check_tokens(account, 0, now)
        if requests is not None:
            requests.level -= items
        account.running += at_once
        self._leave(account, now)
        return BatchQuotaGrant(account, tuple([QuotaGrant(account, slots=0) for _ in range(items)]), at_once)

    def end_batch(self, batch: BatchQuotaGrant, now: float) -> None:
        """All that began are settled, and those that never did are given back; repeats change nothing."""
        if batch.is_ended:
            return
        batch.is_ended = True
        account = batch.account
        self._catch_up(account)
        account.running -= batch.at_once
        if account.requests is not None:
            unbegun = sum([not granted.is_settled for granted in batch.items])
            account.requests.level = min(account.requests.size, account.requests.now(now) + unbegun)
        self._leave(account, now)

    def charge(self, granted: QuotaGrant, tokens: int, now: float) -> None:
        """Take tokens that are needed besides: the prompt's, once it is tokenized.

        raises  RateLimited when they are not there; none was taken then, and `settle` is still to be called
        """
        self._catch_up(granted.account)
        self._check_tokens(granted.account, tokens, now)
        self._charge(granted, tokens)
        self._leave(granted.account, now)

    def settle(
        self, granted: QuotaGrant, now: float, *, completion_tokens: int = 0, prompt_tokens: int | None = None
    ) -> None:
        """It is over; repeats change nothing.

        completion_tokens  what was answered, which nobody knew before
        prompt_tokens      what the engine counted instead of what was charged; 0 where none saw the request
        """
        if granted.is_settled:
            return
        granted.is_settled = True
        account = granted.account
        self._catch_up(account)
        account.running -= granted.slots
        if account.tokens is not None:
            prompt_tokens = granted.charged_tokens if prompt_tokens is None else prompt_tokens
            account.tokens.now(now)
            account.tokens.level -= completion_tokens + prompt_tokens - granted.charged_tokens
        self._leave(account, now)

    def headers(self, granted: QuotaGrant, now: float) -> dict[str, str]:
        """The usual headers: where its key stands, of the limits that it has."""
        self._catch_up(granted.account)
        return _headers(granted.account, now)

    def forget_idle(self, now: float) -> None:
        """Drop the keys whose accounts are as good as new."""
        for key_id in [key_id for key_id, account in self.accounts.items() if _is_idle(account, now)]:
            del self.accounts[key_id]

    def _account(self, key_id: str, limits: RateLimits, now: float) -> _KeyAccount:
        account = self.accounts.get(key_id)
        if account is None:
            return self._opened(key_id, limits, now)
        if account.limits is not limits and account.limits != limits:
            self._reconcile(account, limits, now)
        self._catch_up(account)
        return account

    def _opened(self, key_id: str, limits: RateLimits, now: float) -> _KeyAccount:
        if len(self.accounts) >= self._sweep_at:
            self.forget_idle(now)
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self.accounts))
        account = _KeyAccount(key_id, limits, None, None)
        self._reconcile(account, limits, now)
        self.accounts[key_id] = account
        self._catch_up(account)
        return account

    def _reconcile(self, account: _KeyAccount, limits: RateLimits, now: float) -> None:
        account.limits = limits
        account.requests = _resized(account.requests, limits.requests_per_minute, now)
        account.tokens = _resized(account.tokens, limits.tokens_per_minute, now)

    def _catch_up(self, account: _KeyAccount) -> None:
        """What the others took is gone, and what they have under way runs."""
        if self.others is None:
            return
        last, account.elsewhere = None, 0
        for left in self.others.states(account.key_id):
            account.elsewhere += left.running
            if (left.at, left.turn) > (account.at, account.turn):
                last, account.at, account.turn = left, left.at, left.turn
        if last is not None:
            for bucket, level in ((account.requests, last.requests), (account.tokens, last.tokens)):
                if bucket is not None:
                    bucket.level, bucket.at = level, last.at

    def _leave(self, account: _KeyAccount, now: float) -> None:
        if self.others is not None:
            # This clock may have been read before another process wrote: what is left here comes after that.
            account.at, account.turn = max(account.at, now), account.turn + 1
            requests, tokens = account.requests, account.tokens
            self.others.publish(
                account.key_id,
                AccountState(
                    account.at,
                    account.turn,
                    inf if requests is None else requests.now(now),
                    inf if tokens is None else tokens.now(now),
                    account.running,
                ),
            )

    def _check(self, account: _KeyAccount, tokens: int, now: float) -> None:
        most, requests = account.limits.concurrent_requests, account.requests
        if most is not None and account.running + account.elsewhere >= most:
            self._refuse(account, "concurrent_requests", _CONCURRENT_RETRY_S, now)
        if requests is not None and requests.now(now) < 1 - _ROUNDING:
            self._refuse(account, "requests_per_minute", requests.until(1, now), now)
        self._check_tokens(account, tokens, now)

    def _check_tokens(self, account: _KeyAccount, tokens: int, now: float) -> None:
        bucket = account.tokens
        if bucket is None:
            return
        # At least something must be there, so that a debt holds up requests whose size is not known yet.
        needed = min(bucket.size, max(1, tokens))
        if bucket.now(now) < needed - _ROUNDING:
            self._refuse(account, "tokens_per_minute", bucket.until(needed, now), now, tokens)

    def _charge(self, granted: QuotaGrant, tokens: int) -> None:
        if granted.account.tokens is not None:
            granted.account.tokens.level -= tokens
            granted.charged_tokens += tokens

    def _refuse(self, account: _KeyAccount, limit: str, retry_after_s: float, now: float, tokens: int = 0) -> None:
        most = getattr(account.limits, limit)
        needs = f", this one needs {tokens}" if tokens else ""
        raise RateLimited(
            f"this API key has a limit of {most:g} {_NAMES[limit]}, which is reached{needs}; try again in"
            f" {shown_s(retry_after_s)}",
            retry_after_s=retry_after_s,
            limit=limit,
            headers=_headers(account, now),
        )


def shown_s(seconds: float) -> str:
    """A time as OpenAI's reset headers have it: 12ms, 1s, 6m0s, 1h0m5s."""
    if seconds <= 0:
        return "0s"
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms" if seconds <= 0.999 else "1s"
    whole = ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"


def _headers(account: _KeyAccount, now: float) -> dict[str, str]:
    headers = {}
    for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
        if bucket is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(floor(bucket.size))
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, floor(bucket.now(now))))
            headers[f"x-ratelimit-reset-{name}"] = shown_s(bucket.until(bucket.size, now))
    return headers


def _resized(bucket: _TokenBucket | None, size: float | None, now: float) -> _TokenBucket | None:
    if size is None:
        return None
    if bucket is None:
        return _TokenBucket(size, size, now)
    bucket.resize(size, now)
    return bucket


def _is_idle(account: _KeyAccount, now: float) -> bool:
    buckets = (account.requests, account.tokens)
    return not account.running and all(b is None or b.now(now) >= b.size for b in buckets)
