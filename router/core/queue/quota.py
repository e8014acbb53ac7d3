"""Limits of keys and tenants: requests, tokens and bytes of bodies a minute, and concurrent requests.

Pure: time is an argument. A request counts against the limits of its key and of its tenant: it is granted by all of
these accounts, or refused by one of them and counted by none. Tokens are charged when they are known: the prompt's
before it is sent, the answer's when it is over. Bytes are charged as they are read, whatever becomes of the request.
Either may leave a debt. A request that needs more than a minute's tokens or bytes goes when the bucket is full, so the
limit holds on average, and no request is impossible.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import ceil, floor

from orchestrator.model.limits import AccountLimits, LimitedAccount, account_tenant
from orchestrator.model.usage import HOT_SHARE, LimitShares, LimitUse, LimitUses
from router.core.errors import RateLimited
from router.core.queue.account import (
    ROUNDING,
    Account,
    SharedAccountStates,
    TokenBucket,
    account_of,
    limit_name,
)

# Idle accounts are swept at so many accounts, and then at twice as many as the last sweep left.
_SWEEP_FROM = 1024
# Retry-After where too many requests of an account run: a guess.
_CONCURRENT_RETRY_S = 1.0
# Limits that one report may bring up; further ones keep the shares that they have.
_MOST_REPORTED = 1000
# From here on a body is refused before it is read when its key or tenant has no request left. A short one is cheap to
# read, and a `/generate` in it says how many requests it needs.
_LARGE_BODY_BYTES = 2**19
# The shares of a router that is alone.
_WHOLE = LimitShares(idle_share=1.0)
_NAMES = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "bytes_per_minute": "bytes of bodies per minute",
    "concurrent_requests": "requests at once",
}
TENANT_LIMIT = "tenant_"
"""Before the name of a limit, in errors and counts: it is that of the tenant."""


@dataclass(slots=True, eq=False)
class QuotaGrant:
    """The grant of one request; must be given to `settle` when the request is over, well or badly.

    slots  concurrent requests that it counts as: 0 in a batch, which has its own
    """

    accounts: Sequence[Account]
    charged_tokens: int = 0
    is_settled: bool = False
    slots: int = 1


@dataclass(slots=True, eq=False)
class BatchQuotaGrant:
    """The grants of a batch, of which `at_once` may run at a time. Settle each, then end the batch."""

    accounts: Sequence[Account]
    items: tuple[QuotaGrant, ...]
    at_once: int
    is_ended: bool = False


@dataclass(slots=True)
class Quotas:
    """The accounts of keys and tenants that have limits and were used lately.

    others  account states shared with other processes; None: there are no others
    shares  this router's shares of all limits
    group   this router's, or that of all processes that share account states: they have their shares together
    """

    others: SharedAccountStates | None = None
    shares: LimitShares = _WHOLE
    group: str = ""
    accounts: dict[str, Account] = field(default_factory=dict)
    _sweep_at: int = _SWEEP_FROM
    _least_shares: dict[str, float] = field(default_factory=dict)
    _in_demand: dict[str, Account] = field(default_factory=dict)
    _used_at: float | None = None

    def __len__(self) -> int:
        """Accounts kept."""
        return len(self.accounts)

    def take(self, limited: Iterable[LimitedAccount], now: float, tokens: int = 0) -> QuotaGrant:
        """Grant one request and charge the tokens that it is known to need; more may be charged later.

        Publishes the accounts to other processes.
        raises  RateLimited; nothing is counted then
        """
        accounts = self._accounts(limited, now)
        for account in accounts:
            if account.room_at_once() < 1:
                _refuse(account, "concurrent_requests", _CONCURRENT_RETRY_S, now)
            _check_requests(account, 1, now)
            _check_tokens(account, tokens, now)
        for account in accounts:
            account.begin(1, slots=1)
        granted = QuotaGrant(accounts)
        _charge_tokens(granted, tokens)
        self._publish(accounts, now)
        return granted

    def check_body(self, limited: Iterable[LimitedAccount], now: float, *, size_bytes: int | None) -> None:
        """Raise RateLimited where a body must not be read now; counts nothing.

        It must not while an account is in debt of bytes, lacks those of this body, or has no request left.

        size_bytes  None: not known before it is read
        """
        for account in self._accounts(limited, now):
            bucket = account.body_bytes
            if bucket is not None:
                needed = min(bucket.size, max(1, size_bytes or 0))
                if bucket.fill(now) < needed - ROUNDING:
                    _refuse(account, "bytes_per_minute", bucket.seconds_until(needed, now), now, size_bytes or 0)
            if size_bytes is None or size_bytes >= _LARGE_BODY_BYTES:
                _check_requests(account, 1, now)

    def charge_bytes(self, limited: Iterable[LimitedAccount], now: float, size_bytes: int) -> None:
        """Charge bytes of a body that were read, which may leave a debt. Publishes the accounts to other processes."""
        charged = [account for account in self._accounts(limited, now) if account.body_bytes is not None]
        for account in charged:
            assert account.body_bytes is not None
            account.body_bytes.fill(now)
            account.body_bytes.take(size_bytes)
        self._publish(charged, now)

    def charge_incomplete_body(self, limited: Iterable[LimitedAccount], now: float) -> None:
        """Charge a request whose body ended early. May leave a debt, of a minute at most.

        Publishes the accounts to other processes.
        """
        charged = [account for account in self._accounts(limited, now) if account.requests is not None]
        for account in charged:
            assert account.requests is not None
            account.granted += 1
            account.requests.take(min(1.0, account.requests.fill(now) + account.requests.size))
        self._publish(charged, now)

    def take_batch(
        self,
        limited: Iterable[LimitedAccount],
        now: float,
        items: int,
        *,
        at_once: int,
        arrived: QuotaGrant | None = None,
    ) -> BatchQuotaGrant:
        """Grant a batch of `items` requests, at most `at_once` at a time, and no more than may still run.

        Publishes the accounts to other processes.

        arrived  the grant of the call itself, which the batch replaces: it is settled as if it had not been taken
        raises   RateLimited; nothing is counted then
        """
        accounts = self._accounts(limited, now)
        if arrived is not None and not arrived.is_settled:
            self._give_back(arrived, now)
        at_once = min(at_once, items)
        for account in accounts:
            at_once = int(min(at_once, account.room_at_once()))
            if at_once < 1:
                _refuse(account, "concurrent_requests", _CONCURRENT_RETRY_S, now)
            _check_requests(account, items, now)
            _check_tokens(account, 0, now)
        for account in accounts:
            account.begin(items, slots=at_once)
        self._publish(accounts, now)
        return BatchQuotaGrant(accounts, tuple([QuotaGrant(accounts, slots=0) for _ in range(items)]), at_once)

    def end_batch(self, batch: BatchQuotaGrant, now: float) -> None:
        """End a batch: give back the requests that never began, and its concurrent ones. Safe to call twice.

        Publishes the accounts to other processes.
        """
        if batch.is_ended:
            return
        batch.is_ended = True
        left = sum([not granted.is_settled for granted in batch.items])
        self._read_others(batch.accounts)
        for account in batch.accounts:
            account.running -= batch.at_once
            account.give_back(left, now)
        self._publish(batch.accounts, now)

    def charge(self, granted: QuotaGrant, tokens: int, now: float) -> None:
        """Charge further tokens to a grant: the prompt's, once it is tokenized. Reads and publishes shared accounts.

        raises  RateLimited; none is charged then, and `settle` must still be called
        """
        self._read_others(granted.accounts)
        for account in granted.accounts:
            account.granted -= 1  # until the check is passed: then it is a grant again
            _check_tokens(account, tokens, now)
            account.granted += 1
        _charge_tokens(granted, tokens)
        self._publish(granted.accounts, now)

    def settle(
        self, granted: QuotaGrant, now: float, *, completion_tokens: int = 0, prompt_tokens: int | None = None
    ) -> None:
        """Settle a grant whose request is over: frees its slot and charges the final tokens. Safe to call twice.

        Publishes the accounts to other processes.
        completion_tokens  tokens of the answer
        prompt_tokens      the engine's count, which replaces what was charged; 0 where no engine saw the request
        """
        if granted.is_settled:
            return
        granted.is_settled = True
        self._read_others(granted.accounts)
        prompt_tokens = granted.charged_tokens if prompt_tokens is None else prompt_tokens
        for account in granted.accounts:
            account.running -= granted.slots
            if account.tokens is not None:
                account.tokens.fill(now)
                account.tokens.take(completion_tokens + prompt_tokens - granted.charged_tokens)
        self._publish(granted.accounts, now)

    def headers(self, granted: QuotaGrant, now: float) -> dict[str, str]:
        """The x-ratelimit headers of the grant now, of each kind of limit that of the account with least left.

        Reads other processes' use first.
        """
        self._read_others(granted.accounts)
        return _ratelimit_headers(granted.accounts, now)

    def forget_idle(self, now: float) -> None:
        """Drop accounts without requests in flight whose buckets are full."""
        for account_id in [account_id for account_id, account in self.accounts.items() if account.is_idle(now)]:
            del self.accounts[account_id]

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
        for account_id in changed:
            if (account := self.accounts.get(account_id)) is not None:
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

    def _accounts(self, limited: Iterable[LimitedAccount], now: float) -> list[Account]:
        """The accounts, opened where there are none. Applies changed limits; reads what other processes counted."""
        accounts = [self._account(account_id, limits, now) for account_id, limits in limited]
        for account in accounts:
            self._in_demand[account.id] = account
        return accounts

    def _account(self, account_id: str, limits: AccountLimits, now: float) -> Account:
        """One account."""
        account = self.accounts.get(account_id)
        if account is None:
            return self._open_account(account_id, limits, now)
        if account.limits is not limits and account.limits != limits:
            self._set_limits(account, limits, now)
        self._read_others((account,))
        return account

    def _open_account(self, account_id: str, limits: AccountLimits, now: float) -> Account:
        """Open an account with full buckets; first drops idle accounts when there are too many.

        Of a limit that is shared out by demand a bucket holds what is of the smallest share since: what is more may
        have been used elsewhere.
        """
        if len(self.accounts) >= self._sweep_at:
            self.forget_idle(now)
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self.accounts))
        self.accounts[account_id] = account = Account(account_id, limits)
        self._set_limits(account, limits, now)
        self._read_others((account,))
        return account

    def _set_limits(self, account: Account, limits: AccountLimits, now: float) -> None:
        """Set an account's limits and resize its buckets."""
        account.limits = limits
        account.requests = self._resized_bucket(account, "requests_per_minute", account.requests, now)
        account.tokens = self._resized_bucket(account, "tokens_per_minute", account.tokens, now)
        account.body_bytes = self._resized_bucket(account, "bytes_per_minute", account.body_bytes, now)
        account.set_concurrent_share(self.shares)

    def _resized_bucket(
        self, account: Account, name: str, bucket: TokenBucket | None, now: float
    ) -> TokenBucket | None:
        """A bucket of the limit of this name: the same one resized, a new full one, or None without a limit."""
        limit: float | None = getattr(account.limits, name)
        if limit is None:
            return None
        if bucket is not None:
            bucket.resize(limit, now)
            return bucket
        shared = limit_name(name, account.id)
        bucket = TokenBucket(limit, self._least_shares.get(shared, self.shares.idle_share), 0.0, now)
        bucket.level, bucket.share = bucket.size, self.shares.of(shared)
        return bucket

    def _give_back(self, granted: QuotaGrant, now: float) -> None:
        """Settle a grant as if it had never been taken."""
        granted.is_settled = True
        for account in granted.accounts:
            account.running -= granted.slots
            account.granted = max(0, account.granted - granted.slots)
            account.give_back(1, now)
            if account.tokens is not None:
                account.tokens.take(-granted.charged_tokens)
        self._publish(granted.accounts, now)

    def _read_others(self, accounts: Iterable[Account]) -> None:
        """Set what other processes run, and newer bucket levels of theirs. Does nothing with a single process."""
        if self.others is not None:
            for account in accounts:
                account.read(self.others.states(account.id))

    def _publish(self, accounts: Iterable[Account], now: float) -> None:
        """Pass accounts to the other processes, if any, as their newest states: advances their times and turns."""
        if self.others is not None:
            for account in accounts:
                # This clock may have been read before another process wrote: this state must come after that one.
                account.at, account.turn = max(account.at, now), account.turn + 1
                self.others.publish(account.id, account.state(now))


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


def _check_requests(account: Account, needed: int, now: float) -> None:
    """Raise RateLimited if the bucket lacks these requests."""
    bucket = account.requests
    if bucket is not None and bucket.fill(now) < needed - ROUNDING:
        wait_s = bucket.seconds_until(needed, now)
        _refuse(account, "requests_per_minute", wait_s, now, needed if needed > 1 else 0)


def _check_tokens(account: Account, tokens: int, now: float) -> None:
    """Raise RateLimited if the token bucket lacks these tokens, or is in debt."""
    bucket = account.tokens
    if bucket is None:
        return
    # At least one token must be there, so that a debt also refuses requests whose size is not known yet.
    needed = min(bucket.size, max(1, tokens))
    if bucket.fill(now) < needed - ROUNDING:
        _refuse(account, "tokens_per_minute", bucket.seconds_until(needed, now), now, tokens)


def _charge_tokens(granted: QuotaGrant, tokens: int) -> None:
    """Take tokens out of the buckets of a grant's accounts, and note them in the grant."""
    granted.charged_tokens += tokens
    for account in granted.accounts:
        if account.tokens is not None:
            account.tokens.take(tokens)


def _refuse(account: Account, limit: str, retry_after_s: float, now: float, needed: int = 0) -> None:
    """Raise RateLimited for the named limit, with the account's headers."""
    account.refused += 1
    tenant = account_tenant(account.id)
    owner = "this API key has" if tenant is None else f"all keys of tenant {tenant} together have"
    needs = f", this one needs {needed}" if needed else ""
    raise RateLimited(
        f"{owner} a limit of {getattr(account.limits, limit):g} {_NAMES[limit]}, which is reached{needs}; try again in"
        f" {duration_text(retry_after_s)}",
        retry_after_s=retry_after_s,
        limit=limit if tenant is None else TENANT_LIMIT + limit,
        headers=_ratelimit_headers((account,), now),
    )


def _ratelimit_headers(accounts: Iterable[Account], now: float) -> dict[str, str]:
    """The x-ratelimit headers, of each kind of bucket that with the least left; fills the buckets up to now."""
    least: dict[str, TokenBucket] = {}
    for account in accounts:
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens), ("bytes", account.body_bytes)):
            if bucket is not None and (name not in least or bucket.fill(now) < least[name].fill(now)):
                least[name] = bucket
    headers = {}
    for name, bucket in least.items():
        headers[f"x-ratelimit-limit-{name}"] = str(floor(bucket.limit))
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, floor(bucket.fill(now))))
        headers[f"x-ratelimit-reset-{name}"] = duration_text(bucket.seconds_until(bucket.size, now))
    return headers
