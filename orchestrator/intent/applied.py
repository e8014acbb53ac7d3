"""A file that a person wrote, as the record whose import gives this fleet what the file says, and nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from lorafleet.service.http import validation_message
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.intent.record import fleet_record
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.apply import ApplyRequest, PublishedChanges
from orchestrator.model.record import (
    FleetRecord,
    ImportRequest,
    RecordChange,
)
from orchestrator.model.served_names import Publication, ServedName
from orchestrator.store.store import IntentStore


def import_of_file(ask: ApplyRequest, store: IntentStore) -> tuple[ImportRequest | None, list[RecordChange]]:
    """The import that applies the file, and what cannot be applied. None: all that the file says is blocked.

    What a prune must keep is part of the import: sections that the file does not have, versions of published names that
    stay, and what is blocked. Raises OrchestratorRequestError for a name that is written twice.
    """
    file, here = ask.file, fleet_record(store)
    blocked = [*_source_conflicts(ask, store), *_unknown_names(ask, store)]
    stopped = {(change.subject, change.name) for change in blocked}
    adapters = [spec for spec in file.adapters or () if ("adapter", spec["lora_id"]) not in stopped]
    published = [each for each in file.published or () if ("alias", each["name"]) not in stopped]
    _require_once([each.name for each in file.aliases or ()])
    _require_once([each["name"] for each in published])
    names = {each.name: ServedName(name=each.name, targets=each.targets) for each in file.aliases or ()}
    for each in published:
        name = each["name"]
        names[name] = replace(names.get(name, ServedName(name=name)), published=_kept_as(store, name, each))
    if ask.prune:
        for known in here.names:
            if (file.aliases if known.published is None else file.published) is None:
                # With all its versions: also one whose publish is in progress.
                named = names.get(known.name, ServedName(name=known.name))
                names[known.name] = replace(named, published=store.publication_of(known.name))
        versions = {each.lora_id for name in names.values() if name.published for each in name.published.versions}
        written = {adapter["lora_id"] for adapter in adapters}
        for adapter in here.adapters:
            lora_id = adapter["lora_id"]
            is_kept = file.adapters is None or lora_id in versions or ("adapter", lora_id) in stopped
            if is_kept and lora_id not in written:
                adapters.append(adapter)
    parts = ["adapters"] if file.adapters is not None else []
    parts += ["aliases"] if file.aliases is not None or file.published is not None else []
    parts += ["policy"] if file.policy is not None else []
    if not parts:
        return None, blocked
    try:
        record = FleetRecord(adapters=tuple(adapters), names=tuple(names.values()), policy=file.policy)
        return ImportRequest.model_validate({"record": record, "parts": parts, "prune": ask.prune}), blocked
    except ValidationError as exc:
        raise OrchestratorRequestError(validation_message(exc.errors()), param="file") from exc


def _kept_as(store: IntentStore, name: str, written: PublishedChanges) -> Publication:
    """The published name as it is here, kept as the file says."""
    record = store.publication_of(name) or Publication()
    changes = {field: value for field, value in written.items() if field != "name"}
    return replace(record, spec=replace(record.spec, **changes))


def _require_once(names: list[str]) -> None:
    """Raise OrchestratorRequestError for a name that is written twice."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise OrchestratorRequestError(f"{twice[0]!r} is in the file twice; expected once", param="file")


def _source_conflicts(ask: ApplyRequest, store: IntentStore) -> Iterator[RecordChange]:
    """Adapters that are registered with another source or secret."""
    for spec in ask.file.adapters or ():
        here = store.adapters.get(spec["lora_id"])
        reason = None if here is None else _conflict_reason(spec, here)
        if reason is not None:
            yield RecordChange(subject="adapter", name=spec["lora_id"], change="blocked", reason=reason)


def _conflict_reason(spec: Mapping[str, Any], here: RegisteredAdapter) -> str | None:
    """Why the adapter cannot become what the file says; None when it can, or when an import finds out."""
    has_same_bytes = spec.get("digest") is not None and spec["digest"] == here.digest
    if not has_same_bytes and spec["source"] not in (here.source, here.fetched_from):
        return (
            f"its source is {here.source} here and {spec['source']} in the file;"
            " bytes under a lora_id never change: use a new lora_id"
        )
    if "secret_ref" in spec and spec["secret_ref"] != here.spec.secret_ref:
        return f"its secret_ref is {here.secret or 'none'} here; PATCH /v1/adapters/{here.lora_id} changes it"
    return None


def _unknown_names(ask: ApplyRequest, store: IntentStore) -> Iterator[RecordChange]:
    """Published names that nobody has published yet: the fleet keeps a name only with a version."""
    for name in (each["name"] for each in ask.file.published or ()):
        here = store.publication_of(name)
        if here is None or here.deleted_at is not None:
            reason = f"nothing is published under it; POST /v1/published/{name} publishes a first version"
            yield RecordChange(subject="alias", name=name, change="blocked", is_published=True, reason=reason)
