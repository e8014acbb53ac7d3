"""The fleet's record: what is stored, as one document; how another fleet's record differs, and taking it over.

`differences` decides and changes nothing; `import_record` makes those changes through the registry, one by one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import msgspec

from orchestrator.core.errors import OrchestratorError, OrchestratorRequestError
from orchestrator.core.published_names import taken_over
from orchestrator.intent.registry import AdapterRegistry, changeable_fields, changed_spec, spec_of
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.changes import RecordedAdapter
from orchestrator.model.record import (
    FleetRecord,
    ImportRequest,
    RecordChange,
)
from orchestrator.model.served_names import AliasSpec, Publication, ServedName, weight_pairs
from orchestrator.reconcile.served_names import VersionRetention
from orchestrator.store.store import IntentStore

_SHARED_SCHEMES = ("hf://", "s3://", "gs://", "az://", "https://")
_IMMUTABLE = ("digest", "base_model")


def fleet_record(store: IntentStore) -> FleetRecord:
    """The stored adapters, aliases and policy as one document; adapters that are being deleted are left out."""
    return FleetRecord(
        revision=store.revision,
        adapters=tuple(_recorded_adapter(adapter) for adapter in store.adapters.values() if not adapter.is_deleting),
        names=tuple(recorded_name(name) for name in store.names.values() if not _is_deleted(name)),
        policy=asdict(store.rules),
    )


def _recorded_adapter(adapter: RegisteredAdapter) -> RecordedAdapter:
    """The adapter as the record has it."""
    fields: dict[str, Any] = msgspec.to_builtins(adapter.spec)  # `asdict` takes 20 times as long
    return fields | {"source": adapter.fetched_from}


def recorded_name(name: ServedName) -> ServedName:
    """The name as the record has it: without a rollout, times of its own, and versions that it never pointed at."""
    record = name.published
    if record is not None:
        pointed = tuple(version for version in record.versions if version.pointed_at is not None)
        record = replace(record, versions=pointed, published_at=0.0, used_at=0.0, dropped=())
    return replace(name, rollout=None, published=record)


def _is_deleted(name: ServedName) -> bool:
    """Whether the published name was deleted, and its last versions are about to go."""
    return name.published is not None and name.published.deleted_at is not None


def differences(store: IntentStore, ask: ImportRequest) -> list[RecordChange]:
    """What an import would change, in the order in which it does; empty when the record is met. Changes nothing.

    What only this fleet has is kept, unless the import prunes. What cannot be taken over is `blocked`, with a reason.
    Raises OrchestratorRequestError for a prune by a record without adapters: it may be that of a lost store.
    """
    if ask.prune and not ask.record.adapters:
        message = "the record has no adapters, so a prune would delete all of this fleet's: is it the right record?"
        raise OrchestratorRequestError(message, param="prune")
    found: list[RecordChange] = []
    parts = set(ask.parts)
    if "adapters" in parts:
        found += _adapter_changes(store, ask)
    if "aliases" in parts:
        blocked = {change.name for change in found if change.change == "blocked"}
        found += _name_changes(store, ask, blocked)
        if ask.prune:
            there = {(name.name, name.published is not None) for name in ask.record.names}
            for name in store.names.values():
                is_published = name.published is not None
                # An alias that is a published name there becomes one.
                has_it = (name.name, is_published) in there or (name.name, True) in there
                if not has_it and not _is_deleted(name):
                    found.append(_removal_change("alias", name.name, is_published=is_published))
    if "adapters" in parts and ask.prune:
        ids = {adapter["lora_id"] for adapter in ask.record.adapters}
        for lora_id, adapter in store.adapters.items():
            if lora_id not in ids and not adapter.is_deleting:
                found.append(_removal_change("adapter", lora_id))
    if "policy" in parts and ask.record.policy is not None:
        fields = _differing_fields(asdict(store.rules), ask.record.policy)
        if fields:
            found.append(RecordChange(subject="policy", name="", change="change", fields=fields))
    return found


def _removal_change(subject: Literal["adapter", "alias"], name: str, *, is_published: bool = False) -> RecordChange:
    """The removal of what only this fleet has."""
    reason = "the record does not have it"
    return RecordChange(subject=subject, name=name, change="remove", is_published=is_published, reason=reason)


def _adapter_changes(store: IntentStore, ask: ImportRequest) -> Iterator[RecordChange]:
    """The changes of adapters, by lora_id."""
    for adapter in sorted(ask.record.adapters, key=lambda adapter: adapter["lora_id"]):
        here = store.adapters.get(adapter["lora_id"])
        reason = _blocked_reason(store, adapter, here, ask)
        try:
            spec = local_spec(adapter, ask) if here is None else _spec_here(adapter, here)
        except OrchestratorRequestError as exc:
            reason, spec = reason or f"{exc.code}: {exc}", None
        if reason is not None or spec is None:
            yield RecordChange(subject="adapter", name=adapter["lora_id"], change="blocked", reason=reason or "")
        elif here is None:
            fields = {"digest": [None, spec.digest], "source": [None, spec.source]}
            yield RecordChange(subject="adapter", name=spec.lora_id, change="add", fields=fields)
        elif fields := _differing_fields(_compared_fields(here.spec), _compared_fields(spec)):
            yield RecordChange(subject="adapter", name=spec.lora_id, change="change", fields=fields)


def _compared_fields(spec: AdapterSpec) -> dict[str, Any]:
    """The fields that an import changes. Sources may differ: the digest says what the bytes are."""
    fields = changeable_fields(spec) | {"digest": spec.digest}
    del fields["secret_ref"]
    return fields


def _blocked_reason(
    store: IntentStore, adapter: Mapping[str, Any], here: RegisteredAdapter | None, ask: ImportRequest
) -> str | None:
    """Why the adapter cannot be taken over; None when it can."""
    if here is None:
        if store.targets_of(adapter["lora_id"]):
            return "an alias has this name here"
        if adapter.get("digest") is None and ask.from_fleet is not None and not _keeps_source(adapter, ask):
            return "its digest is not known there yet, so its files cannot be fetched by digest"
        return None
    if here.is_deleting:
        return "it is being deleted here"
    for name in _IMMUTABLE:
        ours, theirs = getattr(here, name), adapter.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            return f"{name} is {ours} here and {theirs} there; bytes under a lora_id never change: use a new lora_id"
    return None


def _name_changes(store: IntentStore, ask: ImportRequest, blocked: set[str]) -> Iterator[RecordChange]:
    """The changes of names, in order. A version counts once its adapter is there, or about to be.

    A name that is about to shift to the record's targets needs no change of these.
    """
    adapters = {adapter["lora_id"] for adapter in ask.record.adapters} if "adapters" in ask.parts else set[str]()
    registered = (adapters | store.adapters.keys()) - blocked
    for theirs in sorted(ask.record.names, key=lambda name: name.name):
        here = store.names.get(theirs.name) or ServedName(name=theirs.name)
        going = here.active_rollout
        fields: dict[str, list[Any]] = {}
        if theirs.targets and theirs.targets not in (here.targets, here.targets if going is None else going.after):
            ours, wanted = (dict(weight_pairs(targets)) for targets in (here.targets, theirs.targets))
            fields["targets"] = [ours or None, wanted]
        if theirs.published is not None:
            after = taken_over(theirs.published, here, registered, 0.0).published
            fields |= _differing_fields(_published_fields(here.published), _published_fields(after))
        is_back = theirs.published is not None and _is_deleted(here)
        if not fields and not is_back:
            continue
        change = RecordChange(
            subject="alias",
            name=theirs.name,
            change="add" if theirs.name not in store.names else "change",
            is_published=theirs.published is not None,
            fields=fields,
        )
        reason = _blocked_name_reason(store, theirs, blocked)
        yield change if reason is None else change.model_copy(update={"change": "blocked", "reason": reason})


def _blocked_name_reason(store: IntentStore, theirs: ServedName, blocked: set[str]) -> str | None:
    """Why the name cannot be taken over; None when it can."""
    if theirs.name in store.adapters:
        return "an adapter has this name here"
    missing = sorted({target.lora_id for target in theirs.targets} & blocked)
    return f"its target {missing[0]!r} cannot be taken over" if missing else None


def _published_fields(record: Publication | None) -> dict[str, Any]:
    """The fields of a published name that fleets share; empty for any other name."""
    if record is None:
        return {}
    versions = [each.lora_id for each in record.versions]
    shared = {"next_number": record.next_number, "shadows_base": record.shadows_base, "versions": versions}
    return asdict(record.spec) | shared


def _differing_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """field -> [ours, theirs] of the fields that differ."""
    return {name: [ours.get(name), value] for name, value in theirs.items() if ours.get(name) != value}


def _keeps_source(adapter: Mapping[str, Any], ask: ImportRequest) -> bool:
    """Whether the adapter keeps its own source, because this fleet can reach it as well."""
    return ask.from_fleet is None or (ask.keep_sources and adapter["source"].startswith(_SHARED_SCHEMES))


def local_spec(adapter: Mapping[str, Any], ask: ImportRequest) -> AdapterSpec:
    """The registration of a recorded adapter in this fleet: by its own source, or by digest from the other fleet."""
    if _keeps_source(adapter, ask):
        return spec_of(adapter)
    source = f"fleet+{str(ask.from_fleet).rstrip('/')}/{adapter['digest']}"
    return spec_of({**adapter, "source": source, "secret_ref": None})


def import_record(
    ask: ImportRequest, store: IntentStore, registry: AdapterRegistry, retention: VersionRetention, actor: str
) -> list[RecordChange]:
    """Make the changes that `differences` names; each is done, or has an error and changes nothing.

    All are written together: ten thousand writes would hold up the event loop for longer than the lease. A second
    import of the same record changes nothing. Raises OrchestratorRequestError as `differences`, and StoreError.
    """
    names = {name.name: name for name in ask.record.names}
    adapters = {adapter["lora_id"]: adapter for adapter in ask.record.adapters}

    def made(change: RecordChange) -> RecordChange:
        """The change once it is made; blocked, with the reason, if it cannot be."""
        if change.change == "blocked":
            return change
        try:
            match change.subject, change.change:
                case "adapter", "remove":
                    registry.delete_adapter(change.name, actor)
                case "adapter", "add":
                    registry.register(local_spec(adapters[change.name], ask), actor)
                case "adapter", _:
                    registry.apply_spec(_spec_here(adapters[change.name], store.adapters[change.name]), actor)
                case "alias", "remove" if change.is_published:
                    retention.delete_name(change.name, actor, "the record does not have it")
                case "alias", "remove":
                    registry.delete_alias(change.name, actor)
                case "alias", _:
                    theirs = names[change.name]
                    if "targets" in change.fields:
                        registry.put_alias(change.name, AliasSpec(targets=theirs.targets), actor)
                    if theirs.published is not None:
                        retention.take_over(change.name, theirs.published, actor)
                case _:
                    assert ask.record.policy is not None, "a difference of the policy comes from a record that has one"
                    registry.patch_policy(ask.record.policy, None, actor)
        except OrchestratorError as exc:
            return change.model_copy(update={"change": "blocked", "reason": f"{exc.code}: {exc}"})
        return change

    with store.together():
        return [made(change) for change in differences(store, ask)]


def _spec_here(there: Mapping[str, Any], here: RegisteredAdapter) -> AdapterSpec:
    """The registered adapter with what the record names of policy, tenants and digest; its source and secret stay.

    A field that the record does not name stays as it is here: an older fleet does not know it.
    """
    taken = ("policy", "tenants") if here.digest is not None else ("policy", "tenants", "digest")
    return changed_spec(here.spec, {name: there[name] for name in taken if name in there})
