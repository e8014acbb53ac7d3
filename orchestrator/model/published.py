"""Published names: each a name whose newest version is served."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from orchestrator.model.acceptance import AdapterAcceptance
from orchestrator.model.documents import ServiceDocument, WrittenDocument
from orchestrator.model.names import MOST_VERSIONS
from orchestrator.model.served_names import PublishedSpec, Replicas


class PublishSpec(WrittenDocument):
    """`POST /v1/published/{name}`: the bytes of the name's next version, and how the name is kept.

    A field of retention that is left out keeps its value.
    """

    source: str | None = Field(
        default=None, min_length=1, max_length=2000, description="where the bytes are now; they are copied"
    )
    digest: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="digest of the bytes; without `source`, of bytes that the fleet has. With it, other bytes at"
        " `source` count as not visible yet",
    )
    base_model: str | None = Field(default=None, max_length=500)
    replicas: Replicas | None = Field(
        default=None, description='workers that must have a version before the name points at it; at first "all"'
    )
    keep_versions: int | None = Field(default=None, ge=1, le=MOST_VERSIONS, description="null: the policy's")
    max_staleness_s: float | None = Field(default=None, ge=0, description="0: no limit; null: the policy's")
    timeout_s: float = Field(
        default=28.0, gt=0, le=110, description="how long the call may wait for the bytes, the loads and the routers"
    )
    expected_version: int | None = Field(
        default=None,
        ge=0,
        description="the number that the name's version must have now, 0: none; at another one only the bytes of that"
        " version are accepted, as of a call that is repeated. null: any",
    )

    @model_validator(mode="after")
    def _names_bytes(self) -> Self:
        """Raises ValueError without a source and a digest."""
        if self.source is None and self.digest is None:
            raise ValueError("name `source`, where the bytes are, or `digest`, of bytes that the fleet has")
        return self


class PublishedVersion(ServiceDocument):
    """A version of a published name.

    published_at   when the name was last pointed at it; null while a publish of it is in progress
    superseded_at  when the name was pointed elsewhere; null for the version that it points at
    """

    lora_id: str
    version: int
    digest: str
    published_at: str | None
    superseded_at: str | None = None


class PublishedStatus(ServiceDocument):
    """What a published name points at.

    lora_id, digest, version  the version that it points at; null before its first version is ready
    versions         all that are kept, the newest first
    workers          workers on which that version is ready
    acceptance       worker -> whether its answers are the trainer's, of those that were compared (docs/acceptance.md)
    note             what to know of that version's files, such as weights far beyond the former version's; else ""
    is_new           whether this call made the version; false where its bytes were there already, and for reads
    keep_versions    newest versions that stay: the spec's, else the policy's; so `max_staleness_s`
    shadows_base     whether keys that may shadow base models get it in place of the base model of this name
    revision         of the catalog that says all this
    """

    lora_id: str | None
    digest: str | None
    version: int | None
    versions: tuple[PublishedVersion, ...]
    workers: tuple[str, ...]
    acceptance: Mapping[str, AdapterAcceptance] = {}
    note: str = ""
    is_new: bool = False
    keep_versions: int
    max_staleness_s: float
    shadows_base: bool
    revision: int


class PublishedItem(ServiceDocument):
    """A published name. `spec`: how it is kept, as written."""

    name: str
    spec: PublishedSpec
    status: PublishedStatus


class PublishedList(ServiceDocument):
    data: tuple[PublishedItem, ...]
    next: str | None = None
