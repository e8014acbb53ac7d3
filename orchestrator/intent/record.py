"""The fleet's record: what is stored, as one document; how another fleet's record differs, and taking it over.

`differences` decides and changes nothing; `import_record` makes those changes through the registry, one by one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.core.errors import OrchestratorError, OrchestratorRequestError
from orchestrator.core.published_names import taken_over
from orchestrator.intent.registry import AdapterRegistry, policy_of
from orchestrator.model.adapters import AdapterPolicy, AdapterSpec, SecretRef
from orchestrator.model.aliases import AliasSpec, AliasTarget
from orchestrator.model.record import (
    FleetRecord,
    ImportRequest,
    RecordChange,
    RecordedAdapter,
    RecordedAlias,
    RecordedName,
    RecordedVersion,
)
from orchestrator.model.served_names import NameVersion, Publication, ServedName
from orchestrator.model.snapshot import RegisteredAdapter
from orchestrator.reconcile.served_names import VersionRetention
from orchestrator.store.store import IntentStore

_SHARED_SCHEMES = ("hf://", "s3://", "gs://", "az://", "https://")
_IMMUTABLE = ("digest", "base_model")


def fleet_record(store: IntentStore) -> FleetRecord:
    """The stored adapters, aliases and policy as one document; adapters that are being deleted are left out."""
    return FleetRecord(
        revision=store.revision,
        adapters=tuple(_recorded(adapter) for adapter in store.adapters.values() if not adapter.is_deleting),
        aliases=tuple(_recorded_alias(name.name, name.targets) for name in store.names.values() if name.targets),
        published=tuple(_recorded_name(name, record) for name, record in published_names(store).items()),
        policy=asdict(store.rules),
    )


def _recorded(adapter: RegisteredAdapter) -> RecordedAdapter:
    """The adapter as the record has it."""
    return RecordedAdapter(
        lora_id=adapter.lora_id,
        source=adapter.fetched_from,
        base_model=adapter.base_model,
        digest=adapter.digest,
        rank=adapter.rank,
        size_bytes=adapter.size_bytes,
        policy=policy_of(adapter),
        tenants=adapter.tenants,
        secret_ref=SecretRef.of(adapter.secret),
    )


def _recorded_alias(name: str, targets: Iterable[tuple[str, float]]) -> RecordedAlias:
    """The alias as the record has it."""
    return RecordedAlias(name=name, targets=tuple(AliasTarget(lora_id=to, weight=weight) for to, weight in targets))


def published_names(store: IntentStore) -> dict[str, Publication]:
    """Published names and what the store has of them, without deleted ones."""
    found = ((name.name, name.published) for name in store.names.values())
    return {name: record for name, record in found if record is not None and record.deleted_at is None}


def _recorded_name(name: str, record: Publication) -> RecordedName:
    """The published name as the record has it, without versions that its name was never pointed at."""
    return RecordedName(
        name=name,
        tenant=record.tenant,
        next_version=record.next_number,
        versions=tuple(
            RecordedVersion(lora_id=version.lora_id, version=version.number, digest=version.digest)
            for version in record.versions
            if version.pointed_at is not None
        ),
        replicas=record.replicas,
        keep_versions=record.keep_versions,
        max_staleness_s=record.max_staleness_s,
        shadows_base=record.shadows_base,
    )


def _publication_of(recorded: RecordedName) -> Publication:
    """The published name that the record has; without times, which are this fleet's own."""
    return Publication(
        tenant=recorded.tenant,
        next_number=recorded.next_version,
        versions=tuple(
            NameVersion(lora_id=each.lora_id, number=each.version, digest=each.digest, registered_at=0.0)
            for each in recorded.versions
        ),
        replicas=recorded.replicas,
        keep_versions=recorded.keep_versions,
        max_staleness_s=recorded.max_staleness_s,
        shadows_base=recorded.shadows_base,
    )


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
        found += _alias_changes(store, ask, blocked)
        if ask.prune:
            # A published name's alias goes with the name.
            plain = [name for name, found in store.names.items() if found.published is None]
            found += _removals("alias", plain, {alias.name for alias in ask.record.aliases})
        found += _name_changes(store, ask, blocked)
        if ask.prune:
            gone = _removals("alias", published_names(store), {name.name for name in ask.record.published})
            found += [change.model_copy(update={"is_published": True}) for change in gone]
    if "adapters" in parts and ask.prune:
        present = [name for name, adapter in store.adapters.items() if not adapter.is_deleting]
        found += _removals("adapter", present, {adapter.lora_id for adapter in ask.record.adapters})
    if "policy" in parts and ask.record.policy is not None:
        fields = _changed(asdict(store.rules), ask.record.policy)
        if fields:
            found.append(RecordChange(subject="policy", name="", change="change", fields=fields))
    return found


def _removals(subject: Any, here: Iterable[str], there: set[str]) -> Iterator[RecordChange]:
    """The removals of what only this fleet has."""
    for name in here:
        if name not in there:
            yield RecordChange(subject=subject, name=name, change="remove", reason="the record does not have it")


def _adapter_changes(store: IntentStore, ask: ImportRequest) -> Iterator[RecordChange]:
    """The changes of adapters, by lora_id."""
    for adapter in sorted(ask.record.adapters, key=lambda adapter: adapter.lora_id):
        here, spec = store.adapters.get(adapter.lora_id), spec_of(adapter, ask)
        reason = _blocked_reason(store, adapter, here, ask)
        if reason is not None:
            yield RecordChange(subject="adapter", name=adapter.lora_id, change="blocked", reason=reason)
        elif here is None:
            fields = {"digest": [None, spec.digest], "source": [None, spec.source]}
            yield RecordChange(subject="adapter", name=adapter.lora_id, change="add", fields=fields)
        elif fields := _adapter_fields(here, adapter):
            yield RecordChange(subject="adapter", name=adapter.lora_id, change="change", fields=fields)


def _blocked_reason(
    store: IntentStore, adapter: RecordedAdapter, here: RegisteredAdapter | None, ask: ImportRequest
) -> str | None:
    """Why the adapter cannot be taken over; None when it can."""
    if here is None:
        if store.targets_of(adapter.lora_id):
            return "an alias has this name here"
        if adapter.digest is None and ask.from_fleet is not None and not _keeps_source(adapter, ask):
            return "its digest is not known there yet, so its files cannot be fetched by digest"
        return None
    if here.is_deleting:
        return "it is being deleted here"
    for name in _IMMUTABLE:
        ours, theirs = getattr(here, name), getattr(adapter, name)
        if ours is not None and theirs is not None and ours != theirs:
            return f"{name} is {ours} here and {theirs} there; bytes under a lora_id never change: use a new lora_id"
    return None


def _adapter_fields(here: RegisteredAdapter, there: RecordedAdapter) -> dict[str, list[Any]]:
    """field -> [here, there] of the fields that an import changes. Sources may differ: the digest says what it is.

    A field that the record does not name stays as it is here: an older fleet does not know it.
    """
    ours = policy_of(here).model_dump() | {"tenants": _sorted(here.tenants)}
    theirs = there.policy.model_dump(exclude_unset=True)
    if "tenants" in there.model_fields_set:
        theirs["tenants"] = _sorted(there.tenants)
    if here.digest is None and there.digest is not None:
        ours, theirs = ours | {"digest": None}, theirs | {"digest": there.digest}
    return _changed(ours, theirs)


def _sorted(tenants: Sequence[str] | None) -> list[str] | None:
    """The tenants in order, each once; None for everyone."""
    return None if tenants is None else sorted(set(tenants))


def _alias_changes(store: IntentStore, ask: ImportRequest, blocked: set[str]) -> Iterator[RecordChange]:
    """The changes of aliases, by name. An alias that is about to shift to the record's targets needs none."""
    for alias in sorted(ask.record.aliases, key=lambda alias: alias.name):
        wanted = tuple((target.lora_id, target.weight) for target in alias.targets)
        present = store.names.get(alias.name) or ServedName(name=alias.name)
        here, going = present.targets, present.active_rollout
        if wanted in (here, here if going is None else going.after):
            continue
        fields = {"targets": [dict(here) or None, dict(wanted)]}
        missing = sorted({to for to, _ in wanted if to in blocked})
        if missing:
            reason = f"its target {missing[0]!r} cannot be taken over"
            yield RecordChange(subject="alias", name=alias.name, change="blocked", fields=fields, reason=reason)
        else:
            change = "change" if here else "add"
            yield RecordChange.model_validate(
                {"subject": "alias", "name": alias.name, "change": change, "fields": fields}
            )


def _name_changes(store: IntentStore, ask: ImportRequest, blocked: set[str]) -> Iterator[RecordChange]:
    """The changes of published names, by name. A version counts once its adapter is there, or about to be."""
    adapters = {adapter.lora_id for adapter in ask.record.adapters} if "adapters" in ask.parts else set[str]()
    registered = (adapters | store.adapters.keys()) - blocked
    for recorded in sorted(ask.record.published, key=lambda name: name.name):
        here = store.publication_of(recorded.name)
        present = store.names.get(recorded.name) or ServedName(name=recorded.name)
        after = taken_over(_publication_of(recorded), present, registered, 0.0).published
        fields = _changed({} if here is None else _name_fields(here), {} if after is None else _name_fields(after))
        if recorded.name in store.adapters:
            reason = "an adapter has this name here"
            change = RecordChange(subject="alias", name=recorded.name, change="blocked", fields=fields, reason=reason)
            yield change.model_copy(update={"is_published": True})
        elif fields or (here is not None and here.deleted_at is not None):
            yield RecordChange(
                subject="alias",
                name=recorded.name,
                change="add" if here is None else "change",
                is_published=True,
                fields=fields,
            )


def _name_fields(record: Publication) -> dict[str, Any]:
    """The fields of a published name that fleets share."""
    kept = ("tenant", "next_number", "replicas", "keep_versions", "max_staleness_s", "shadows_base")
    return {name: getattr(record, name) for name in kept} | {"versions": [each.lora_id for each in record.versions]}


def _changed(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """field -> [ours, theirs] of the fields that differ."""
    return {name: [ours.get(name), value] for name, value in theirs.items() if ours.get(name) != value}


def _keeps_source(adapter: RecordedAdapter, ask: ImportRequest) -> bool:
    """Whether the adapter keeps its own source, because this fleet can reach it as well."""
    return ask.from_fleet is None or (ask.keep_sources and adapter.source.startswith(_SHARED_SCHEMES))


def spec_of(adapter: RecordedAdapter, ask: ImportRequest) -> AdapterSpec:
    """The registration of a recorded adapter in this fleet: by its own source, or by digest from the other fleet."""
    source, secret = adapter.source, adapter.secret_ref
    if not _keeps_source(adapter, ask):
        source, secret = f"fleet+{str(ask.from_fleet).rstrip('/')}/{adapter.digest}", None
    return AdapterSpec(
        lora_id=adapter.lora_id,
        source=source,
        base_model=adapter.base_model,
        digest=adapter.digest,
        policy=adapter.policy,
        tenants=adapter.tenants,
        secret_ref=secret,
    )


def import_record(
    ask: ImportRequest, store: IntentStore, registry: AdapterRegistry, retention: VersionRetention, actor: str
) -> list[RecordChange]:
    """Make the changes that `differences` names; each is done, or has an error and changes nothing.

    All are written together: ten thousand writes would hold up the event loop for longer than the lease. A second
    import of the same record changes nothing. Raises OrchestratorRequestError as `differences`, and StoreError.
    """
    names = {name.name: name for name in ask.record.published}
    adapters = {adapter.lora_id: adapter for adapter in ask.record.adapters}
    aliases = {alias.name: alias for alias in ask.record.aliases}

    def made(change: RecordChange) -> RecordChange:
        """The change once it is made; blocked, with the reason, if it cannot be."""
        if change.change == "blocked":
            return change
        try:
            match change.subject, change.change:
                case "adapter", "remove":
                    registry.delete_adapter(change.name, actor)
                case "adapter", "add":
                    registry.register(spec_of(adapters[change.name], ask), actor)
                case "adapter", _:
                    registry.apply_spec(_spec_here(adapters[change.name], store.adapters[change.name]), actor)
                case "alias", "remove" if change.is_published:
                    retention.delete_name(change.name, actor, "the record does not have it")
                case "alias", _ if change.is_published:
                    retention.take_over(change.name, _publication_of(names[change.name]), actor)
                case "alias", "remove":
                    registry.delete_alias(change.name, actor)
                case "alias", _:
                    registry.put_alias(change.name, _alias_spec(aliases[change.name]), actor)
                case _:
                    assert ask.record.policy is not None, "a difference of the policy comes from a record that has one"
                    registry.patch_policy(ask.record.policy, None, actor)
        except OrchestratorError as exc:
            return change.model_copy(update={"change": "blocked", "reason": f"{exc.code}: {exc}"})
        return change

    with store.together():
        return [made(change) for change in differences(store, ask)]


def _alias_spec(alias: RecordedAlias) -> AliasSpec:
    """The alias of the record as `PUT /v1/aliases` takes it."""
    return AliasSpec.model_validate({"targets": [target.model_dump() for target in alias.targets]})


def _spec_here(there: RecordedAdapter, here: RegisteredAdapter) -> AdapterSpec:
    """The registered adapter with what the record names of policy, tenants and digest; its source and secret stay."""
    policy = policy_of(here).model_dump() | there.policy.model_dump(exclude_unset=True)
    return AdapterSpec(
        lora_id=here.lora_id,
        source=here.source,
        base_model=here.base_model,
        digest=here.digest or there.digest,
        policy=AdapterPolicy(**policy),
        tenants=there.tenants if "tenants" in there.model_fields_set else here.tenants,
        secret_ref=SecretRef.of(here.secret),
    )
