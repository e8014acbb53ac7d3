"""Rate limits of API keys: requests, tokens and bytes of bodies a minute, and concurrent requests.

Pure: time is an argument. Requests, tokens and bytes a minute are token buckets that hold a minute's worth, so that a
burst may take it all at once. Tokens are charged when they are known: the prompt's before it is sent, the answer's when
it is over. Bytes are charged as they are read, whatever becomes of the request. Either may leave a debt, which is paid
off first. A request that needs more than a minute's tokens or bytes goes when the bucket is full, so the limit holds on
average, and no request is impossible.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import NamedTuple, Protocol

from router.core.errors import RateLimited

MINUTE_S = 60.0
# Idle accounts are swept at so many accounts, and then at twice as many as the last sweep left.
_SWEEP_FROM = 1024
# Retry-After where too many requests of a key run: a guess.
_CONCURRENT_RETRY_S = 1.0
# From here on a body is refused before it is read when its key has no request left. A short one is cheap to read, and a
# `/generate` in it says how many requests it needs.
_LARGE_BODY_BYTES = 2**19
# A client that comes back exactly at its Retry-After is not refused for a rounding error.
_ROUNDING = 1e-6
_NAMES = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "bytes_per_minute": "bytes of bodies per minute",
    "concurrent_requests": "requests at once",
}


class RateLimits(Protocol):
    """The limits of one API key; None: no limit."""

    @property
    def requests_per_minute(self) -> float | None: ...
    @property
    def tokens_per_minute(self) -> float | None: ...
    @property
    def bytes_per_minute(self) -> float | None: ...
    @property
    def concurrent_requests(self) -> int | None: ...


class AccountState(NamedTuple):
    """A key's account as one process left it.

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

    def states(self, key_id: str) -> Iterable[AccountState]:
        """The states of an account in the other processes."""

    def publish(self, key_id: str, state: AccountState) -> None:
        """Write this process's state of an account, for the others to read."""


@dataclass(slots=True)
class _TokenBucket:
    """A token bucket that fills in a minute. `level` as of `at`; below zero it is a debt."""

    size: float
    level: float
    at: float

    def fill(self, now: float) -> float:
        """Fill the bucket for the time since the last call; returns its level."""
        self.level = min(self.size, self.level + max(0.0, now - self.at) * self.size / MINUTE_S)
        self.at = max(self.at, now)
        return self.level

    def seconds_until(self, level: float, now: float) -> float:
        """Seconds until the bucket reaches this level. Fills it up to now first."""
        return (level - self.fill(now)) * MINUTE_S / self.size

    def resize(self, size: float, now: float) -> None:
        """Change the size. Keeps what was taken; a debt takes as long to pay off as before."""
        level = self.fill(now)
        self.level = max(0.0, level + size - self.size) if level >= 0 else level * size / self.size
        self.size = size


@dataclass(slots=True)
class _KeyAccount:
    """One key's account.

    running, elsewhere   requests that run in this process, and in others
    at, turn             when any process last changed it
    """

    key_id: str
    limits: RateLimits
    requests: _TokenBucket | None
    tokens: _TokenBucket | None
    body_bytes: _TokenBucket | None
    running: int = 0
    elsewhere: int = 0
    at: float = -inf
    turn: int = 0


@dataclass(slots=True, eq=False)
class QuotaGrant:
    """The grant of one request; must be given to `settle` when the request is over, well or badly.

    slots  concurrent requests that it counts as: 0 in a batch, which has its own
    """

    account: _KeyAccount
    charged_tokens: int = 0
    is_settled: bool = False
    slots: int = 1


@dataclass(slots=True, eq=False)
class BatchQuotaGrant:
    """The grants of a batch, of which `at_once` may run at a time. Settle each, then end the batch."""

    account: _KeyAccount
    items: tuple[QuotaGrant, ...]
    at_once: int
    is_ended: bool = False


@dataclass(slots=True)
class Quotas:
    """The accounts of the keys that have limits and were used lately.

    others  account states shared with other processes; None: there are no others
    """

    others: SharedAccountStates | None = None
    accounts: dict[str, _KeyAccount] = field(default_factory=dict)
    _sweep_at: int = _SWEEP_FROM

    def __len__(self) -> int:
        """Accounts kept."""
        return len(self.accounts)

    def take(self, key_id: str, limits: RateLimits, now: float, tokens: int = 0) -> QuotaGrant:
        """Grant one request and charge the tokens that it is known to need; more may be charged later.

        Publishes the account to other processes.
        raises  RateLimited; nothing is counted then
        """
        account = self._account(key_id, limits, now)
        self._check_limits(account, tokens, now)
        if account.requests is not None:
            account.requests.level -= 1
        account.running += 1
        granted = QuotaGrant(account)
        self._charge_tokens(granted, tokens)
        self._publish(account, now)
        return granted

    def check_body(self, key_id: str, limits: RateLimits, now: float, *, size_bytes: int | None) -> None:
        """Raise RateLimited where a body must not be read now; counts nothing.

        It must not while the key is in debt of bytes, lacks those of this body, or has no request left.

        size_bytes  None: not known before it is read
        """
        account = self._account(key_id, limits, now)
        bucket = account.body_bytes
        if bucket is not None:
            needed = min(bucket.size, max(1, size_bytes or 0))
            if bucket.fill(now) < needed - _ROUNDING:
                self._refuse(account, "bytes_per_minute", bucket.seconds_until(needed, now), now, size_bytes or 0)
        if size_bytes is None or size_bytes >= _LARGE_BODY_BYTES:
            self._check_requests(account, now)

    def charge_bytes(self, key_id: str, limits: RateLimits, now: float, size_bytes: int) -> None:
        """Charge bytes of a body that were read, which may leave a debt. Publishes the account to other processes."""
        account = self._account(key_id, limits, now)
        if account.body_bytes is not None:
            account.body_bytes.fill(now)
            account.body_bytes.level -= size_bytes
            self._publish(account, now)

    def charge_incomplete_body(self, key_id: str, limits: RateLimits, now: float) -> None:
        """Charge a request whose body ended early. May leave a debt, of a minute at most.

        Publishes the account to other processes.
        """
        account = self._account(key_id, limits, now)
        requests = account.requests
        if requests is not None:
            requests.level = max(-requests.size, requests.fill(now) - 1)
            self._publish(account, now)

    def take_batch(
        self,
        key_id: str,
        limits: RateLimits,
        now: float,
        items: int,
        *,
        at_once: int,
        arrived: QuotaGrant | None = None,
    ) -> BatchQuotaGrant:
        """Grant a batch of `items` requests, at most `at_once` at a time, and no more than the key may still run.

        Publishes the account to other processes.

        arrived  the grant of the call itself, which the batch replaces: it is settled as if it had not been taken
        raises   RateLimited; nothing is counted then
        """
        account = self._account(key_id, limits, now)
        if arrived is not None and not arrived.is_settled:
            self._give_back(arrived, now)
        at_once = min(at_once, items)
        most = limits.concurrent_requests
        if most is not None:
            at_once = min(at_once, most - account.running - account.elsewhere)
            if at_once < 1:
                self._refuse(account, "concurrent_requests", _CONCURRENT_RETRY_S, now)
        requests = account.requests
        if requests is not None and requests.fill(now) < items - _ROUNDING:
            self._refuse(account, "requests_per_minute", requests.seconds_until(items, now), now, items)
        self._check_tokens(account, 0, now)
        if requests is not None:
            requests.level -= items
        account.running += at_once
        self._publish(account, now)
        return BatchQuotaGrant(account, tuple([QuotaGrant(account, slots=0) for _ in range(items)]), at_once)

    def end_batch(self, batch: BatchQuotaGrant, now: float) -> None:
        """End a batch: give back the requests that never began, and its concurrent ones. Safe to call twice.

        Publishes the account to other processes.
        """
        if batch.is_ended:
            return
        batch.is_ended = True
        account = batch.account
        self._read_others(account)
        account.running -= batch.at_once
        if account.requests is not None:
            unbegun = sum([not granted.is_settled for granted in batch.items])
            account.requests.level = min(account.requests.size, account.requests.fill(now) + unbegun)
        self._publish(account, now)

    def charge(self, granted: QuotaGrant, tokens: int, now: float) -> None:
        """Charge further tokens to a grant: the prompt's, once it is tokenized. Reads and publishes the shared account.

        raises  RateLimited; none is charged then, and `settle` must still be called
        """
        self._read_others(granted.account)
        self._check_tokens(granted.account, tokens, now)
        self._charge_tokens(granted, tokens)
        self._publish(granted.account, now)

    def settle(
        self, granted: QuotaGrant, now: float, *, completion_tokens: int = 0, prompt_tokens: int | None = None
    ) -> None:
        """Settle a grant whose request is over: frees its slot and charges the final tokens. Safe to call twice.

        Publishes the account to other processes.
        completion_tokens  tokens of the answer
        prompt_tokens      the engine's count, which replaces what was charged; 0 where no engine saw the request
        """
        if granted.is_settled:
            return
        granted.is_settled = True
        account = granted.account
        self._read_others(account)
        account.running -= granted.slots
        if account.tokens is not None:
            prompt_tokens = granted.charged_tokens if prompt_tokens is None else prompt_tokens
            account.tokens.fill(now)
            account.tokens.level -= completion_tokens + prompt_tokens - granted.charged_tokens
        self._publish(account, now)

    def _give_back(self, granted: QuotaGrant, now: float) -> None:
        """Settle a grant as if it had never been taken."""
        granted.is_settled = True
        account = granted.account
        account.running -= granted.slots
        if account.requests is not None:
            account.requests.level = min(account.requests.size, account.requests.fill(now) + 1)
        if account.tokens is not None:
            account.tokens.level += granted.charged_tokens
        self._publish(account, now)

    def headers(self, granted: QuotaGrant, now: float) -> dict[str, str]:
        """The x-ratelimit headers of the grant's key now, for the limits that it has.

        Reads other processes' use first.
        """
        self._read_others(granted.account)
        return _ratelimit_headers(granted.account, now)

    def forget_idle(self, now: float) -> None:
        """Drop accounts without requests in flight whose buckets are full."""
        for key_id in [key_id for key_id, account in self.accounts.items() if _is_idle(account, now)]:
            del self.accounts[key_id]

    def _account(self, key_id: str, limits: RateLimits, now: float) -> _KeyAccount:
        """The key's account, opened if there is none. Applies changed limits; reads what other processes counted."""
        account = self.accounts.get(key_id)
        if account is None:
            return self._open_account(key_id, limits, now)
        if account.limits is not limits and account.limits != limits:
            self._set_limits(account, limits, now)
        self._read_others(account)
        return account

    def _open_account(self, key_id: str, limits: RateLimits, now: float) -> _KeyAccount:
        """Open an account with full buckets; first drops idle accounts when there are too many."""
        if len(self.accounts) >= self._sweep_at:
            self.forget_idle(now)
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self.accounts))
        account = _KeyAccount(key_id, limits, None, None, None)
        self._set_limits(account, limits, now)
        self.accounts[key_id] = account
        self._read_others(account)
        return account

    def _set_limits(self, account: _KeyAccount, limits: RateLimits, now: float) -> None:
        """Set an account's limits and resize its buckets."""
        account.limits = limits
        account.requests = _resized_bucket(account.requests, limits.requests_per_minute, now)
        account.tokens = _resized_bucket(account.tokens, limits.tokens_per_minute, now)
        account.body_bytes = _resized_bucket(account.body_bytes, limits.bytes_per_minute, now)

    def _read_others(self, account: _KeyAccount) -> None:
        """Set what other processes run, and newer bucket levels of theirs. Does nothing with a single process."""
        if self.others is None:
            return
        last, account.elsewhere = None, 0
        for left in self.others.states(account.key_id):
            account.elsewhere += left.running
            if (left.at, left.turn) > (account.at, account.turn):
                last, account.at, account.turn = left, left.at, left.turn
        if last is not None:
            for bucket, level in (
                (account.requests, last.requests),
                (account.tokens, last.tokens),
                (account.body_bytes, last.body_bytes),
            ):
                if bucket is not None:
                    bucket.level, bucket.at = level, last.at

    def _publish(self, account: _KeyAccount, now: float) -> None:
        """Pass an account's state to the other processes, if any, as its newest: advances its time and turn."""
        if self.others is not None:
            # This clock may have been read before another process wrote: this state must come after that one.
            account.at, account.turn = max(account.at, now), account.turn + 1
            requests, tokens, body_bytes = account.requests, account.tokens, account.body_bytes
            self.others.publish(
                account.key_id,
                AccountState(
                    account.at,
                    account.turn,
                    inf if requests is None else requests.fill(now),
                    inf if tokens is None else tokens.fill(now),
                    account.running,
                    inf if body_bytes is None else body_bytes.fill(now),
                ),
            )

    def _check_limits(self, account: _KeyAccount, tokens: int, now: float) -> None:
        """Raise RateLimited if one more request with these tokens exceeds a limit."""
        most = account.limits.concurrent_requests
        if most is not None and account.running + account.elsewhere >= most:
            self._refuse(account, "concurrent_requests", _CONCURRENT_RETRY_S, now)
        self._check_requests(account, now)
        self._check_tokens(account, tokens, now)

    def _check_requests(self, account: _KeyAccount, now: float) -> None:
        """Raise RateLimited if the request bucket lacks one."""
        requests = account.requests
        if requests is not None and requests.fill(now) < 1 - _ROUNDING:
            self._refuse(account, "requests_per_minute", requests.seconds_until(1, now), now)

    def _check_tokens(self, account: _KeyAccount, tokens: int, now: float) -> None:
        """Raise RateLimited if the token bucket lacks these tokens, or is in debt."""
        bucket = account.tokens
        if bucket is None:
            return
        # At least one token must be there, so that a debt also refuses requests whose size is not known yet.
        needed = min(bucket.size, max(1, tokens))
        if bucket.fill(now) < needed - _ROUNDING:
            self._refuse(account, "tokens_per_minute", bucket.seconds_until(needed, now), now, tokens)

    def _charge_tokens(self, granted: QuotaGrant, tokens: int) -> None:
        """Take tokens out of the account's bucket, if it has one, and note them in the grant."""
        if granted.account.tokens is not None:
            granted.account.tokens.level -= tokens
            granted.charged_tokens += tokens

    def _refuse(self, account: _KeyAccount, limit: str, retry_after_s: float, now: float, tokens: int = 0) -> None:
        """Raise RateLimited for the named limit, with the key's headers."""
        most = getattr(account.limits, limit)
        needs = f", this one needs {tokens}" if tokens else ""
        raise RateLimited(
            f"this API key has a limit of {most:g} {_NAMES[limit]}, which is reached{needs}; try again in"
            f" {duration_text(retry_after_s)}",
            retry_after_s=retry_after_s,
            limit=limit,
            headers=_ratelimit_headers(account, now),
        )


def duration_text(seconds: float) -> str:
    """A duration in the form of OpenAI's reset headers: 12ms, 1s, 6m0s, 1h0m5s."""
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


def _ratelimit_headers(account: _KeyAccount, now: float) -> dict[str, str]:
    """The x-ratelimit headers of an account; fills its buckets up to now."""
    headers = {}
    for name, bucket in (("requests", account.requests), ("tokens", account.tokens), ("bytes", account.body_bytes)):
        if bucket is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(floor(bucket.size))
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, floor(bucket.fill(now))))
            headers[f"x-ratelimit-reset-{name}"] = duration_text(bucket.seconds_until(bucket.size, now))
    return headers


def _resized_bucket(bucket: _TokenBucket | None, size: float | None, now: float) -> _TokenBucket | None:
    """A bucket of this size: the same one resized, a new full one, or None without a limit."""
    if size is None:
        return None
    if bucket is None:
        return _TokenBucket(size, size, now)
    bucket.resize(size, now)
    return bucket


def _is_idle(account: _KeyAccount, now: float) -> bool:
    """Whether an account has no requests in flight and full buckets."""
    buckets = (account.requests, account.tokens, account.body_bytes)
    return not account.running and all(b is None or b.fill(now) >= b.size for b in buckets)
