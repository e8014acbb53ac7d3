"""`POST /v1/apply`: what a fleet should have, as a person writes it. Unknown fields are refused."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.model.changes import Changes, PolicyChanges, WrittenAdapter
from orchestrator.model.served_names import DEFAULT_PLACE_S, NamedAlias, NamedPublishedSpec


class _WrittenFileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


PublishedChanges = Annotated[dict[str, Any], Changes(NamedPublishedSpec, named_by=("name",))]
"""How a published name is kept; fields that are left out stay as they are. Its versions are published, not applied."""


class FleetFile(_WrittenFileModel):
    """The sections of a file. A section that is missing says nothing; a field that is left out stays as it is."""

    adapters: tuple[WrittenAdapter, ...] | None = Field(default=None, max_length=20_000)
    aliases: tuple[NamedAlias, ...] | None = Field(default=None, max_length=20_000)
    published: tuple[PublishedChanges, ...] | None = Field(default=None, max_length=20_000)
    policy: PolicyChanges | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        """Raises ValueError for a file without any section, and for a wait, which no file keeps."""
        if all(section is None for section in (self.adapters, self.aliases, self.published, self.policy)):
            raise ValueError("nothing to apply: expected adapters, aliases, published or policy")
        if late := [alias.name for alias in self.aliases or () if alias.place_s != DEFAULT_PLACE_S]:
            message = f"place_s of alias {late[0]!r} is no field of a file; PUT /v1/aliases/{late[0]} takes it"
            raise ValueError(message)
        return self


class ApplyRequest(_WrittenFileModel):
    """`POST /v1/apply`."""

    file: FleetFile
    prune: bool = Field(
        default=False, description="delete what the file's sections do not have; sections that are missing are kept"
    )
