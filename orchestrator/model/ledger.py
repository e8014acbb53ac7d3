"""The ledger: what each tenant, key, adapter version and base model has used, by hour.

A row's sums only grow. They come in numbered batches of sources, each counted once: a source is one life of a router
or an agent. Core reads this module, too: it needs the standard library alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Final, Literal, NamedTuple, Self

from annotated_types import Ge, MaxLen

from orchestrator.model.names import MESSAGE, RESOURCE

HOUR_S: Final = 3600
UsageField = Literal["hour", "tenant", "key", "adapter", "version", "base_model"]
"""What a row of the ledger is about; answers are grouped by any of them."""
UsageGroup = tuple[int | str, ...]
"""The values of the fields that an answer is grouped by, in their order."""


class UsageKey(NamedTuple):
    """What a row of the ledger is about. Empty texts: none, or any where rows were added up.

    hour     its beginning, in Unix seconds
    key      the id of the caller's key
    adapter  lora_id; "" for requests of the base model
    version  first 12 digits of the digest of the adapter's bytes
    """

    hour: int = 0
    tenant: str = ""
    key: str = ""
    adapter: str = ""
    version: str = ""
    base_model: str = ""


@dataclass(slots=True, kw_only=True)
class UsageSums:
    """What was used. The sums of two rows add up."""

    __pydantic_config__ = MESSAGE

    requests: int = 0
    """requests that ended: `succeeded`, `refused`, `failed` and `cancelled` together"""
    succeeded: int = 0
    refused: int = 0
    """4xx: for what they were, or for a limit"""
    failed: int = 0
    """5xx, and answers that broke off"""
    cancelled: int = 0
    """broken off by their clients"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """of `prompt_tokens`, those that engines found in their prefix caches"""
    completion_tokens: int = 0
    prefill_s: float = 0.0
    """engine-seconds: each prompt's prefill at its engine's measured rate, without what was predicted to be cached"""
    decode_s: float = 0.0
    """engine-seconds: each request's share of its engine's time in flight there, beyond the prefills"""
    slot_s: float = 0.0
    """seconds for which engines held an adapter, of all engines together"""
    loads: int = 0
    fetched_bytes: int = 0
    """of adapters' files that workers fetched from sources and from each other"""

    def add(self, other: "UsageSums") -> None:
        """Add other sums to these."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def rounded(self) -> Self:
        """The same sums, their seconds with three digits after the point."""
        return type(self)(**{name: round(getattr(self, name), 3) for name in SUMS})

    @property
    def engine_s(self) -> float:
        """Engine-seconds of prefill and decode."""
        return self.prefill_s + self.decode_s

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


SUMS: Final = tuple(each.name for each in fields(UsageSums))
"""The names of the sums, in their order."""
UsageRows = dict[UsageKey, UsageSums]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageBatch:
    """What one source has counted in a second or so. The same batch may come again, with the same number.

    source  boot id of the router or agent
    number  grows by one within a source
    """

    source: str
    number: int
    rows: Mapping[UsageKey, UsageSums]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Rows of whole hours that begin from `since` on and before `until`, in Unix seconds, added up by `group_by`.

    tenant, key, adapter, base_model  only rows of these; None: of all
    after, up_to  only groups behind this one, and up to that one with it, in the order of `group_by`
    limit  the first so many groups; None: all of them, which are an error if they are too many
    """

    since: float = 0.0
    until: float = float(1 << 52)
    group_by: tuple[UsageField, ...] = ()
    tenant: str | None = None
    key: str | None = None
    adapter: str | None = None
    base_model: str | None = None
    after: UsageGroup | None = None
    up_to: UsageGroup | None = None
    limit: int | None = None


Price = Annotated[float, Ge(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What use costs."""

    __pydantic_config__ = RESOURCE

    per_million_prompt_tokens: Price = 0.0
    """of prompt tokens that were not cached"""
    per_million_cached_tokens: Price = 0.0
    per_million_completion_tokens: Price = 0.0
    per_engine_second: Price = 0.0
    per_slot_hour: Price = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageItem:
    """What one group has used."""

    __pydantic_config__ = MESSAGE

    group: Mapping[UsageField, str]
    """the fields of `group_by`; `hour` is its beginning"""
    usage: UsageSums
    cost: float | None = None
    """by the price file; null: there is none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageList:
    """`GET /v1/usage`: groups of the ledger's rows of whole hours that begin from `since` on and before `until`."""

    __pydantic_config__ = MESSAGE

    since: str
    until: str
    currency: str | None = None
    """of costs; null: there is no price file"""
    data: tuple[UsageItem, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """The prices of base models; a base model without prices of its own has `default`."""

    __pydantic_config__ = RESOURCE

    currency: Annotated[str, MaxLen(20)]
    default: Prices = Prices()
    base_models: Mapping[str, Prices] = field(default_factory=dict)

    def of(self, base_model: str) -> Prices:
        """The prices of a base model and its adapters."""
        return self.base_models.get(base_model, self.default)
