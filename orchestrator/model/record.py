"""The record of a fleet: export, import, sync."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from orchestrator.model.adapters import WITH_SECRETS
from orchestrator.model.changes import Changes, RecordedAdapter, reader_of
from orchestrator.model.documents import ServiceDocument, WrittenDocument
from orchestrator.model.names import WIRE, checked_published_name
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasSpec, ServedName


class FleetRecord(ServiceDocument):
    """`GET /v1/export`: a fleet's intent as one document. `revision`: of the fleet that wrote it.

    policy  null: the document has no policy
    """

    adapters: tuple[RecordedAdapter, ...] = Field(default=(), max_length=20_000)
    names: tuple[ServedName, ...] = Field(default=(), max_length=20_000)
    policy: Annotated[dict[str, Any], Changes(PlacementPolicy, is_lenient=True)] | None = None
    revision: int = 0
    wire: int = WIRE

    @field_validator("names", mode="before")
    @classmethod
    def _reads_names_leniently(cls, names: object) -> object:
        """The names without fields that this version does not know: the record may be that of a newer fleet."""
        return reader_of(tuple[ServedName, ...]).validate_python(names, extra="ignore")


RecordPart = Literal["adapters", "aliases", "policy"]
"""Published names go with the aliases: each of them is one."""


class ImportRequest(WrittenDocument):
    """`POST /v1/import`."""

    record: FleetRecord
    from_fleet: str | None = Field(
        default=None,
        pattern=r"^https?://",
        max_length=300,
        description="the other fleet's orchestrator, whose workers have the files by digest; null: each by its source",
    )
    keep_sources: bool = Field(
        default=False, description="with from_fleet: fetch hf, s3, gs, az and https sources from there all the same"
    )
    parts: tuple[RecordPart, ...] = Field(default=("adapters", "aliases", "policy"), min_length=1)
    prune: bool = Field(default=False, description="delete adapters and aliases that the record does not have")

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        """Raises ValueError for what no fleet writes: a file may have been edited by hand."""
        for name in self.record.names:
            if name.targets:
                AliasSpec(targets=name.targets)
            if name.published is not None:
                checked_published_name(name.name)
        for adapter in self.record.adapters:
            if adapter.get("secret_ref") is not None and not adapter["source"].startswith(WITH_SECRETS):
                raise ValueError(f"{adapter['lora_id']}: secret_ref counts for hf:// and https:// sources")
        for rows in ([each["lora_id"] for each in self.record.adapters], [each.name for each in self.record.names]):
            if len(set(rows)) < len(rows):
                twice = next(name for name in rows if rows.count(name) > 1)
                raise ValueError(f"{twice!r} is in the record twice; expected once")
        return self


class RecordChange(ServiceDocument):
    """One difference between this fleet and a record.

    is_published  of an alias: the published name of this name, with its versions and retention
    fields  field -> [here, in the record]
    reason  why it is removed, or why it is blocked: then nothing is changed
    """

    subject: Literal["adapter", "alias", "policy"]
    name: str
    change: Literal["add", "change", "remove", "blocked"]
    is_published: bool = False
    fields: dict[str, list[Any]] = Field(default_factory=dict)
    reason: str = ""


class ImportAnswer(ServiceDocument):
    """The differences, in order; none: this fleet meets the record. `is_done`: false for a dry run."""

    changes: tuple[RecordChange, ...]
    is_done: bool = False
