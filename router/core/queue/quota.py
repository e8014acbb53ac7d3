"""Rate limits of API keys: requests, tokens and bytes of bodies a minute, and concurrent requests.

Pure: time is an argument. Requests, tokens and bytes a minute are token buckets that hold a minute's worth, so that a
burst may take it all at once. Tokens are charged when they are known: the prompt's before it is sent, the answer's when
it is over. Bytes are charged as they are read, whatever becomes of the request. Either may leave a debt, which is paid
off first. A request that needs more than a minute's tokens or bytes goes when the bucket is full, so the limit holds on
average, and no request is impossible.

Of each limit a router has a share, which the leader leases to it (orchestrator/core/limit_leases.py): the whole one
where it is alone. A share that grows lets the bucket fill faster; it does not fill it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from math import ceil, exp, floor, inf
from typing import NamedTuple, Protocol

from orchestrator.model.usage import HOT_SHARE, LimitShares, LimitUse, LimitUses
from router.core.errors import RateLimited

MINUTE_S = 60.0
# Idle accounts are swept at so many accounts, and then at twice as many as the last sweep left.
_SWEEP_FROM = 1024
# Retry-After where too many requests of a key run: a guess.
_CONCURRENT_RETRY_S = 1.0
# A share that is too small for a request has grown by then where the limit has room elsewhere: reports are a second
# apart, and a share moves in three of them.
_MOVED_S = 3.0
# Demand is weighted over this time.
_DEMAND_WINDOW_S = 2.0
# A demand below this is none.
_NO_DEMAND = 0.01
# Limits that one report may bring up; further ones keep the shares that they have.
_MOST_REPORTED = 1000
# From here on a body is refused before it is read when its key has no request left. A short one is cheap to read, and a
# `/generate` in it says how many requests it needs.
_LARGE_BODY_BYTES = 2**19
# A client that comes back exactly at its Retry-After is not refused for a rounding error.
_ROUNDING = 1e-6
# The shares of a router that is alone.
_WHOLE = LimitShares(idle_share=1.0)
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

    @property
    def processes(self) -> int:
        """Processes that share them."""

    def states(self, key_id: str) -> Iterable[AccountState]:
        """The states of an account in the other processes."""

    def publish(self, key_id: str, state: AccountState) -> None:
        """Write this process's state of an account, for the others to read."""


@dataclass(slots=True)
class _TokenBucket:
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
class _KeyAccount:
    """One key's account.

    running, elsewhere   requests that run in this process, and in others
    concurrent_share     this router's share of the requests at once
    least_at_once        requests that may run at once however small the share is
    at, turn             when any process last changed it
    granted, refused     requests since the last report of its use; `most_running` of them at a time, or tried
    demands              limit -> its demand, weighted over `_DEMAND_WINDOW_S`
    """

    key_id: str
    limits: RateLimits
    requests: _TokenBucket | None
    tokens: _TokenBucket | None
    body_bytes: _TokenBucket | None
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

    def buckets(self) -> Iterator[tuple[str, _TokenBucket]]:
        """The buckets that there are, by the names of their limits."""
        for limit, bucket in (
            ("requests_per_minute", self.requests),
            ("tokens_per_minute", self.tokens),
            ("bytes_per_minute", self.body_bytes),
        ):
            if bucket is not None:
                yield limit, bucket

    def most_at_once(self) -> float:
        """Requests that may run at once here; inf without that limit."""
        most = self.limits.concurrent_requests
        return inf if most is None else max(self.least_at_once, floor(most * self.concurrent_share + _ROUNDING))

    def set_shares(self, shares: LimitShares, now: float) -> None:
        """Go by these shares from now on."""
        for limit, bucket in self.buckets():
            if (share := shares.of(_limit_name(limit, self.key_id))) != bucket.share:
                bucket.set_share(share, now)
        self.set_concurrent_share(shares)

    def set_concurrent_share(self, shares: LimitShares) -> None:
        """Go by this share of the requests at once. One may run until the limit is shared out by demand."""
        limit = _limit_name("concurrent_requests", self.key_id)
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
        return _limit_name(limit, self.key_id), LimitUse(demand=weighted, share=share, unit=unit)

    def is_in_demand(self) -> bool:
        """Whether it was used since the last report, or a while ago."""
        return self.granted > 0 or self.refused > 0 or any(demand > _NO_DEMAND for demand in self.demands.values())


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
    shares  this router's shares of all limits
    group   this router's, or that of all processes that share account states: they have their shares together
    """

    others: SharedAccountStates | None = None
    shares: LimitShares = _WHOLE
    group: str = ""
    accounts: dict[str, _KeyAccount] = field(default_factory=dict)
    _sweep_at: int = _SWEEP_FROM
    _least_shares: dict[str, float] = field(default_factory=dict)
    _in_demand: dict[str, _KeyAccount] = field(default_factory=dict)
    _used_at: float | None = None

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
            account.requests.take(1)
        account.granted += 1
        account.running += 1
        account.most_running = max(account.most_running, account.running)
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
            account.body_bytes.take(size_bytes)
            self._publish(account, now)

    def charge_incomplete_body(self, key_id: str, limits: RateLimits, now: float) -> None:
        """Charge a request whose body ended early. May leave a debt, of a minute at most.

        Publishes the account to other processes.
        """
        account = self._account(key_id, limits, now)
        requests = account.requests
        if requests is not None:
            account.granted += 1
            requests.take(min(1.0, requests.fill(now) + requests.size))
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
        at_once = int(min(at_once, account.most_at_once() - account.running - account.elsewhere))
        if at_once < 1:
            self._refuse(account, "concurrent_requests", _CONCURRENT_RETRY_S, now)
        requests = account.requests
        if requests is not None and requests.fill(now) < items - _ROUNDING:
            self._refuse(account, "requests_per_minute", requests.seconds_until(items, now), now, items)
        self._check_tokens(account, 0, now)
        if requests is not None:
            requests.take(items)
        account.granted += items
        account.running += at_once
        account.most_running = max(account.most_running, account.running)
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
            account.requests.fill(now)
            account.requests.take(-sum([not granted.is_settled for granted in batch.items]))
            account.requests.fill(now)
        self._publish(account, now)

    def charge(self, granted: QuotaGrant, tokens: int, now: float) -> None:
        """Charge further tokens to a grant: the prompt's, once it is tokenized. Reads and publishes the shared account.

        raises  RateLimited; none is charged then, and `settle` must still be called
        """
        account = granted.account
        self._read_others(account)
        account.granted -= 1  # until the check is passed: then it is a grant again
        self._check_tokens(account, tokens, now)
        account.granted += 1
        self._charge_tokens(granted, tokens)
        self._publish(account, now)

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
            account.tokens.take(completion_tokens + prompt_tokens - granted.charged_tokens)
        self._publish(account, now)

    def _give_back(self, granted: QuotaGrant, now: float) -> None:
        """Settle a grant as if it had never been taken."""
        granted.is_settled = True
        account = granted.account
        account.running -= granted.slots
        account.granted = max(0, account.granted - granted.slots)
        if account.requests is not None:
            account.requests.fill(now)
            account.requests.take(-1)
            account.requests.fill(now)
        if account.tokens is not None:
            account.tokens.take(-granted.charged_tokens)
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

    def set_shares(self, shares: LimitShares, now: float) -> None:
        """Go by these shares from now on."""
        before, self.shares = self.shares, shares
        self._least_shares = {
            limit: min(share, self._least_shares.get(limit, before.of(limit))) for limit, share in shares.shares.items()
        }
        if shares.idle_share != before.idle_share:
            changed: Iterable[str] = tuple(self.accounts)
        else:
            changed = {account_of(limit) for limit in before.shares.keys() | shares.shares.keys()}
        for key_id in changed:
            if (account := self.accounts.get(key_id)) is not None:
                account.set_shares(shares, now)

    def uses(self, now: float) -> LimitUses:
        """The use of limits since the last call: of those in demand, and of those with a share of their own."""
        over_s, self._used_at = 1.0 if self._used_at is None else max(1e-3, now - self._used_at), now
        leased, found = self.shares.shares, dict[str, LimitUse]()
        hot_share = HOT_SHARE / (1 if self.others is None else self.others.processes)
        for account in self._in_demand.values():
            for limit, use in account.uses(over_s):
                if limit in leased or use.demand > hot_share * use.share:
                    found[limit] = use
        self._in_demand = {key: account for key, account in self._in_demand.items() if account.is_in_demand()}
        new = nlargest(_MOST_REPORTED, found.keys() - leased.keys(), key=lambda limit: found[limit].demand)
        uses = {limit: found.get(limit) or LimitUse(demand=0.0, share=share) for limit, share in leased.items()}
        return LimitUses(
            group=self.group, idle_share=self.shares.idle_share, uses=uses | {limit: found[limit] for limit in new}
        )

    def _account(self, key_id: str, limits: RateLimits, now: float) -> _KeyAccount:
        """The key's account, opened if there is none. Applies changed limits; reads what other processes counted."""
        account = self._in_demand[key_id] = self._known_account(key_id, limits, now)
        return account

    def _known_account(self, key_id: str, limits: RateLimits, now: float) -> _KeyAccount:
        """`_account`, without a note that it is in demand."""
        account = self.accounts.get(key_id)
        if account is None:
            return self._open_account(key_id, limits, now)
        if account.limits is not limits and account.limits != limits:
            self._set_limits(account, limits, now)
        self._read_others(account)
        return account

    def _open_account(self, key_id: str, limits: RateLimits, now: float) -> _KeyAccount:
        """Open an account with full buckets; first drops idle accounts when there are too many.

        Of a limit that is shared out by demand a bucket holds what is of the smallest share since: what is more may
        have been used elsewhere.
        """
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
        account.requests = self._resized_bucket(account, "requests_per_minute", account.requests, now)
        account.tokens = self._resized_bucket(account, "tokens_per_minute", account.tokens, now)
        account.body_bytes = self._resized_bucket(account, "bytes_per_minute", account.body_bytes, now)
        account.set_concurrent_share(self.shares)

    def _resized_bucket(
        self, account: _KeyAccount, name: str, bucket: _TokenBucket | None, now: float
    ) -> _TokenBucket | None:
        """A bucket of the limit of this name: the same one resized, a new full one, or None without a limit."""
        limit: float | None = getattr(account.limits, name)
        if limit is None:
            return None
        if bucket is not None:
            bucket.resize(limit, now)
            return bucket
        shared = _limit_name(name, account.key_id)
        bucket = _TokenBucket(limit, self._least_shares.get(shared, self.shares.idle_share), 0.0, now)
        bucket.level, bucket.share = bucket.size, self.shares.of(shared)
        return bucket

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
        if account.running + account.elsewhere >= account.most_at_once():
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
            granted.account.tokens.take(tokens)
            granted.charged_tokens += tokens

    def _refuse(self, account: _KeyAccount, limit: str, retry_after_s: float, now: float, tokens: int = 0) -> None:
        """Raise RateLimited for the named limit, with the key's headers."""
        account.refused += 1
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
            headers[f"x-ratelimit-limit-{name}"] = str(floor(bucket.limit))
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, floor(bucket.fill(now))))
            headers[f"x-ratelimit-reset-{name}"] = duration_text(bucket.seconds_until(bucket.size, now))
    return headers


def _limit_name(limit: str, account: str) -> str:
    """A limit of an account, as it is named in reports."""
    return f"{limit} {account}"


def account_of(limit: str) -> str:
    """The account of a limit that is named as in reports."""
    return limit.partition(" ")[2]


def _is_idle(account: _KeyAccount, now: float) -> bool:
    """Whether an account has no requests in flight and full buckets."""
    buckets = (account.requests, account.tokens, account.body_bytes)
    return not account.running and all(b is None or b.fill(now) >= b.size for b in buckets)
