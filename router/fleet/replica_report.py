"""A followed worker, and the replica built from its report."""

import asyncio
from dataclasses import dataclass, field, fields, replace
from math import inf
from operator import attrgetter
from types import MappingProxyType

from lorafleet.engine.agentless import AgentlessEngine
from router.core.fleet import EngineReport, Replica, ReplicaState, ResidentAdapter
from router.core.kv.index import WorkerId
from router.fleet.report_reader import ReportReader, is_same_but_load
from router.fleet.worker_sources import WorkerSource
from workers.wire import Metadata, WorkerAdapter

_fields_but_report = attrgetter(*(each.name for each in fields(Replica) if each.name != "report"))


@dataclass(slots=True)
class FollowedWorker:
    """One worker, polled at one of its addresses.

    source          the worker as catalog, slices or settings name it
    agentless       reads its engine, if it has no agent
    reader          of its agent's reports
    is_named        whether a source names the worker now
    asked_at        when the report in `metadata` was requested
    is_answering    whether the last poll succeeded; `heard_at` is the last success, or the first poll
    engine_answers  whether its engine answers while its agent is silent
    configured      what its settings name, of which the report has the digest; only read without an orchestrator
    made_from       the inputs of `replica`
    """

    source: WorkerSource
    url: str
    wake: asyncio.Event
    agentless: AgentlessEngine | None = None
    reader: ReportReader = field(default_factory=ReportReader)
    is_named: bool = True
    is_answering: bool = False
    metadata: Metadata | None = None
    asked_at: float = 0.0
    heard_at: float = 0.0
    engine_answers: bool = False
    configured: tuple[str, tuple[WorkerAdapter, ...]] = ("", ())
    replica: Replica | None = None
    made_from: tuple[Metadata, ReplicaState, bool, frozenset[str]] | None = None
    tasks: tuple[asyncio.Task[None], ...] = ()


def with_location(metadata: Metadata, source: WorkerSource) -> Metadata:
    """The report, with zone and node from the slices where the agent reports none."""
    zone, node = metadata.zone or source.zone, metadata.node or source.node
    if (zone, node) == (metadata.zone, metadata.node):
        return metadata
    return metadata.model_copy(update={"zone": zone, "node": node})


def replica_from(
    followed: FollowedWorker, metadata: Metadata, *, state: ReplicaState, draining: frozenset[str], zone: str
) -> Replica:
    """The replica that a worker's report describes.

    draining  engine names that the catalog drains on this worker
    zone      of this router
    """
    loras = () if metadata.lora.refusal else metadata.lora.loaded_loras
    resident_loras = [lora for lora in loras if lora.state in ("ready", "draining")]
    shape = metadata.model.runtime_config
    residents = MappingProxyType(
        {
            lora.engine_name: ResidentAdapter(
                lora.lora_id,
                lora.digest,
                lora.engine_name,
                lora.location,
                lora.acceptance.result if lora.acceptance is not None else "",
                lora.load_seconds or 0.0,
            )
            for lora in resident_loras
        }
    )
    return Replica(
        id=WorkerId(followed.source.id),
        base_model=metadata.model.base_model,
        model_name=metadata.model.name,
        model_path=metadata.model.path,
        engine_url=metadata.transport.engine_url.rstrip("/"),
        agent_url=metadata.agent_url.rstrip("/"),
        dialect=metadata.transport.dialect,
        state=state,
        is_ending=followed.source.is_ending,
        block_size=max(0, shape.block_size),
        caches_prefixes=shape.caches_prefixes,
        max_loras=metadata.lora.max_loras,
        max_lora_rank=metadata.lora.max_lora_rank,
        max_num_seqs=max(1, shape.max_num_seqs),
        max_model_len=shape.max_model_len,
        total_kv_blocks=max(0, shape.total_kv_blocks),
        engine_boot_id=metadata.engine_boot_id,
        # The same object while nothing changes, since remembered decisions keep their replicas.
        residents=followed.replica.residents
        if followed.replica and followed.replica.residents == residents
        else residents,
        draining=draining | {lora.engine_name for lora in resident_loras if lora.state == "draining"},
        is_far=bool(zone and metadata.zone and metadata.zone != zone),
        is_suspect=metadata.is_suspect,
        refusal=metadata.lora.refusal,
        is_salted=metadata.lora.is_salted,
        report=_engine_report(followed, metadata),
    )


def with_newer_load(followed: FollowedWorker, before: Metadata, metadata: Metadata) -> Replica | None:
    """The worker's replica with the load of a newer report; None if anything else may have changed since `before`."""
    if followed.replica is None or not is_same_but_load(before, metadata):
        return None
    return replace(followed.replica, report=_engine_report(followed, metadata))


def is_same_but_report(before: Replica, now: Replica) -> bool:
    """Whether two replicas differ in their engine's load and rates alone."""
    return bool(_fields_but_report(before) == _fields_but_report(now))


def _engine_report(followed: FollowedWorker, metadata: Metadata) -> EngineReport:
    """The engine's load and rates in a report, with the times of its readings."""
    load = metadata.load
    read_at, list_age_s = followed.heard_at - load.read_age_s, metadata.lora.list_age_s
    return EngineReport(
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.kv_usage,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        token_s=load.token_s,
        sequence_s=load.sequence_s,
        context_token_s=load.context_token_s,
        output_tokens=load.mean_output_tokens,
        request_s=load.mean_request_s,
        load_s=load.load_seconds,
        at=read_at,
        moved_at=inf if load.still_s is None else read_at - load.still_s,
        # Counted from the poll's start, so that a list read before a request failed does not look newer. Older agents
        # do not report the list's age; they read it about as often as the metrics.
        listed_at=read_at if list_age_s is None else followed.asked_at - list_age_s,
    )


def replica_state(followed: FollowedWorker, metadata: Metadata, *, is_silent: bool) -> ReplicaState:
    """A replica's state, from its report, its source and whether it is silent."""
    if is_silent and not followed.engine_answers:
        return "unreachable"
    if metadata.state not in ("ready", "draining"):
        return "starting"
    # The catalog may be older than the agent: a drain of the agent's previous boot does not count.
    is_drained = followed.source.drained in ("", metadata.agent_boot_id)
    if metadata.state == "draining" or is_drained or followed.source.is_ending:
        return "draining"
    return "ready"
