"""Whose a name is: one table of owners for every kind of name, and the one function that every write asks. Pure.

| kind | owner |
|---|---|
| adapter | the tenant that alone may use it; shared with others, or open to everyone: operators |
| version | of a free lora_id `name/v3`: the owner of the published name `name`, whose next versions get such ids |
| alias | of a published name: its owner; else the tenant that alone may use each target, or whose folder has the name |
| rollout | the owner of its alias |
| published name | the tenant that it was published for; none: operators |
| upload | the key that began it |
| pause | the tenant and namespace of the key that began it; of the whole fleet: operators |
| copy on a worker | operators: slots are the fleet's |

What nobody owns belongs to operators: a tenant's key changes nothing that operators made. A free name goes to whoever
may give it: a key gives the names of its `lora_ids`, else those below its namespace, else those below its tenant.
A name that the caller may not see does not exist for it: a change is 404, and a new object of that name is 409.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lorafleet.identity import split_version_id
from lorafleet.keys.roles import Caller
from orchestrator.core.errors import Forbidden, NotFound, OrchestratorRequestError, StateConflict
from orchestrator.core.pauses import WHOLE_FLEET
from orchestrator.core.source_rules import digest_problem
from orchestrator.intent.registry import spec_of
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter, SecretRef
from orchestrator.model.pauses import PauseScope
from orchestrator.store.store import IntentStore

Kind = Literal["adapter", "alias", "published name"]
Act = Literal["give", "change"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may change what has a name. `tenant`: None for operators. `is_free`: nothing has the name yet."""

    tenant: str | None = None
    is_free: bool = False


OPERATORS, NOBODY = Owner(), Owner(is_free=True)


# -- the table ---------------------------------------------------------------------------------------------------


def _adapter_owner(store: IntentStore, lora_id: str, _caller: Caller) -> Owner:
    """Who may change the adapter, or register one of that name."""
    adapter = store.adapters.get(lora_id)
    if adapter is not None:
        return _only_tenant([adapter]) or OPERATORS
    version = split_version_id(lora_id)
    record = store.publication_of(version[0]) if version is not None else None
    return NOBODY if record is None else Owner(record.spec.tenant)


def _alias_owner(store: IntentStore, name: str, caller: Caller) -> Owner:
    """Who may change the alias and its rollout, or give the name."""
    found = store.names.get(name)
    if found is None:
        return NOBODY
    if found.published is not None:
        return Owner(found.published.spec.tenant)
    return _alias_owner_of(store, name, [target.lora_id for target in found.targets], caller)


def _published_owner(store: IntentStore, name: str, _caller: Caller) -> Owner:
    """Who may publish under the name, and delete it."""
    record = store.publication_of(name)
    return NOBODY if record is None else Owner(record.spec.tenant)


def _alias_owner_of(store: IntentStore, name: str, targets: Iterable[str], caller: Caller) -> Owner:
    """Who may change an alias of this name with these targets, unless it is a published name's."""
    alone = _only_tenant(map(store.adapters.get, targets))
    return alone or (Owner(caller.tenant) if _has_prefix(caller, name) else OPERATORS)


def _only_tenant(adapters: Iterable[RegisteredAdapter | None]) -> Owner | None:
    """The one tenant that alone may use each of the adapters; None if there is no such tenant."""
    found = {None if adapter is None or adapter.tenants is None else adapter.tenants for adapter in adapters}
    tenants = next(iter(found)) if len(found) == 1 else None
    return Owner(tenants[0]) if tenants is not None and len(tenants) == 1 else None


def _has_prefix(caller: Caller, name: str) -> bool:
    """Whether the name is the caller's tenant's by how it begins."""
    return caller.tenant is not None and name.startswith(caller.own_prefixes)


_OWNERS: Mapping[Kind, Callable[[IntentStore, str, Caller], Owner]] = {
    "adapter": _adapter_owner,
    "alias": _alias_owner,
    "published name": _published_owner,
}


# -- what a caller sees ------------------------------------------------------------------------------------------


def has_name(caller: Caller, name: str) -> bool:
    """Whether the name is the caller's to know by how it begins, whatever is or was registered under it."""
    return caller.only_tenant is None or _has_prefix(caller, name)


def sees_tenants(caller: Caller, tenants: Sequence[str] | None) -> bool:
    """Whether the caller sees an adapter of these tenants (None: everyone)."""
    return caller.only_tenant is None or tenants is None or caller.only_tenant in tenants


def sees_adapter(store: IntentStore, caller: Caller, lora_id: str) -> bool:
    """Whether the caller sees this adapter. One that is not registered (any more) goes by its name."""
    adapter = store.adapters.get(lora_id)
    return sees_tenants(caller, adapter.tenants) if adapter is not None else has_name(caller, lora_id)


def sees_alias(store: IntentStore, caller: Caller, name: str) -> bool:
    """Whether the caller sees this alias: it may use one of its targets, or the name is its own."""
    targets = store.targets_of(name)
    return has_name(caller, name) or any(sees_adapter(store, caller, target.lora_id) for target in targets)


def sees_published(store: IntentStore, caller: Caller, name: str) -> bool:
    """Whether the published name exists for the caller."""
    record = store.publication_of(name)
    return record is not None and record.deleted_at is None and _sees_owner(caller, record.spec.tenant)


def _sees_owner(caller: Caller, tenant: str | None) -> bool:
    """Whether the caller sees a published name of this tenant (None: of operators, for everyone)."""
    return tenant is None or caller.may_use((tenant,)) or caller.may_for_fleet("view")


def require_seen(store: IntentStore, caller: Caller, kind: Kind, name: str) -> None:
    """Raise NotFound for a name that does not exist for the caller."""
    if kind == "adapter" and not (name in store.adapters and sees_adapter(store, caller, name)):
        message = f"adapter {name!r} is not registered; POST /v1/adapters registers one"
        raise NotFound(message, param="lora_id")
    if kind == "alias" and not (store.targets_of(name) and sees_alias(store, caller, name)):
        raise NotFound(f"alias {name!r} does not exist", code="alias_not_found", param="name")
    if kind == "published name" and not sees_published(store, caller, name):
        message = f"{name!r} is no published name; POST /v1/published/{name} publishes one"
        raise NotFound(message, code="name_not_found", param="name")


# -- what a caller may write -------------------------------------------------------------------------------------


def require_write(store: IntentStore, caller: Caller, kind: Kind, name: str, act: Act) -> None:
    """Raise unless the caller may write under this name. Every write asks this, before it changes anything.

    act     "change" what is there: NotFound for what does not exist for the caller; "give" the name to something new,
            or replace what has it: StateConflict for a name that is taken by what the caller does not see
    raises  Forbidden for a name that the caller may not give, and for what is not the caller's
    """
    if act == "change":
        require_seen(store, caller, kind, name)
    param = "lora_id" if kind == "adapter" else "name"
    if not caller.may_name(name):
        message = f"{name[:200]!r} is no name of this key, whose names are {', '.join(caller.own_names)}"
        raise Forbidden(message, code="name_not_yours", param=param)
    owner = _OWNERS[kind](store, name, caller)
    if owner.is_free or owner.tenant == caller.writes_for:
        return
    if not _sees_what_has(store, caller, name):
        raise StateConflict(f"{name!r} is taken; choose another", code="name_taken", param=param)
    if caller.writes_for is not None:
        whose = f"{name!r} is not of tenant {caller.writes_for!r} alone"
        raise Forbidden(f"{whose}: an operator must change it, or choose another name", param=param)


def _sees_what_has(store: IntentStore, caller: Caller, name: str) -> bool:
    """Whether the caller sees what has the name, of whatever kind that is."""
    found = store.names.get(name)
    if found is None:
        return sees_adapter(store, caller, name)
    if found.published is None:
        return sees_alias(store, caller, name)
    return _sees_owner(caller, found.published.spec.tenant)


def require_alias(store: IntentStore, caller: Caller, name: str, targets: Sequence[str], act: Act) -> None:
    """Raise unless the caller may point the alias at these adapters, and may change it afterwards.

    Raises as `require_write`, and NotFound for a target that the caller does not see.
    """
    require_write(store, caller, "alias", name, act)
    for lora_id in targets:
        require_seen(store, caller, "adapter", lora_id)
    if caller.writes_for is None or store.publication_of(name) is not None:
        return
    if _alias_owner_of(store, name, targets, caller).tenant != caller.writes_for:
        folders = ", ".join(f"{prefix}*" for prefix in caller.own_prefixes)
        message = f"outside {folders} an alias of this key may point at adapters of tenant {caller.writes_for!r} alone"
        raise Forbidden(message, code="name_not_yours", param="name")


def owned_spec(store: IntentStore, caller: Caller, written: Mapping[str, Any]) -> AdapterSpec:
    """The spec as the caller may register it: by a tenant's key for that tenant alone. Raises as `require_write`.

    Raises Forbidden for other tenants, another's secret and a priority, OrchestratorRequestError for what is no spec.
    """
    require_write(store, caller, "adapter", written["lora_id"], "give")
    if caller.writes_for is None:
        return spec_of(written)
    _require_own_fields(caller.writes_for, written)
    return spec_of({**written, "tenants": (caller.writes_for,)})


def require_patch(store: IntentStore, caller: Caller, lora_id: str, changes: Mapping[str, Any]) -> None:
    """Raise as `require_write`, and Forbidden for changes that a tenant's key may not make."""
    require_write(store, caller, "adapter", lora_id, "change")
    if caller.writes_for is not None:
        _require_own_fields(caller.writes_for, changes)


def _require_own_fields(tenant: str, written: Mapping[str, Any]) -> None:
    """Raise Forbidden for fields of a spec that a tenant's key may not write so."""
    if "tenants" in written:
        _require_own_tenants(tenant, written["tenants"])
    _require_own_secret(tenant, written.get("secret_ref"))
    _require_own_policy(written.get("policy", {}))


def _require_own_tenants(tenant: str, tenants: Sequence[str] | None) -> None:
    """Raise Forbidden unless the tenants are this one alone."""
    if tenants is None or set(tenants) != {tenant}:
        message = f"a key of tenant {tenant!r} registers for that tenant alone; leave out `tenants`"
        raise Forbidden(message, param="tenants")


def _require_own_secret(tenant: str, ref: SecretRef | None) -> None:
    """Raise Forbidden for a secret of another name than the tenant's."""
    if ref is not None and ref.name != tenant:
        message = f"a key of tenant {tenant!r} may refer to the secret named {tenant!r} alone"
        raise Forbidden(message, param="secret_ref")


def _require_own_policy(policy: Mapping[str, Any]) -> None:
    """Raise Forbidden for a priority above others' default."""
    if policy.get("priority", 0) > 0:
        message = "`priority` puts an adapter before other tenants' adapters, so it takes an operator's key"
        raise Forbidden(message, param="policy.priority")


def require_own_bytes(store: IntentStore, caller: Caller, source: str, param: str = "source") -> None:
    """Raise OrchestratorRequestError for bytes, named by their digest, that only others may use.

    A digest is no permission: a tenant names bytes by digest of adapters that it may use.
    """
    if caller.only_tenant is not None:
        mine = (adapter for adapter in store.adapters.values() if sees_tenants(caller, adapter.tenants))
        problem = digest_problem(source, mine)
        if problem is not None:
            raise OrchestratorRequestError(problem, code="source_forbidden", param=param)


def require_copy_change(caller: Caller, lora_id: str) -> None:
    """Raise Forbidden unless the caller may have a copy unloaded and kept out of one worker, or let in again."""
    if not caller.may_for_fleet("operate"):
        message = f"a copy of {lora_id!r} leaves one worker by an operator's key, with scope 'operate' and no tenant"
        raise Forbidden(message, code="scope_missing")


def upload_owner(caller: Caller) -> str:
    """Whose unfinished uploads a caller's are: the key's, which no other key reaches."""
    return caller.key_id or "anyone"


def pause_scope(caller: Caller, needed: str = "admin") -> PauseScope:
    """Whose requests this caller may pause: its tenant's and namespace's; everybody's for an operator with `needed`.

    Raises Forbidden for an operator without it: a pause must not reach other tenants.
    """
    scope = PauseScope(caller.tenant, caller.namespace)
    if scope == WHOLE_FLEET and not caller.may(needed):
        message = (
            f"this key has no tenant, so its pause is everybody's: that needs scope {needed!r}; use the key of a tenant"
            " to pause that tenant's"
        )
        raise Forbidden(message, code="scope_missing")
    return scope


def named_pause_scope(caller: Caller, tenant: str, namespace: str) -> PauseScope:
    """The scope of another's pause, which operators alone may end. Raises Forbidden.

    tenant  empty: the fleet's
    """
    if not caller.may_for_fleet("operate"):
        message = "ending another's pause needs an operator's key, with scope 'operate' or 'admin'"
        raise Forbidden(message, code="scope_missing")
    return PauseScope(tenant or None, namespace)
