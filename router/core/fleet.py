"""The fleet as frozen values: replicas, their reports and adapters, and the roster of each base model."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from posixpath import normpath
from statistics import median
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import unquote

from lorafleet import identity
from lorafleet.identity import AdapterLocation, CacheScope
from orchestrator.model.acceptance import AcceptanceResult
from orchestrator.model.catalog import CatalogAdapter, CatalogAlias
from router.core.kv.index import WorkerId

ReplicaState = Literal["ready", "starting", "draining", "unreachable"]
# A worker and the boot id of its engine; after a restart the same worker is another incarnation.
Incarnation = tuple[WorkerId, str]
Excluded = frozenset[Incarnation]


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """One adapter that a replica reports as ready to serve.

    acceptance  whether its answers there are the trainer's, for people; "": not compared
    load_s      from disk to ready, when it was last loaded there; 0.0: not measured
    """

    lora_id: str
    digest: str
    engine_name: str
    location: AdapterLocation = "device"
    acceptance: AcceptanceResult | Literal[""] = ""
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine's own counters, and when (our clock) they were read. Rates and seconds are 0.0 until measured.

    prefill_tokens_per_s  of a prefill that has the engine for itself
    token_s, sequence_s, context_token_s  of a step without prefill: its own time, and what each sequence and each token
                          of context in the KV cache add
    output_tokens         of a request, the mean over those that ended lately
    request_s             from a request's start there to its last token
    load_s                an adapter that must be read again, from disk to ready
    moved_at              when its counters last changed; inf: not known
    listed_at             when its list of adapters was last read into `residents`
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    output_tokens: float = 0.0
    request_s: float = 0.0
    load_s: float = 0.0
    at: float = 0.0
    moved_at: float = inf
    listed_at: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second of one request alone with little context, without a prefill; 0.0 until measured."""
        return 1 / (self.token_s + self.sequence_s) if self.token_s else 0.0


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker as the router sees it.

    block_size     tokens in a block of its KV cache; 0: not known
    caches_prefixes  its engine keeps blocks for later prompts; without, nothing of a prompt is ever cached there
    residents      its adapters by engine name
    draining       engine names of adapters that get no new requests there
    max_lora_rank  the largest rank that its engine takes; 0: not known
    model_name     its engine's name for the base model; by default the fleet's
    model_path     where its vLLM read the base model from, which is hashed into the ids of pictures; empty: not known
    is_far         it is known to be in another zone than this router
    is_suspect     its agent reports that the engine hangs
    is_ending      Kubernetes is ending its pod; until then its engine answers
    refusal        why it takes no adapters at all; empty: it takes them
    is_salted      prompts there need a `cache_salt` that tells adapters apart (lorafleet/identity.py adapter_salt)
    """

    id: WorkerId
    base_model: str
    engine_url: str
    agent_url: str
    dialect: str
    state: ReplicaState
    block_size: int
    max_loras: int
    max_num_seqs: int
    max_model_len: int
    total_kv_blocks: int = 0
    max_lora_rank: int = 0
    engine_boot_id: str = ""
    residents: Mapping[str, ResidentAdapter] = field(default_factory=lambda: MappingProxyType({}))
    draining: frozenset[str] = frozenset()
    is_far: bool = False
    is_suspect: bool = False
    is_ending: bool = False
    refusal: str = ""
    is_salted: bool = False
    report: EngineReport = EngineReport()
    model_name: str = ""
    model_path: str = ""
    caches_prefixes: bool = True

    def __post_init__(self) -> None:
        """Set `model_name` to the base model where it is empty."""
        object.__setattr__(self, "model_name", self.model_name or self.base_model)

    def is_at_work(self, now: float, *, fresh_s: float, still_s: float) -> bool:
        """Whether the replica's engine is known to be computing, by the engine's own counters.

        fresh_s  greatest age of a report that counts
        still_s  for how long its counters may stand still
        """
        report = self.report
        is_seen = self.state in {"ready", "draining"} and not self.is_suspect and now - report.at <= fresh_s
        return is_seen and report.running > 0 and -inf < report.at - report.moved_at <= still_s

    @property
    def incarnation(self) -> Incarnation:
        """This worker and this boot of its engine."""
        return self.id, self.engine_boot_id


@dataclass(frozen=True)  # without slots, for the cached properties
class Roster:
    """The replicas of one base model, with the tables that every decision on them reads.

    kept  tables that other files make of this roster, by their class
    """

    replicas: tuple[Replica, ...] = ()
    kept: dict[type[Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _able: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _longest: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def able(self, engine_name: str) -> tuple[int, ...]:
        """Positions of the replicas that may run this adapter (the base model when empty); cached."""
        able = self._able.get(engine_name)
        if able is None:
            able = tuple(i for i, r in enumerate(self.replicas) if rejection(r, engine_name) is None)
            self._able[engine_name] = able
        return able

    @cached_property
    def positions(self) -> dict[WorkerId, int]:
        """The position of each replica."""
        return {replica.id: position for position, replica in enumerate(self.replicas)}

    @cached_property
    def block_sizes(self) -> frozenset[int]:
        """Block sizes of all replicas that have reported one and keep blocks for later prompts."""
        return frozenset(replica.block_size for replica in self.replicas if replica.caches_prefixes) - {0}

    @cached_property
    def salted(self) -> frozenset[WorkerId]:
        """The ids of the workers that salt prompts."""
        return frozenset(replica.id for replica in self.replicas if replica.is_salted)

    @cached_property
    def salted_block_sizes(self) -> frozenset[int]:
        """Block sizes of the workers that salt prompts."""
        return frozenset(replica.block_size for replica in self.replicas if replica.is_salted) - {0}

    @cached_property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer that any replica takes; 0: none has reported it."""
        return max([replica.max_model_len for replica in self.replicas], default=0)

    @cached_property
    def is_uneven(self) -> bool:
        """Whether some replicas take longer prompts than others."""
        return len({replica.max_model_len for replica in self.replicas} - {0}) > 1

    def longest(self, engine_name: str) -> int:
        """Most tokens of prompt and answer that any replica with this adapter takes, ready or not; 0: none reported it.

        An empty name means the base model.
        """
        if not engine_name:
            return self.max_model_len
        longest = self._longest.get(engine_name)
        if longest is None:
            holders = (r.max_model_len for r in self.replicas if engine_name in r.residents)
            longest = self._longest[engine_name] = max(holders, default=0)
        return longest

    @cached_property
    def middle(self) -> EngineReport:
        """The median of each measured rate and duration over the replicas that have it; 0.0 where none has."""

        def of(figures: Iterable[float]) -> float:
            """The median of the figures above 0; 0.0 without any."""
            measured = [figure for figure in figures if figure > 0]
            return median(measured) if measured else 0.0

        reports = [replica.report for replica in self.replicas]
        return EngineReport(
            prefill_tokens_per_s=of(report.prefill_tokens_per_s for report in reports),
            token_s=of(report.token_s for report in reports),
            sequence_s=of(report.sequence_s for report in reports),
            context_token_s=of(report.context_token_s for report in reports),
            output_tokens=of(report.output_tokens for report in reports),
            load_s=of(report.load_s for report in reports),
        )


def rejection(replica: Replica, engine_name: str) -> str | None:
    """The filter that a replica fails for this adapter (the base model when empty), or None."""
    if replica.state != "ready":
        return replica.state
    if engine_name and replica.refusal:
        return f"takes no adapters: {replica.refusal}"
    if engine_name and engine_name not in replica.residents:
        return "adapter not resident"
    if engine_name in replica.draining:
        return "adapter draining"
    return None


def with_last_resort(replicas: Mapping[WorkerId, Replica]) -> dict[WorkerId, Replica]:
    """The same replicas; where no replica of a base model is ready, its replicas with ending pods count as ready.

    Their engines still answer. Kubernetes does the same for a Service with none but terminating endpoints.
    """
    served = {replica.base_model for replica in replicas.values() if replica.state == "ready"}
    return {
        id_: replace(replica, state="ready")
        if replica.is_ending and replica.state == "draining" and replica.base_model not in served
        else replica
        for id_, replica in replicas.items()
    }


@dataclass(frozen=True)  # without slots, for the cached property
class RouterFleet:
    """All replicas, adapters and aliases, at one revision of the catalog.

    from_zero  base models whose pools may have no worker: they exist for every caller, as served ones do
    """

    revision: int = 0
    replicas: Mapping[WorkerId, Replica] = field(default_factory=lambda: MappingProxyType({}))
    adapters: Mapping[str, CatalogAdapter] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, CatalogAlias] = field(default_factory=lambda: MappingProxyType({}))
    cache: CacheScope = "tenant"
    from_zero: frozenset[str] = frozenset()

    def cache_of(self, adapter: CatalogAdapter | None) -> CacheScope:
        """Who shares cached prompts of this adapter; None: of the base model."""
        return self.cache if adapter is None or adapter.cache is None else adapter.cache

    @cached_property
    def base_models(self) -> dict[str, Replica | None]:
        """Base models by name, each with one of its replicas, ready if any is; None for one without a replica.

        Computed once a fleet: it walks every adapter.
        """
        known: dict[str, Replica | None] = {a.base_model: None for a in self.adapters.values() if a.base_model}
        known |= dict.fromkeys(self.from_zero)
        ready_last = sorted(self.replicas.values(), key=lambda replica: replica.state == "ready")
        return known | {replica.base_model: replica for replica in ready_last}

    @cached_property
    def offered(self) -> frozenset[str]:
        """The base models that exist for every caller: those with a replica, and those whose pools may be at zero."""
        return self.from_zero | {name for name, replica in self.base_models.items() if replica is not None}

    @cached_property
    def by_digest(self) -> Mapping[str, tuple[CatalogAdapter, ...]]:
        """Adapters by the first 12 digits of their digest, which engine names have.

        Computed once a fleet, when a request first names a version: it walks every adapter.
        """
        found: dict[str, tuple[CatalogAdapter, ...]] = {}
        for adapter in self.adapters.values():
            if adapter.digest:
                key = adapter.digest[: identity.DIGEST_DIGITS]
                found[key] = (*found.get(key, ()), adapter)
        return MappingProxyType(found)

    @cached_property
    def by_folder(self) -> Mapping[str, tuple[CatalogAdapter, ...]]:
        """Adapters by the folder that they are fetched from.

        Computed once a fleet, when a request first names a folder: it walks every adapter.
        """
        found: dict[str, tuple[CatalogAdapter, ...]] = {}
        for adapter in self.adapters.values():
            if folder := source_folder(adapter.source):
                found[folder] = (*found.get(folder, ()), adapter)
        return MappingProxyType(found)

    @cached_property
    def _rosters(self) -> dict[str, Roster]:
        """The rosters of all base models, by name; computed once a fleet."""
        by_model: dict[str, list[Replica]] = {}
        for replica in self.replicas.values():
            by_model.setdefault(replica.base_model, []).append(replica)
        return {base_model: Roster(tuple(replicas)) for base_model, replicas in by_model.items()}

    def roster(self, base_model: str) -> Roster:
        """The roster of a base model: its replicas in any state; empty for an unknown one."""
        return self._rosters.get(base_model, _EMPTY_ROSTER)

    def resident_adapter(self, lora_id: str, excluded: Excluded = frozenset()) -> CatalogAdapter | None:
        """The adapter if some replica reports its exact digest as ready and not as draining, else None.

        excluded  replicas that may not get this request: they do not count
        """
        adapter = self.adapters.get(lora_id)
        if adapter is None or adapter.engine_name is None:
            return None
        if adapter.base_model is None:
            return adapter if self.holding(adapter.engine_name, excluded) else None
        roster = self.roster(adapter.base_model)
        able = roster.able(adapter.engine_name)
        if excluded and able:
            return adapter if any(roster.replicas[i].incarnation not in excluded for i in able) else None
        return adapter if able else None

    def holding(self, engine_name: str, excluded: Container[Incarnation] = ()) -> list[Replica]:
        """The ready replicas where this adapter, at this digest, is resident and not draining; not those excluded."""
        return [
            replica
            for replica in self.replicas.values()
            if replica.state == "ready"
            and engine_name in replica.residents
            and engine_name not in replica.draining
            and replica.incarnation not in excluded
        ]


def source_folder(source: str) -> str:
    """The normal form of an absolute path, or of a `file://` reference; "" for any other source."""
    path = unquote(source.removeprefix("file://")) if source.startswith("file:///") else source
    return normpath(path) if path.startswith("/") else ""


_EMPTY_ROSTER = Roster()
