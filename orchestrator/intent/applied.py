"""A file that a person wrote, as the record whose import gives this fleet what the file says, and nothing else."""

from collections.abc import Iterator

from pydantic import ValidationError

from lorafleet.service.http import validation_message
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.intent.record import fleet_record, published_names
from orchestrator.model.adapters import AdapterSpec, SecretRef
from orchestrator.model.apply import ApplyRequest, FilePublishedName
from orchestrator.model.record import (
    FleetRecord,
    ImportRequest,
    RecordChange,
    RecordedAdapter,
    RecordedAlias,
    RecordedName,
    RecordedVersion,
)
from orchestrator.model.served_names import Publication
from orchestrator.model.snapshot import RegisteredAdapter
from orchestrator.store.store import IntentStore


def import_of_file(ask: ApplyRequest, store: IntentStore) -> tuple[ImportRequest | None, list[RecordChange]]:
    """The import that applies the file, and what cannot be applied. None: all that the file says is blocked.

    What a prune must keep is part of the import: sections that the file does not have, versions of published names that
    stay, and what is blocked. Raises OrchestratorRequestError for a name that is written twice.
    """
    file, here, published = ask.file, fleet_record(store), published_names(store)
    blocked = [*_conflicts(ask, store), *_unknown_names(ask, store)]
    stopped = {(change.subject, change.name) for change in blocked}
    adapters = [_recorded(spec) for spec in file.adapters or () if ("adapter", spec.lora_id) not in stopped]
    names = [
        _recorded_name(name, published[name.name])
        for name in file.published or ()
        if ("alias", name.name) not in stopped
    ]
    aliases = [RecordedAlias(name=alias.name, targets=alias.targets) for alias in file.aliases or ()]
    if ask.prune:
        named = {name.name for name in names}
        kept = [name for name in here.published if file.published is None and name.name not in named]
        # With all their versions: also one whose publish is in progress.
        names += [_recorded_name(FilePublishedName(name=name.name), published[name.name]) for name in kept]
        versions = {version.lora_id for name in names for version in name.versions}
        written = {adapter.lora_id for adapter in adapters}
        for adapter in here.adapters:
            is_kept = file.adapters is None or adapter.lora_id in versions or ("adapter", adapter.lora_id) in stopped
            if is_kept and adapter.lora_id not in written:
                adapters.append(adapter)
        if file.aliases is None:
            aliases += [alias for alias in here.aliases if alias.name not in published]
    parts = ["adapters"] if file.adapters is not None else []
    parts += ["aliases"] if file.aliases is not None or file.published is not None else []
    parts += ["policy"] if file.policy is not None else []
    if not parts:
        return None, blocked
    try:
        record = FleetRecord(
            adapters=tuple(adapters), aliases=tuple(aliases), published=tuple(names), policy=file.policy
        )
        return ImportRequest.model_validate({"record": record, "parts": parts, "prune": ask.prune}), blocked
    except ValidationError as exc:
        raise OrchestratorRequestError(validation_message(exc.errors()), param="file") from exc


def _recorded(spec: AdapterSpec) -> RecordedAdapter:
    """The adapter as a record has it, with the fields alone that the file names."""
    named = {name: getattr(spec, name) for name in spec.model_fields_set}
    return RecordedAdapter(**named)


def _recorded_name(written: FilePublishedName, here: Publication) -> RecordedName:
    """The published name as it is here, with the fields that the file names."""
    named = {name: getattr(written, name) for name in written.model_fields_set}
    if named.get("replicas") == "all":
        named["replicas"] = None
    kept = {name: getattr(here, name) for name in ("tenant", "replicas", "keep_versions", "max_staleness_s")}
    versions = tuple(
        RecordedVersion(lora_id=each.lora_id, version=each.number, digest=each.digest) for each in here.versions
    )
    return RecordedName(
        next_version=here.next_number, versions=versions, shadows_base=here.shadows_base, **(kept | named)
    )


def _conflicts(ask: ApplyRequest, store: IntentStore) -> Iterator[RecordChange]:
    """Adapters that are registered with another source or secret."""
    for spec in ask.file.adapters or ():
        here = store.adapters.get(spec.lora_id)
        reason = None if here is None else _conflict(spec, here)
        if reason is not None:
            yield RecordChange(subject="adapter", name=spec.lora_id, change="blocked", reason=reason)


def _conflict(spec: AdapterSpec, here: RegisteredAdapter) -> str | None:
    """Why the adapter cannot become what the file says; None when it can, or when an import finds out."""
    has_same_bytes = spec.digest is not None and spec.digest == here.digest
    if not has_same_bytes and spec.source not in (here.source, here.fetched_from):
        return (
            f"its source is {here.source} here and {spec.source} in the file;"
            " bytes under a lora_id never change: use a new lora_id"
        )
    if "secret_ref" in spec.model_fields_set and spec.secret_ref != SecretRef.of(here.secret):
        return f"its secret_ref is {here.secret or 'none'} here; PATCH /v1/adapters/{spec.lora_id} changes it"
    return None


def _unknown_names(ask: ApplyRequest, store: IntentStore) -> Iterator[RecordChange]:
    """Published names that nobody has published yet: the fleet keeps a name only with a version."""
    published = published_names(store)
    for name in ask.file.published or ():
        if name.name not in published:
            reason = f"nothing is published under it; POST /v1/published/{name.name} publishes a first version"
            yield RecordChange(subject="alias", name=name.name, change="blocked", is_published=True, reason=reason)
