"""`POST /v1/apply`: what a fleet should have, as a person writes it. Unknown fields are refused."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.model.adapters import AdapterSpec
from orchestrator.model.changes import PolicyChanges
from orchestrator.model.names import MOST_VERSIONS, NameToPublish
from orchestrator.model.served_names import NamedAlias, Replicas


class _WrittenFileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FilePublishedName(_WrittenFileModel):
    """How a published name is kept; fields that are left out stay as they are. Its versions are published, not applied.

    keep_versions, max_staleness_s  null: the policy's
    """

    name: NameToPublish
    tenant: str | None = None
    replicas: Replicas = "all"
    keep_versions: int | None = Field(default=None, ge=1, le=MOST_VERSIONS)
    max_staleness_s: float | None = Field(default=None, ge=0)


class FleetFile(_WrittenFileModel):
    """The sections of a file. A section that is missing says nothing; a field that is left out stays as it is."""

    adapters: tuple[AdapterSpec, ...] | None = Field(default=None, max_length=20_000)
    aliases: tuple[NamedAlias, ...] | None = Field(default=None, max_length=20_000)
    published: tuple[FilePublishedName, ...] | None = Field(default=None, max_length=20_000)
    policy: PolicyChanges | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        """Raises ValueError for a file without any section."""
        if all(section is None for section in (self.adapters, self.aliases, self.published, self.policy)):
            raise ValueError("nothing to apply: expected adapters, aliases, published or policy")
        return self


class ApplyRequest(_WrittenFileModel):
    """`POST /v1/apply`."""

    file: FleetFile
    prune: bool = Field(
        default=False, description="delete what the file's sections do not have; sections that are missing are kept"
    )
