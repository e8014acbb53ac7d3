"""Roles: the scopes of a key, what each of them includes, and the caller that a key stands for. Pure."""

import re
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field, PlainSerializer

from lorafleet.service.http import HttpError
from lorafleet.service.times import utc_text
from orchestrator.model.limits import AccountLimits, LimitedAccount, tenant_account

# Required scope -> scopes that satisfy it.
_SATISFIED_BY = {
    "infer": frozenset({"infer", "load", "tenant-admin", "admin"}),
    "view": frozenset({"view", "tenant-admin", "operate", "admin"}),
    "tenant-admin": frozenset({"tenant-admin", "admin"}),
    "operate": frozenset({"operate", "admin"}),
    "load": frozenset({"load", "admin"}),
    "register": frozenset({"register", "tenant-admin", "admin"}),
    "worker": frozenset({"worker", "admin"}),
    "agent": frozenset({"agent", "admin"}),
    "agent-load": frozenset({"agent-load", "agent", "admin"}),
    "drain": frozenset({"drain", "operate", "admin"}),
    "metrics": frozenset({"metrics", "operate", "admin"}),
    "export": frozenset({"export", "admin"}),
    "admin": frozenset({"admin"}),
}
SCOPES = tuple(_SATISFIED_BY)
# Scopes that a tenant confines to its own objects. All others hold for the whole fleet, whatever tenant a key names.
TENANT_SCOPES = ("infer", "view", "tenant-admin", "register")
_GLOB = frozenset("*?[")
# Scopes of the fleet's own processes and operators, which no key with a tenant may have.
FLEET_SCOPES = ("operate", "worker", "agent", "agent-load")
# What a caller who lacks a scope is to do, where the scope alone does not say it.
_ADVICE = {
    "worker": "an agent sends heartbeats and reads adapters' files with a key of its own: `lorafleet keys new --scopes"
    " worker,drain --file KEYS` makes one for its --token-file, in key files of all services",
    "agent": "an orchestrator calls agents with a key of its own: `lorafleet keys new --scopes agent --file KEYS` makes"
    " one for its --agent-token-file, in the agents' key files",
    "agent-load": "a router calls agents with a key of its own: `lorafleet keys new --scopes agent-load --file KEYS`"
    " makes one for its --agent-token-file, in the agents' key files",
}
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_MAX_NAMESPACE = 100
# By which a program that acts by itself names itself, for the history; and those that do.
PROGRAM_HEADER = "x-lorafleet-program"
UP = "lorafleet up"
PROGRAMS = frozenset({UP})
# Scopes that let their holder see every tenant's objects.
_SEES_ALL_TENANTS = frozenset({"load", "operate", "admin"})


def given_limits(limits: AccountLimits | None) -> dict[str, float]:
    """The limits that there are, by name."""
    return {} if limits is None else {name: limit for name, limit in asdict(limits).items() if limit is not None}


def expiry_text(expires_at: float | None) -> str | None:
    """Unix seconds as UTC text; None for never."""
    return None if expires_at is None else utc_text(datetime.fromtimestamp(expires_at, UTC), "seconds")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: what a key file says of the key, or grants to a token. Answers show it as it is here.

    tenant      None for an operator
    name        for quotas and histories
    key_id      the first digits of the key's hash, or of that of the token's issuer and subject; empty: none is needed
    limits      of the key; None if there are none
    expires_at  Unix seconds from which the key is refused; None: never
    namespace   the caller's name `x` means `namespace/x` where there is one; empty: no namespace
    lora_ids    patterns of names that the caller may give; empty: those of the namespace, else of the tenant, else any
    may_shadow_base  whether the caller may publish under a base model's name, and then gets that in its place
    note        the key file's comment on the key, or a token's name for its person; empty: none
    issuer      of the caller's token; empty: the caller has a key
    tenant_limits    those of all keys and tokens of the tenant together; None if there are none
    program     of ours that acts by itself with this key, see PROGRAMS; empty: a person, or a person's program
    """

    tenant: str | None
    scopes: Annotated[frozenset[str], PlainSerializer(sorted, return_type=list[str])]
    key_id: Annotated[str, Field(exclude=True)] = ""
    limits: Annotated[AccountLimits | None, PlainSerializer(given_limits, return_type=dict[str, float])] = None
    expires_at: Annotated[float | None, PlainSerializer(expiry_text, return_type=str | None)] = None
    namespace: str = ""
    lora_ids: tuple[str, ...] = ()
    may_shadow_base: bool = False
    note: str = ""
    issuer: str = ""
    tenant_limits: Annotated[AccountLimits | None, PlainSerializer(given_limits, return_type=dict[str, float])] = None
    program: Annotated[str, Field(exclude=True)] = ""

    @property
    def name(self) -> str:
        """The caller in quotas and histories: role and key, or `anyone` where no key is needed."""
        role = "operator" if self.tenant is None else f"tenant {self.tenant}"
        name = f"{role} ({'token' if self.issuer else 'key'} {self.key_id})" if self.key_id else "anyone"
        return f"{self.program}, {name}" if self.program else name

    @property
    def limited(self) -> tuple[LimitedAccount, ...]:
        """The accounts that the caller's requests count in: the key's and the tenant's, each if it has limits."""
        if self.limits is None and self.tenant_limits is None:
            return ()
        of_key = () if self.limits is None else (LimitedAccount(self.key_id, self.limits),)
        if self.tenant_limits is None or self.tenant is None:
            return of_key
        return (*of_key, LimitedAccount(tenant_account(self.tenant), self.tenant_limits))

    @property
    def only_tenant(self) -> str | None:
        """The tenant whose objects alone this caller may see and change; None for a caller above tenants."""
        return self.tenant if self.scopes.isdisjoint(_SEES_ALL_TENANTS) else None

    @property
    def writes_for(self) -> str | None:
        """The tenant whose objects alone this caller may change; None for an operator.

        Narrower than `only_tenant`: `load` beside a tenant reads the fleet and changes that tenant's objects alone.
        """
        return None if "admin" in self.scopes else self.tenant

    @property
    def own_prefixes(self) -> tuple[str, ...]:
        """The folders of names that are this tenant's, whether or not anything is registered there; () without one."""
        if self.tenant is None:
            return ()
        granted = (pattern[:-1] for pattern in self.lora_ids if pattern.endswith("/*") and not _GLOB & {*pattern[:-1]})
        return (f"{self.tenant}/", *([f"{self.namespace}/"] if self.namespace else []), *granted)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names that this caller may give to adapters, aliases and published names, as patterns for people."""
        folder = self.namespace or self.writes_for
        return self.lora_ids or (("*",) if folder is None else (f"{folder}/*",))

    def may_name(self, name: str) -> bool:
        """Whether this caller may give this whole name to an adapter, an alias or a published name."""
        if self.lora_ids:
            return any(fnmatchcase(name, pattern) for pattern in self.lora_ids)
        folder = self.namespace or self.writes_for
        return folder is None or name.startswith(f"{folder}/")

    def may(self, scope: str) -> bool:
        """Whether the caller has this scope; `admin` includes all others, `load` includes `infer`."""
        return not self.scopes.isdisjoint(_SATISFIED_BY[scope])

    def may_for_fleet(self, scope: str) -> bool:
        """Whether the caller has this scope for the whole fleet, and not for its tenant alone."""
        held = self.scopes & _SATISFIED_BY[scope]
        return bool(held) if self.tenant is None else not held <= set(TENANT_SCOPES)

    def in_run(self, run: str) -> "Caller":
        """This caller at the base URL of a run: names are the run's, within its own namespace, or else its tenant's.

        There it may publish under a base model's name, for the run alone.
        """
        outer = self.namespace or self.writes_for
        return replace(self, namespace=f"{outer}/{run}" if outer else run, may_shadow_base=True)

    def whole_name(self, name: str) -> str:
        """The name with the caller's namespace, where it has one and the name does not begin with it."""
        is_whole = not self.namespace or name.startswith(f"{self.namespace}/")
        return name if is_whole else f"{self.namespace}/{name}"

    def short_name(self, name: str) -> str:
        """The name as this caller writes it: without its namespace."""
        return name.removeprefix(f"{self.namespace}/") if self.namespace else name

    def may_use(self, tenants: Container[str] | None) -> bool:
        """Whether this caller may use an adapter with these tenants (None: everyone)."""
        return tenants is None or self.may("load") or (self.tenant is not None and self.tenant in tenants)


def with_tenant_limits(caller: Caller, limits: Mapping[str, AccountLimits]) -> Caller:
    """The caller, with the limits of its tenant among these."""
    found = limits.get(caller.tenant or "")
    return caller if found is None else replace(caller, tenant_limits=found)


def namespace_trouble(namespace: object) -> str | None:
    """Why this can be no namespace; None: it can."""
    is_namespace = isinstance(namespace, str) and len(namespace) <= _MAX_NAMESPACE and _NAMESPACE.fullmatch(namespace)
    if not is_namespace or {".", ".."} & set(str(namespace).split("/")):
        return f"namespace must be letters, digits, '.', '_' and '-', in parts joined by '/', found {namespace!r:.40}"
    return None


ANYONE = Caller(tenant=None, scopes=frozenset(SCOPES))


def check_scope(caller: Caller, *scopes: str, is_for_fleet: bool = False) -> None:
    """Raises HttpError 403 `scope_missing` if the caller has none of the scopes.

    With `is_for_fleet` it raises `fleet_key_needed` if the caller has them for its tenant alone.
    """
    if not any(map(caller.may, scopes)):
        wanted = " or ".join(map(repr, scopes))
        scopes_held = ", ".join(sorted(caller.scopes)) or "none"
        advice = "".join(f"; {_ADVICE[scope]}" for scope in scopes if scope in _ADVICE)
        raise HttpError(403, "scope_missing", f"this needs a key with scope {wanted}; yours has: {scopes_held}{advice}")
    if is_for_fleet and not any(map(caller.may_for_fleet, scopes)):
        raise HttpError(
            403,
            "fleet_key_needed",
            f"this concerns the whole fleet, and yours is a key of tenant {caller.tenant!r}: use an operator's key"
            f" (scope {' or '.join(map(repr, scopes))}, no tenant)",
        )
