"""The cost model: seconds that a request costs at a replica. The replica of least cost wins.

    cost = kappa * (prefill + adapter)            work, which delays every request behind it
         + slot + queue + step                    waiting, which delays this request alone
         + decode interference + cache pressure   what other requests lose, now and later
         + kappa * eviction                       what is computed again because this pushes it out; 0 by default
         + decode + zone                          by how much this replica is slower or farther

This is the model as it is read, explained and replayed. Decisions take `cost_loop.py`, which gives the same numbers to
the last bit in a tenth of the time; a test holds the two together.
"""

import msgspec

from router.core.fleet import EngineReport, Replica
from router.core.kv.index import WorkerId
from router.core.kv.prediction_accuracy import hit_tokens
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import ReplicaLoad
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot
from router.core.schedule.step_model import StepModel, batch_s, running_step_s, step_model
from router.core.sessions.held import Victim

# Decode steps that a first token waits for: half of the one under way, and the decodes in its prefill's own.
STEPS_WAITED = 1.5


class ReplicaScore(msgspec.Struct, frozen=True):
    """One replica's cost terms, in seconds but for `depth_blocks` and `cached_tokens`.

    step_s   the engine's step under way, and decoding beside the prefill
    harm_s   decode interference: by the work, and by one sequence more in the batch
    crowd_s  cache pressure, and scarcity of adapter slots
    evict_s  expected seconds to compute again what this prompt pushes out
    """

    worker_id: WorkerId
    depth_blocks: int
    cached_tokens: int
    prefill_s: float
    adapter_s: float
    slot_s: float
    queue_s: float
    step_s: float
    harm_s: float
    crowd_s: float
    evict_s: float
    decode_s: float
    zone_s: float
    cost_s: float

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token, as predicted."""
        return self.prefill_s + self.adapter_s + self.slot_s + self.queue_s + self.step_s


def replica_score(request: RoutingRequest, snapshot: FleetSnapshot, position: int) -> ReplicaScore:
    """The cost of this request, term by term, at the replica at one position of the roster."""
    costs, middle, now = snapshot.costs, snapshot.roster.middle, snapshot.now
    replica, load = snapshot.roster.replicas[position], snapshot.loads[position]
    depth, (host, storage) = snapshot.depths.get(replica.id, 0), snapshot.lower.get(replica.id, (0, 0))
    cached = hit_tokens(depth + host + storage, replica.block_size, request.prompt_tokens)
    engine = step_model(replica, middle, costs)
    prefill = prefill_s(request, snapshot, replica, engine.prefill_token_s * load.prefill_pace, cached)
    adapter = adapter_s(request, replica, load, middle, costs)
    work = prefill + adapter
    slot = slot_wait_s(request, load, now)
    engine_queue = engine_queue_s(request, load, now)
    step = STEPS_WAITED * running_step_s(engine, load)
    backlog = snapshot.backlog.get(replica.id, 0.0)
    batch = batch_s(engine, load, request.prompt_tokens)
    interference = costs.decode_harm * (work * load.all_in_flight + middle.output_tokens * batch)
    scarcity = slot_scarcity_s(request, replica, load, costs)
    pressure = cache_pressure_s(work, load, snapshot)
    decode, zone = decode_s(engine, middle, costs), zone_s(replica, costs)
    cost = kappa(snapshot.rho, costs) * work + (decode + zone)
    cost = cost + (slot + engine_queue + step + interference + scarcity) + backlog + pressure
    evict = evict_s(request, snapshot, replica, load, engine, depth)
    cost += kappa(snapshot.rho, costs) * costs.eviction * evict
    waits, crowd = (slot, engine_queue + backlog), scarcity + pressure
    return ReplicaScore(
        replica.id, depth, cached, prefill, adapter, *waits, step, interference, crowd, evict, decode, zone, cost
    )


def kappa(rho: float, costs: CostSettings) -> float:
    """Price of a second of work in seconds of waiting: work delays all requests behind it, more so in a busy fleet.

    1 / (1 - rho), between `kappa_min` and `kappa_max`.
    """
    spare = 1 - rho
    if spare * costs.kappa_min >= 1:
        return costs.kappa_min
    return 1 / spare if spare * costs.kappa_max > 1 else costs.kappa_max


def prefill_s(
    request: RoutingRequest, snapshot: FleetSnapshot, replica: Replica, token_s: float, cached_tokens: int
) -> float:
    """Seconds to compute the tokens that are not cached, and to fetch those that are cached below the device.

    token_s  of a token at the usual context
    """
    costs, prompt = snapshot.costs, request.prompt_tokens
    # Relative to the usual context, because the measured rate includes the attention to that.
    usual = costs.attention_tokens + snapshot.context_tokens
    computed = (prompt - cached_tokens) * (costs.attention_tokens + context(prompt, cached_tokens)) / usual * token_s
    if replica.id not in snapshot.lower:
        return computed
    host, storage = snapshot.lower[replica.id]
    device_tokens = snapshot.depths.get(replica.id, 0) * replica.block_size
    lower_tokens = (host + storage) * replica.block_size
    if not lower_tokens:
        return computed
    # At their own context, and no more of them than count as cached: fetching never costs more than computing.
    fetched = replica.block_size * (host * (1 - costs.host_credit) + storage * (1 - costs.storage_credit))
    fetched *= max(0, cached_tokens - device_tokens) / lower_tokens
    return computed + fetched * (costs.attention_tokens + (device_tokens + cached_tokens) / 2) / usual * token_s


def context(prompt_tokens: int, cached_tokens: int) -> float:
    """Tokens that the average computed token of this prompt attends to."""
    return cached_tokens + (prompt_tokens - cached_tokens) / 2


def adapter_s(
    request: RoutingRequest, replica: Replica, load: ReplicaLoad, middle: EngineReport, costs: CostSettings
) -> float:
    """Seconds to bring the adapter to the device; 0.0 if a request sent since the last report brings it already."""
    if not request.engine_name or request.engine_name in load.fresh:
        return 0.0
    return adapter_move_s(replica, request.engine_name, middle, costs)


def adapter_move_s(replica: Replica, engine_name: str, middle: EngineReport, costs: CostSettings) -> float:
    """Seconds until an adapter that the replica reports is in a device slot, if one is free.

    As long as its own last load there took, else the replica's usual load, else the fleet's.
    """
    resident = replica.residents[engine_name]
    if resident.location == "device":
        return 0.0
    if resident.location == "host":
        return costs.host_to_device_s
    return resident.load_s or replica.report.load_s or middle.load_s or costs.load_s


def engine_queue_s(request: RoutingRequest, load: ReplicaLoad, now: float) -> float:
    """Seconds until a request would start prefill, behind the engine's queue, its sequences and its full KV cache."""
    return load.queue_s(now) + load.full_s + load.kv_wait_s(request.prompt_tokens)


def slot_wait_s(request: RoutingRequest, load: ReplicaLoad, now: float) -> float:
    """Seconds until the request's adapter gets a slot; 0.0 if it needs no further one."""
    return max(0.0, load.slot_at - now) if needs_slot(request, load) else 0.0


def needs_slot(request: RoutingRequest, load: ReplicaLoad) -> bool:
    """Whether this request would take one adapter slot more."""
    return bool(request.engine_name) and request.engine_name not in load.engine_names


def slot_scarcity_s(request: RoutingRequest, replica: Replica, load: ReplicaLoad, costs: CostSettings) -> float:
    """Cost of one adapter slot more to the next adapter that needs one; 0.0 where this request needs none."""
    if not needs_slot(request, load):
        return 0.0
    return next_slot_s(min(load.slots_used, replica.max_loras), replica.max_loras, costs)


def next_slot_s(slots_used: int, max_loras: int, costs: CostSettings) -> float:
    """Cost of taking one more adapter slot where `slots_used` are in use; rises steeply towards the last."""
    return costs.slot_s * (slots_used / max_loras) ** costs.slot_power if slots_used and max_loras else 0.0


def cache_pressure_s(work_s: float, load: ReplicaLoad, snapshot: FleetSnapshot) -> float:
    """Later cost of the blocks that this work displaces; higher where blocks are displaced faster than elsewhere."""
    return snapshot.costs.crowding * work_s * max(0.0, load.placed - snapshot.loads.base_placed(snapshot.now))


def evict_s(
    request: RoutingRequest,
    snapshot: FleetSnapshot,
    replica: Replica,
    load: ReplicaLoad,
    engine: StepModel,
    depth_blocks: int,
) -> float:
    """Expected seconds to compute again what this prompt's new blocks push out of the replica's cache."""
    if not load.victims:
        return 0.0
    costs = snapshot.costs
    usual = costs.attention_tokens + snapshot.context_tokens
    lost = lost_work(load.victims, request.prompt_tokens - depth_blocks * replica.block_size, costs.attention_tokens)
    return lost / usual * (engine.prefill_token_s * load.prefill_pace)


def lost_work(victims: tuple[Victim, ...], new_tokens: int, attention_tokens: float) -> float:
    """Tokens that are expected to be computed again, each times what it costs at its context.

    Beyond the victims that are known, all are taken to be like these.
    """
    left, lost, known = float(new_tokens), 0.0, 0.0
    if left <= 0:
        return 0.0
    for tokens, chance, context_tokens in victims:
        taken = min(left, tokens)
        lost += taken * chance * (attention_tokens + context_tokens)
        left -= taken
        if chance:
            known += taken
        if left <= 0:
            return lost
    return lost * (known + left) / known if known else lost


def decode_s(step: StepModel, middle: EngineReport, costs: CostSettings) -> float:
    """Seconds of decoding for an answer of usual length alone, weighted; 0.0 before any step is known."""
    return costs.decode_share * middle.output_tokens * step.decode_s(1, 0)


def zone_s(replica: Replica, costs: CostSettings) -> float:
    """Cost of a replica that is known to be in another zone than the router."""
    return costs.other_zone_s if replica.is_far else 0.0
