"""One worker that is followed, and the replica that its report makes of it."""

import asyncio
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from lorafleet.engine.agentless import AgentlessEngine
from router.core.fleet import EngineReport, Replica, ReplicaState, ResidentAdapter
from router.core.kv.index import WorkerId
from router.fleet.worker_sources import WorkerSource
from workers.wire import Metadata


@dataclass(slots=True)
class FollowedWorker:
    """One worker, at one of its addresses. `plain`: its engine, where it has no agent.

    is_named        somebody names it now
    asked_at        when the report in `metadata` was asked for
    is_answering    it answered when it was last asked; `heard_at` is when it last did, or was first asked
    engine_answers  its engine does, though its agent may not
    """

    named: WorkerSource
    url: str
    poke: asyncio.Event
    plain: AgentlessEngine | None = None
    is_named: bool = True
    is_answering: bool = False
    metadata: Metadata | None = None
    asked_at: float = 0.0
    heard_at: float = 0.0
    engine_answers: bool = False
    replica: Replica | None = None
    made_from: tuple[Metadata, ReplicaState, bool, frozenset[str]] | None = None
    tasks: tuple[asyncio.Task[None], ...] = ()


def placed(metadata: Metadata, named: WorkerSource) -> Metadata:
    """With zone and node from the slices, where the agent knows none."""
    zone, node = metadata.zone or named.zone, metadata.node or named.node
    if (zone, node) == (metadata.zone, metadata.node):
        return metadata
    return metadata.model_copy(update={"zone": zone, "node": node})


def replica_from(
    follow: FollowedWorker, metadata: Metadata, *, state: ReplicaState, draining: frozenset[str], zone: str
) -> Replica:
    """A replica as its agent describes it; `draining` are engine names that the catalog says to avoid there."""
    loras = () if metadata.lora.refusal else metadata.lora.loaded_loras
    held = [lora for lora in loras if lora.state in ("ready", "draining")]
    shape, load = metadata.model.runtime_config, metadata.load
    read_at, list_age_s = follow.heard_at - load.read_age_s, metadata.lora.list_age_s
    residents = MappingProxyType(
        {lora.engine_name: ResidentAdapter(lora.lora_id, lora.digest, lora.engine_name, lora.location) for lora in held}
    )
    return Replica(
        id=WorkerId(follow.named.id),
        base_model=metadata.model.base_model,
        model_name=metadata.model.name,
        engine_url=metadata.transport.engine_url.rstrip("/"),
        agent_url=metadata.agent_url.rstrip("/"),
        dialect=metadata.transport.dialect,
        state=state,
        is_ending=follow.named.is_ending,
        block_size=max(0, shape.block_size),
        max_loras=metadata.lora.max_loras,
        max_lora_rank=metadata.lora.max_lora_rank,
        max_num_seqs=max(1, shape.max_num_seqs),
        max_model_len=shape.max_model_len,
        total_kv_blocks=max(0, shape.total_kv_blocks),
        engine_boot_id=metadata.engine_boot_id,
        # The same object while nothing changes: decisions that are remembered keep the replicas they were made from.
        residents=follow.replica.residents if follow.replica and follow.replica.residents == residents else residents,
        draining=draining | {lora.engine_name for lora in held if lora.state == "draining"},
        is_far=bool(zone and metadata.zone and metadata.zone != zone),
        is_suspect=metadata.is_suspect,
        refusal=metadata.lora.refusal,
        is_salted=metadata.lora.is_salted,
        report=EngineReport(
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_tokens_per_s=load.decode_tokens_per_s,
            output_tokens=load.mean_output_tokens,
            request_s=load.mean_request_s,
            load_s=load.load_seconds,
            at=read_at,
            moved_at=inf if load.still_s is None else read_at - load.still_s,
            # By the time of asking: a list that was read before a request failed must not look newer than that. An
            # older agent does not say, and reads its engine's figures about as often.
            listed_at=read_at if list_age_s is None else follow.asked_at - list_age_s,
        ),
    )


def state_of(follow: FollowedWorker, metadata: Metadata, *, is_silent: bool) -> ReplicaState:
    if is_silent and not follow.engine_answers:
        return "unreachable"
    if metadata.state not in ("ready", "draining"):
        return "starting"
    # A catalog may be older than the agent: what it says of the agent before says nothing of this one.
    is_drained = follow.named.drained in ("", metadata.agent_boot_id)
    if metadata.state == "draining" or is_drained or follow.named.is_ending:
        return "draining"
    return "ready"
