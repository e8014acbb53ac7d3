"""Changes of intent: register, change, delete, alias, cordon, policy. Each checks its names, then writes the store.

Nothing here talks to a worker; the next pass does what has to be done.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

from pydantic import ValidationError

from orchestrator.backend import WorkerIntent
from orchestrator.core.errors import Conflict, NotFound, RequestError, Stale
from orchestrator.core.state import Adapter, Rules
from orchestrator.fleet import Fleet
from orchestrator.store import Store
from orchestrator.wire import AdapterPatch, AdapterPolicy, AdapterSpec, AliasSpec, Policy, checked_lora_id

_IMMUTABLE = ("source", "digest", "base_model")


class Registry:
    """Intent as REST callers change it."""

    def __init__(self, store: Store, fleet: Fleet, *, wall: Callable[[], float] = time.time) -> None:
        self._store = store
        self._fleet = fleet
        self._wall = wall

    def adapter(self, lora_id: str) -> Adapter:
        """Raises NotFound."""
        found = self._store.adapters.get(lora_id)
        if found is None:
            raise NotFound(f"adapter {lora_id!r} is not registered; POST /v1/adapters registers one", param="lora_id")
        return found

    def check(self, spec: AdapterSpec) -> Adapter | None:
        """What is registered and equal to this spec, else None. Raises Conflict when it cannot be registered."""
        known = self._store.adapters.get(spec.lora_id)
        if known is None:
            self._require_free(spec.lora_id, "lora_id")
            return None
        if known.is_deleting:
            message = f"adapter {spec.lora_id!r} is being deleted; register it again when that is done"
            raise Conflict(message, code="adapter_deleting", param="lora_id")
        for name in _IMMUTABLE:
            said, is_ = getattr(spec, name), getattr(known, name)
            if said is not None and is_ is not None and said != is_:
                raise Conflict(
                    f"{spec.lora_id!r} is registered with {name} {is_!r}, which cannot change to {said!r}: register"
                    f" a new version (such as {_next_version(spec.lora_id)!r}) and point an alias at it",
                    code="immutable",
                    param=name,
                )
        wanted = _with_policy(replace(known, tenants=_sorted(spec.tenants)), spec.policy)
        if wanted != known:
            message = f"{spec.lora_id!r} is registered with another policy or other tenants; PATCH changes those"
            raise Conflict(message, code="already_registered", param="lora_id")
        return known

    def register(self, spec: AdapterSpec) -> tuple[Adapter, bool]:
        """The adapter, and whether it is new. Raises Conflict."""
        known = self.check(spec)
        if known is not None:
            return self._fill_in(known, spec), False
        adapter = new_adapter(spec)
        self._store.put_adapter(adapter)
        return adapter, True

    def _fill_in(self, known: Adapter, spec: AdapterSpec) -> Adapter:
        """Said now what was left open then; an inspection that finds something else will say so."""
        filled = replace(known, digest=known.digest or spec.digest, base_model=known.base_model or spec.base_model)
        if filled != known:
            self._store.put_adapter(filled)
        return filled

    def patch(self, lora_id: str, patch: AdapterPatch) -> Adapter:
        """Policy fields that are named change, the others stay; so do tenants. Raises NotFound."""
        adapter = self.adapter(lora_id)
        if patch.policy is not None:
            for name in patch.policy.model_fields_set:
                adapter = replace(adapter, **{name: getattr(patch.policy, name)})
        if "tenants" in patch.model_fields_set:
            adapter = replace(adapter, tenants=_sorted(patch.tenants))
        _check_bounds(adapter, self._store.rules)
        self._store.put_adapter(adapter)
        return adapter

    def delete(self, lora_id: str) -> None:
        """Mark it; it goes when no worker holds it any more. Raises NotFound, Conflict while an alias points at it."""
        adapter = self.adapter(lora_id)
        names = [name for name, targets in self._store.aliases.items() if any(t[0] == lora_id for t in targets)]
        if names:
            message = f"{lora_id!r} is the target of alias {', '.join(map(repr, names))}; change or delete that first"
            raise Conflict(message, code="in_use", param="lora_id")
        if not adapter.is_deleting:
            self._store.put_adapter(replace(adapter, is_deleting=True))

    def unquarantine(self, lora_id: str) -> Adapter:
        """Forget why it failed. What an agent once found of its bytes stays: those may not change."""
        adapter = replace(self.adapter(lora_id), quarantine=None)
        self._store.put_adapter(adapter)
        return adapter

    def put_alias(self, name: str, spec: AliasSpec) -> bool:
        """Whether it is new. Raises Conflict for a taken name, NotFound for a target that is not registered."""
        self.require_name(name)
        is_new = name not in self._store.aliases
        if is_new:
            self._require_free(name, "name")
        for target in spec.targets:
            if self.adapter(target.lora_id).is_deleting:
                message = f"{target.lora_id!r} is being deleted and cannot be a target"
                raise Conflict(message, code="adapter_deleting", param="targets")
        if not sum(target.weight for target in spec.targets) > 0:
            raise RequestError("at least one target needs a weight above 0", param="targets")
        self._store.put_alias(name, tuple((target.lora_id, target.weight) for target in spec.targets))
        return is_new

    def alias(self, name: str) -> tuple[tuple[str, float], ...]:
        """Raises NotFound."""
        found = self._store.aliases.get(name)
        if found is None:
            raise NotFound(f"alias {name!r} does not exist", code="alias_not_found", param="name")
        return found

    def drop_alias(self, name: str) -> None:
        """Raises NotFound."""
        self.alias(name)
        self._store.drop_alias(name)

    @staticmethod
    def require_name(name: str) -> None:
        """Raises RequestError when this cannot be an alias's name."""
        try:
            checked_lora_id(name)
        except ValueError as exc:
            raise RequestError(str(exc).replace("lora_id", "alias", 1), param="name") from exc

    def _require_free(self, name: str, param: str) -> None:
        taken = None
        if name in self._store.aliases:
            taken = "an alias"
        elif name in self._store.adapters:
            taken = "an adapter"
        elif name in self._fleet.base_model_names():
            taken = "a base model that a worker serves"
        if taken is not None:
            raise Conflict(f"{name!r} is the name of {taken}; choose another", code="name_taken", param=param)

    def policy_etag(self) -> str:
        body = json.dumps(asdict(self._store.rules), sort_keys=True)
        return f'"{hashlib.sha256(body.encode()).hexdigest()[:16]}"'

    def policy(self) -> Policy:
        return Policy.model_validate(asdict(self._store.rules))

    def put_policy(self, policy: Policy, if_match: str | None) -> Policy:
        """Raises Stale when the policy is no longer the one that the caller saw."""
        if if_match is not None and if_match.strip() not in ("*", self.policy_etag()):
            raise Stale(f"the policy has changed since {if_match}; GET /v1/policy and decide again")
        if policy.min_replicas > policy.max_replicas:
            raise RequestError(_BOUNDS.format(policy.min_replicas, policy.max_replicas), param="min_replicas")
        self._store.put_rules(Rules(**policy.model_dump()))
        return policy

    def patch_policy(self, changes: dict[str, Any], if_match: str | None) -> Policy:
        """Raises RequestError naming what is wrong, Stale like `put_policy`."""
        try:
            policy = Policy.model_validate(asdict(self._store.rules) | changes)
        except ValidationError as exc:
            first = exc.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise RequestError(f"{where}: {first['msg']}", param=where) from exc
        return self.put_policy(policy, if_match)

    def set_worker(self, worker_id: str, state: str | None, *, drain_s: float | None = None) -> None:
        """cordoned, draining, or None for neither. Raises NotFound."""
        if worker_id not in self._fleet.entries and worker_id not in self._store.workers:
            known = ", ".join(sorted(self._fleet.entries)) or "none"
            raise NotFound(f"worker {worker_id!r} has not registered; known: {known}", code="worker_not_found")
        until = None if drain_s is None else self._wall() + drain_s
        self._store.put_worker(worker_id, None if state is None else WorkerIntent(state, until))


_BOUNDS = "min_replicas {} is above max_replicas {}"


def new_adapter(spec: AdapterSpec) -> Adapter:
    """The adapter that a spec describes; nothing of it is inspected yet."""
    adapter = Adapter(
        lora_id=spec.lora_id,
        source=spec.source,
        base_model=spec.base_model,
        digest=spec.digest,
        tenants=_sorted(spec.tenants),
    )
    return _with_policy(adapter, spec.policy)


def policy_of(adapter: Adapter) -> AdapterPolicy:
    """The wire's form of an adapter's own policy."""
    return AdapterPolicy.model_validate({name: getattr(adapter, name) for name in AdapterPolicy.model_fields})


def _with_policy(adapter: Adapter, policy: AdapterPolicy) -> Adapter:
    adapter = replace(adapter, **{name: getattr(policy, name) for name in AdapterPolicy.model_fields})
    _check_bounds(adapter, None)
    return adapter


def _check_bounds(adapter: Adapter, rules: Rules | None) -> None:
    least = adapter.min_replicas if adapter.min_replicas is not None or rules is None else rules.min_replicas
    most = adapter.max_replicas if adapter.max_replicas is not None or rules is None else rules.max_replicas
    is_own = adapter.min_replicas is not None or adapter.max_replicas is not None
    if is_own and least is not None and most is not None and least > most:
        raise RequestError(_BOUNDS.format(least, most), param="policy.min_replicas")


def _sorted(tenants: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if tenants is None else tuple(sorted(set(tenants)))


def _next_version(lora_id: str) -> str:
    name, slash, version = lora_id.rpartition("/")
    if slash and version.startswith("v") and version[1:].isdigit():
        return f"{name}/v{int(version[1:]) + 1}"
    return f"{lora_id}/v2"


assert {f.name for f in fields(Rules)} == set(Policy.model_fields), "core and wire disagree on the policy's fields"
