"""Changes of intent: adapters, aliases, cordons, policy. Each is checked and then written to the store.

Nothing here calls a worker; the next pass acts on the change.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from lorafleet.service.http import validation_message
from orchestrator.core.errors import (
    NotFound,
    OrchestratorRequestError,
    PreconditionFailed,
    PreconditionRequired,
    StateConflict,
)
from orchestrator.core.source_rules import secret_part, without_secrets
from orchestrator.model.adapters import CHANGEABLE, AdapterSpec, RegisteredAdapter
from orchestrator.model.changes import as_written, reader_of, with_changes
from orchestrator.model.policy import PlacementPolicy, require_bounds
from orchestrator.model.served_names import AliasSpec, ServedName, weight_pairs
from orchestrator.model.snapshot import WorkerIntent
from orchestrator.reconcile.served_names import NameMover, name_problem
from orchestrator.reconcile.worker_reports import WorkerReports
from orchestrator.store.store import NOBODY, IntentStore

_IMMUTABLE = ("source", "digest", "base_model")

MOST_KEPT_OUT = 1_000
"""Adapters that one worker keeps out: routers read them with the worker, and one ConfigMap has those of all workers."""

MOST_GONE_ORDERS = 1_000
"""Orders that are kept for workers that are not registered now: a name may never return, such as that of a pod."""


class Registration(NamedTuple):
    """An adapter that is registered now; `is_new`: it was not before."""

    adapter: RegisteredAdapter
    is_new: bool


class AdapterRegistry:
    """The checked changes of intent that REST and ConfigMaps make.

    forget_failures  called with an adapter whose inspection request has changed
    """

    def __init__(
        self,
        store: IntentStore,
        reports: WorkerReports,
        mover: NameMover,
        *,
        forget_failures: Callable[[str], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._reports = reports
        self._mover = mover
        self._forget_failures = forget_failures
        self._wall = wall

    def adapter(self, lora_id: str) -> RegisteredAdapter:
        """The registered adapter. Raises NotFound."""
        found = self._store.adapters.get(lora_id)
        if found is None:
            raise NotFound(f"adapter {lora_id!r} is not registered; POST /v1/adapters registers one", param="lora_id")
        return found

    def equal_registration(self, spec: AdapterSpec) -> RegisteredAdapter | None:
        """The registered adapter if it equals the spec; None if the spec is new and may be registered.

        One that was only adopted counts as new: nobody has registered it yet.

        Raises StateConflict when it cannot be registered, OrchestratorRequestError for a source with credentials in it.
        """
        known = self._store.adapters.get(spec.lora_id)
        if known is None or (known.is_adopted and not known.is_deleting):
            if known is None:
                self.require_free(spec.lora_id, "lora_id")
            _require_no_secret(spec.source)
            return None
        _require_same(known, spec)
        if _changeable_fields(spec) != _changeable_fields(known.spec):
            message = (
                f"{spec.lora_id!r} is registered with another policy, tenants or secret;"
                f" PATCH /v1/adapters/{spec.lora_id} changes those"
            )
            raise StateConflict(message, code="already_registered", param="lora_id")
        return known

    def uploadable(self, lora_id: str, digest: str | None) -> RegisteredAdapter | None:
        """The registered adapter that bytes of this digest (None: of any) may be uploaded for; None if it is new.

        Raises StateConflict where the name is taken, or the adapter has another digest or is being deleted.
        """
        known = self._store.adapters.get(lora_id)
        if known is None:
            self.require_free(lora_id, "lora_id")
            return None
        _require_same(known, AdapterSpec(lora_id=lora_id, source=known.source, digest=digest))
        return known

    def register(self, spec: AdapterSpec, actor: str = NOBODY) -> Registration:
        """Store the adapter, with a history entry, unless it is registered already; returns it, and whether it is new.

        A registered adapter without digest or base model gets those of the spec. Raises StateConflict,
        OrchestratorRequestError.
        """
        known = self.equal_registration(spec)
        if known is not None:
            return Registration(self._fill_in(known, spec), is_new=False)
        adapter = RegisteredAdapter(spec=spec)
        adopted = self._store.adapters.get(spec.lora_id)
        if adopted is not None and _is_same_bytes(adopted, spec):
            adapter = adapter.with_inspection_of(adopted)
        elif adopted is not None:
            self._forget_failures(spec.lora_id)
        with self._store.together():
            self._store.put_adapter(adapter)
            body = as_written(spec)
            del body["lora_id"]
            self._store.record("adapter_registered", spec.lora_id, body, actor)
        return Registration(adapter, is_new=True)

    def apply_spec(self, spec: AdapterSpec, actor: str = NOBODY) -> None:
        """Register the adapter, or change a registered one to this spec; fields that it leaves out get their default.

        Raises StateConflict, OrchestratorRequestError.
        """
        known = self._store.adapters.get(spec.lora_id)
        if known is None or (known.is_adopted and not known.is_deleting):
            self.register(spec, actor)
            return
        _require_same(known, spec)
        changed = replace(known.spec, **_changeable_fields(spec))
        self._require_bounds(known.spec, changed)  # before anything is written
        with self._store.together():
            self._change(self._fill_in(known, spec), changed, actor)

    def _fill_in(self, known: RegisteredAdapter, spec: AdapterSpec) -> RegisteredAdapter:
        """Store digest and base model from the spec where the registration has none, and drop the failures then."""
        filled = known.with_spec(digest=known.digest or spec.digest, base_model=known.base_model or spec.base_model)
        if filled != known:
            self._store.put_adapter(filled)
            self._forget_failures(known.lora_id)
        return filled

    def patch_adapter(
        self, lora_id: str, changes: Mapping[str, Any], actor: str = NOBODY, *, if_match: str | None = None
    ) -> RegisteredAdapter:
        """Store the changes of the spec, with a history entry; a new secret also drops the adapter's failures.

        Raises NotFound, PreconditionFailed, OrchestratorRequestError.
        """
        before = self.adapter(lora_id)
        _require_match(if_match, self.adapter_etag(before), f"adapter {lora_id!r}")
        spec = changed_spec(before.spec, changes)
        self._require_bounds(before.spec, spec)
        return self._change(before, spec, actor)

    def _change(self, before: RegisteredAdapter, spec: AdapterSpec, actor: str) -> RegisteredAdapter:
        """Store the adapter with this spec; returns it. An adopted one is registered from now on."""
        adapter = replace(before.with_spec(**_changeable_fields(spec)), is_adopted=False, left_at=None)
        if adapter != before:
            with self._store.together():
                self._store.put_adapter(adapter)
                changed = _changed_fields(changeable_fields(before.spec), changeable_fields(spec))
                self._store.record("adapter_changed", spec.lora_id, changed, actor)
        if adapter.secret != before.secret:
            self._forget_failures(spec.lora_id)
        return adapter

    def _require_bounds(self, before: AdapterSpec, after: AdapterSpec) -> None:
        """Raise OrchestratorRequestError where a change of replicas does not fit the global policy's other bound."""
        own, was, rules = after.policy, before.policy, self._store.rules
        if (own.min_replicas, own.max_replicas) == (was.min_replicas, was.max_replicas) or (
            own.min_replicas is None and own.max_replicas is None
        ):
            return
        try:
            require_bounds(
                rules.min_replicas if own.min_replicas is None else own.min_replicas,
                rules.max_replicas if own.max_replicas is None else own.max_replicas,
            )
        except ValueError as exc:
            raise OrchestratorRequestError(str(exc), param="policy.min_replicas") from exc

    def delete_adapter(self, lora_id: str, actor: str = NOBODY, *, if_match: str | None = None) -> None:
        """Mark the adapter as deleting, with a history entry, unless it is; dropped when no worker holds it any more.

        Raises NotFound, StateConflict while an alias or rollout points at it, PreconditionFailed.
        """
        adapter = self.adapter(lora_id)
        _require_match(if_match, self.adapter_etag(adapter), f"adapter {lora_id!r}")
        names = [name.name for name in self._store.names.values() if lora_id in name.needed_ids]
        if names:
            message = f"{lora_id!r} is the target of alias {', '.join(map(repr, names))}; change or delete that first"
            raise StateConflict(message, code="in_use", param="lora_id")
        if not adapter.is_deleting:
            with self._store.together():
                self._store.put_adapter(replace(adapter, is_deleting=True))
                self._store.record("adapter_deleted", lora_id, {"digest": adapter.digest}, actor)

    def unquarantine(self, lora_id: str, actor: str = NOBODY) -> RegisteredAdapter:
        """Lift the adapter's quarantine; returns the adapter. Its inspected digest stays, as its bytes may not change.

        Raises NotFound.
        """
        before = self.adapter(lora_id)
        adapter = replace(before, quarantine=None)
        if before.quarantine is not None:
            with self._store.together():
                self._store.put_adapter(adapter)
                self._store.record("adapter_retried", lora_id, {"quarantine": before.quarantine}, actor)
        return adapter

    @staticmethod
    def adapter_etag(adapter: RegisteredAdapter) -> str:
        """ETag of the fields that callers may change; reports of agents do not change it."""
        return _etag([adapter.lora_id, adapter.source, changeable_fields(adapter.spec)])

    def put_alias(self, name: str, spec: AliasSpec, actor: str = NOBODY, *, if_match: str | None = None) -> bool:
        """Create or change an alias; returns whether it is new. A known alias shifts when the targets are placed.

        Raises StateConflict for a taken name, a target that is being deleted, and while a rollout is in progress;
        NotFound for a target that is not registered; OrchestratorRequestError for weights of 0 alone;
        PreconditionFailed.
        """
        _require_match(if_match, self.alias_etag(name), f"alias {name!r}")
        is_new = not self._store.targets_of(name)
        if is_new:
            self.require_free(name, "name")
        for target in spec.targets:
            self._require_target(target.lora_id, "targets")
        if not sum(target.weight for target in spec.targets) > 0:
            raise OrchestratorRequestError("at least one target needs a weight above 0", param="targets")
        self._mover.point_alias(name, spec.targets, actor, place_s=spec.place_s)
        return is_new

    def require_rollout_target(self, name: str, to: str) -> None:
        """Raise NotFound for an unknown alias or target, StateConflict for a target that is being deleted."""
        self.alias(name)
        self._require_target(to, "to")

    def _require_target(self, lora_id: str, param: str) -> None:
        """Raise NotFound or StateConflict when the adapter cannot be an alias's target. `param`: named in the error."""
        if self.adapter(lora_id).is_deleting:
            message = f"{lora_id!r} is being deleted and cannot be a target"
            raise StateConflict(message, code="adapter_deleting", param=param)

    def alias_etag(self, name: str) -> str | None:
        """ETag of the alias; None while there is no such alias."""
        found = self._store.names.get(name)
        if found is None or not found.targets:
            return None
        going = found.active_rollout
        return _etag([name, weight_pairs(found.targets), None if going is None else weight_pairs(going.after)])

    def alias(self, name: str) -> ServedName:
        """The name, if it points at adapters. Raises NotFound."""
        found = self._store.names.get(name)
        if found is None or not found.targets:
            raise NotFound(f"alias {name!r} does not exist", code="alias_not_found", param="name")
        return found

    def delete_alias(self, name: str, actor: str = NOBODY, *, if_match: str | None = None) -> None:
        """Delete the alias and its rollout, and record it in the history.

        Raises NotFound, StateConflict for a published name, PreconditionFailed.
        """
        present = self.alias(name)
        _require_match(if_match, self.alias_etag(name), f"alias {name!r}")
        if present.published is not None:
            message = f"{name!r} is a published name; DELETE /v1/published/{name} deletes it with its versions"
            raise StateConflict(message, code="name_published", param="name")
        with self._store.together():
            self._store.drop_name(name)
            self._store.record("alias_deleted", name, {"was": weight_pairs(present.targets)}, actor)

    def require_free(self, name: str, param: str) -> None:
        """Raise StateConflict when the name is an alias, a published name, an adapter or a base model.

        param  named in the error
        """
        problem = name_problem(self._store, self._reports, name)
        if problem is not None:
            raise StateConflict(problem, code="name_taken", param=param)

    def policy_etag(self) -> str:
        """ETag of the global policy."""
        return _etag(asdict(self._store.rules))

    def policy(self) -> PlacementPolicy:
        """The global policy."""
        return self._store.rules

    def put_policy(self, policy: PlacementPolicy, if_match: str | None, actor: str = NOBODY) -> PlacementPolicy:
        """Replace the whole policy; returns it.

        Raises PreconditionFailed when `if_match` names another version, PreconditionRequired when it is None.
        """
        if if_match is None:
            raise PreconditionRequired(
                "PUT replaces the whole policy, so it needs If-Match with the ETag that GET /v1/policy answered"
                " (or * for whatever is there); PATCH changes only what it names"
            )
        return self._replace_policy(policy, if_match, actor)

    def patch_policy(self, changes: Mapping[str, Any], if_match: str | None, actor: str = NOBODY) -> PlacementPolicy:
        """Store the policy with these changes; returns it. Raises OrchestratorRequestError, PreconditionFailed."""
        return self._replace_policy(changed_policy(self._store.rules, changes), if_match, actor)

    def _replace_policy(self, policy: PlacementPolicy, if_match: str | None, actor: str) -> PlacementPolicy:
        """Store the policy, with a history entry, if it differs; returns it. Raises PreconditionFailed."""
        _require_match(if_match, self.policy_etag(), "the policy")
        before = self._store.rules
        if policy != before:
            with self._store.together():
                self._store.put_rules(policy)
                self._store.record("policy_changed", "", _changed_fields(asdict(before), asdict(policy)), actor)
        return policy

    def set_worker(
        self,
        worker_id: str,
        state: Literal["cordoned", "draining"] | None,
        *,
        deadline_s: float | None = None,
        actor: str = NOBODY,
    ) -> bool:
        """Store an operator's order for a worker, with a history entry: cordoned or draining; None takes it back.

        Returns whether the order differs from the present one; an equal one changes nothing. Raises NotFound.

        deadline_s  seconds after which a drain stops waiting for moves; None: it follows what must be moved
        """
        order = self._worker_order(worker_id)
        present = (None, None) if order is None else (order.state, order.deadline_s)
        if present == (state, deadline_s):
            return False
        now = self._wall()
        until = None if deadline_s is None else now + deadline_s
        fresh = WorkerIntent(state=state, since=now, until=until, deadline_s=deadline_s)
        if order is not None and order.state == state:  # a drain with a new deadline
            fresh = replace(fresh, moves=order.moves, move_bytes=order.move_bytes)
        intent = fresh.with_kept_out(() if order is None else order.kept_out)
        with self._store.together():
            self._forget_oldest_orders()
            self._store.put_worker(worker_id, intent)
            self._store.record(f"worker_{state or 'uncordoned'}", worker_id, {"drain_s": deadline_s}, actor)
        return True

    def keep_out(self, worker_id: str, lora_id: str, actor: str = NOBODY) -> bool:
        """Store that the worker gets no copy of the adapter, and loses one that it has; with a history entry.

        Returns whether that is new. Raises NotFound for an unknown worker, or an adapter that is neither registered nor
        there; StateConflict where too many are kept out.

        lora_id  of another client's adapter its engine name
        """
        order = self._worker_order(worker_id) or WorkerIntent(since=self._wall())
        if lora_id in order.kept_out:
            return False
        if lora_id not in self._store.adapters and not self._reports.has_copy(worker_id, lora_id):
            message = f"adapter {lora_id!r} is neither registered nor on {worker_id!r}; GET /v1/placements lists copies"
            raise NotFound(message, param="lora_id")
        if len(order.kept_out) >= MOST_KEPT_OUT:
            message = f"{worker_id!r} keeps {MOST_KEPT_OUT} adapters out, the most that it may; let some in again"
            raise StateConflict(message, code="too_many_kept_out", param="lora_id")
        self._put_kept_out(worker_id, order, {*order.kept_out, lora_id}, ("copy_kept_out", lora_id), actor)
        return True

    def allow(self, worker_id: str, lora_id: str, actor: str = NOBODY) -> bool:
        """Store that the worker may have a copy of the adapter again, with a history entry.

        Returns whether it was kept out. Raises NotFound for an unknown worker.
        """
        order = self._worker_order(worker_id)
        if order is None or lora_id not in order.kept_out:
            return False
        self._put_kept_out(worker_id, order, {*order.kept_out} - {lora_id}, ("copy_allowed", lora_id), actor)
        return True

    def _put_kept_out(
        self, worker_id: str, order: WorkerIntent, names: set[str], entry: tuple[str, str], actor: str
    ) -> None:
        """Store the adapters that a worker keeps out, with a history entry of this kind and adapter."""
        with self._store.together():
            self._forget_oldest_orders()
            self._store.put_worker(worker_id, order.with_kept_out(names))
            self._store.record(*entry, {"worker_id": worker_id}, actor)

    def _worker_order(self, worker_id: str) -> WorkerIntent | None:
        """The operator's orders for a worker; None: there are none. Raises NotFound for an unknown worker."""
        if worker_id not in self._reports.workers and worker_id not in self._store.workers:
            known = ", ".join(self._reports.workers) or "none"
            raise NotFound(f"worker {worker_id!r} has not registered; known: {known}", code="worker_not_found")
        return self._store.workers.get(worker_id)

    def _forget_oldest_orders(self) -> None:
        """Take back the oldest orders for workers that are not registered, so that MOST_GONE_ORDERS of them are left.

        Without this each drained pod would leave one in the store for ever, where one ConfigMap holds them all.
        """
        orders = self._store.workers
        gone = [worker_id for worker_id in orders if worker_id not in self._reports.workers]
        gone.sort(key=lambda worker_id: orders[worker_id].since)
        for worker_id in gone[:-MOST_GONE_ORDERS]:
            self._store.put_worker(worker_id, None)


def _require_no_secret(source: str) -> None:
    """Raise OrchestratorRequestError when the source URL holds a secret."""
    part = secret_part(source)
    if part is not None:
        raise OrchestratorRequestError(
            f"source {without_secrets(source)} has {part} with it: credentials would be stored and shown, and signed"
            " addresses expire; register the plain address, and give credentials to the workers (secretRef)",
            code="source_has_credentials",
            param="source",
        )


def _require_same(known: RegisteredAdapter, spec: AdapterSpec) -> None:
    """Raise StateConflict where the spec changes an immutable field, or the adapter is being deleted."""
    if known.is_deleting:
        message = f"adapter {spec.lora_id!r} is being deleted; register it again when that is done"
        raise StateConflict(message, code="adapter_deleting", param="lora_id")
    for name in _IMMUTABLE:
        asked, present = getattr(spec, name), getattr(known, name)
        if asked is not None and present is not None and asked != present:
            raise StateConflict(
                f"{spec.lora_id!r} is registered with {name} {present!r}, which cannot change to {asked!r}: register"
                f" a new version (such as {_next_version(spec.lora_id)!r}) and point an alias at it",
                code="immutable",
                param=name,
            )


def _is_same_bytes(adopted: RegisteredAdapter, spec: AdapterSpec) -> bool:
    """Whether the spec means the bytes of an adopted adapter: by their digest, else by their place."""
    if spec.digest is not None:
        return spec.digest == adopted.digest
    return spec.source.removeprefix("file://") == adopted.source.removeprefix("file://")


def spec_of(written: Mapping[str, Any]) -> AdapterSpec:
    """The spec that somebody wrote. Raises OrchestratorRequestError."""
    try:
        spec: AdapterSpec = reader_of(AdapterSpec).validate_python(written)
    except ValidationError as exc:
        raise _request_error(exc) from exc
    return spec


def changed_spec(spec: AdapterSpec, changes: Mapping[str, Any]) -> AdapterSpec:
    """The spec with these changes. Raises OrchestratorRequestError where they do not fit each other."""
    try:
        return with_changes(spec, changes)
    except ValidationError as exc:
        raise _request_error(exc) from exc


def changeable_fields(spec: AdapterSpec) -> dict[str, Any]:
    """field -> value of what may change, with those of the policy beside them, as the history shows them."""
    return asdict(spec.policy) | {"tenants": spec.tenants, "secret_ref": spec.secret_ref and str(spec.secret_ref)}


def _changeable_fields(spec: AdapterSpec) -> dict[str, Any]:
    """field of the spec -> value of what may change."""
    return {name: getattr(spec, name) for name in CHANGEABLE}


def _request_error(found: ValidationError) -> OrchestratorRequestError:
    """What is wrong with a body, by pydantic's findings."""
    where = ".".join(map(str, found.errors()[0]["loc"]))
    return OrchestratorRequestError(validation_message(found.errors()), param=where or None)


def changed_policy(rules: PlacementPolicy, changes: Mapping[str, Any]) -> PlacementPolicy:
    """The global policy with these changes. Raises OrchestratorRequestError where they do not fit each other."""
    try:
        return with_changes(rules, changes)
    except ValidationError as exc:
        raise OrchestratorRequestError(validation_message(exc.errors()), param="policy") from exc


def _etag(value: object) -> str:
    """An ETag: a hash of the value as JSON."""
    return f'"{hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]}"'


def _require_match(if_match: str | None, etag: str | None, subject: str) -> None:
    """Raise PreconditionFailed when `if_match` is given and does not match the ETag."""
    if if_match is None:
        return
    asked = {tag.strip().removeprefix("W/") for tag in if_match.split(",")}
    if etag is None or (etag not in asked and "*" not in asked):
        now = "does not exist" if etag is None else f"is {etag} now"
        raise PreconditionFailed(
            f"{subject} {now}, If-Match says {if_match}: read it again and decide again", param="If-Match"
        )


def _changed_fields(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    """field -> [before, after], of the fields that differ."""
    return {name: [before[name], after[name]] for name in after if before[name] != after[name]}


def _next_version(lora_id: str) -> str:
    """An example of a lora_id for a new version: `x/v1` gives `x/v2`."""
    name, slash, version = lora_id.rpartition("/")
    if slash and version.startswith("v") and version[1:].isdigit():
        return f"{name}/v{int(version[1:]) + 1}"
    return f"{lora_id}/v2"
