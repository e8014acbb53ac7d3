"""The bases of requests and answers that are no resource.

Bodies that people write refuse unknown keys, so that a typing error is not ignored. Bodies between our own processes
ignore unknown keys, so that versions may differ.
"""

from pydantic import BaseModel, ConfigDict


class ServiceDocument(BaseModel):
    """A response, or a body from one of our own processes."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class WrittenDocument(BaseModel):
    """A body that a person writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
