"""An adapter: what is written of it, and what is stored once it is registered."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import MaxLen, MinLen

from orchestrator.model.cards import AdapterCard
from orchestrator.model.names import RESOURCE, LoraId, Pattern
from orchestrator.model.policy import AdapterPolicy

WITH_SECRETS = ("hf://", "https://")

Digest = Annotated[str, Pattern(r"^[0-9a-f]{64}$")]
"""Of an adapter's bytes, in hexadecimal digits."""

Tenants = Annotated[tuple[Annotated[str, MaxLen(100)], ...], MaxLen(1000)]
"""At most 1000: a Kubernetes object must have room for them twice, in its text and in its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    """A key of a Secret that workers have mounted (`secrets_dir`). The orchestrator never reads its value."""

    __pydantic_config__ = RESOURCE

    name: Annotated[str, Pattern(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
    key: Annotated[str, Pattern(r"^[-_a-zA-Z0-9][-._a-zA-Z0-9]{0,252}$")]

    def __str__(self) -> str:
        """The form `name/key`, by which workers find it."""
        return f"{self.name}/{self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """An adapter as it is written: `POST /v1/adapters`, a ConfigMap's text, an entry of a record or of an applied file.

    The first inspection fills in the digest and the base model where nobody wrote them.
    """

    __pydantic_config__ = RESOURCE

    lora_id: LoraId
    source: Annotated[str, MinLen(1), MaxLen(2000)]
    base_model: str | None = None
    digest: Digest | None = None
    policy: AdapterPolicy = field(default_factory=AdapterPolicy)
    tenants: Tenants | None = None
    """tenants that may use it, in order; null: everyone"""
    secret_ref: SecretRef | None = None
    """reference to the credentials for `source`; the Secret's key `sources` lists their sources"""

    def __post_init__(self) -> None:
        if self.tenants is not None:
            object.__setattr__(self, "tenants", tuple(sorted(set(self.tenants))))
        if self.secret_ref is not None and not self.source.startswith(WITH_SECRETS):
            raise ValueError(f"secret_ref counts for hf:// and https:// sources, found source {self.source[:80]!r}")


CHANGEABLE = ("policy", "tenants", "secret_ref")
"""Fields of `AdapterSpec` that may change once the adapter is registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAdapter:
    """A registered adapter as it is stored: what is written, and what inspection found.

    card              what an agent found; None until one has inspected it
    pinned_source     `source` with its branch replaced by the commit that was inspected
    quarantine        why no engine takes its bytes; None while it may be loaded
    is_adopted        registered because a worker's settings name it, and by nobody's call
    left_at           since when no worker's settings name an adopted one (Unix time); None: they do
    """

    spec: AdapterSpec
    card: AdapterCard | None = None
    pinned_source: str | None = None
    quarantine: str | None = None
    is_deleting: bool = False
    is_adopted: bool = False
    left_at: float | None = None

    @property
    def lora_id(self) -> str:
        return self.spec.lora_id

    @property
    def source(self) -> str:
        return self.spec.source

    @property
    def rank(self) -> int | None:
        """None until an agent has inspected it."""
        return self.card.rank if self.card is not None else None

    @property
    def size_bytes(self) -> int | None:
        """Of its files; None until an agent has inspected it, and where it does not say."""
        return self.card.size_bytes or None if self.card is not None else None

    @property
    def base_model(self) -> str | None:
        return self.spec.base_model

    @property
    def digest(self) -> str | None:
        return self.spec.digest

    @property
    def tenants(self) -> tuple[str, ...] | None:
        return self.spec.tenants

    @property
    def policy(self) -> AdapterPolicy:
        return self.spec.policy

    @property
    def secret(self) -> str | None:
        """name/key of the credentials for `source`, by which workers find them."""
        return None if self.spec.secret_ref is None else str(self.spec.secret_ref)

    @property
    def fetched_from(self) -> str:
        """The source that workers fetch from: the pinned one where there is one."""
        return self.pinned_source or self.source

    @property
    def is_inspected(self) -> bool:
        """Whether digest, rank and base model are known."""
        return self.digest is not None and self.rank is not None and self.base_model is not None

    def with_spec(self, **changes: Any) -> "RegisteredAdapter":
        """The adapter with these fields of its spec."""
        return replace(self, spec=replace(self.spec, **changes))

    def with_inspection_of(self, known: "RegisteredAdapter") -> "RegisteredAdapter":
        """The adapter with what was found in the bytes of the other one, which has the same source."""
        named = self.with_spec(digest=known.digest, base_model=known.base_model)
        return replace(named, card=known.card, pinned_source=known.pinned_source)

    def with_policy(self, **changes: Any) -> "RegisteredAdapter":
        """The adapter with these fields of its policy."""
        return self.with_spec(policy=replace(self.policy, **changes))
