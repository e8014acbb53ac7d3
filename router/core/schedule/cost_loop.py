"""The cost model as one fast loop over a roster: `cost.replica_score` for many replicas at a tenth of its time.

Every decision computes this for all able replicas. So the loop reads plain tuples by position, keeps what is equal for
several replicas, and makes as few objects as it can: those drive all else out of the processor's first cache. The
tuples are `replica_book.load_vector`'s, in the order of ReplicaLoad's fields. A test holds every number to that of
`replica_score`, to the last bit.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from math import inf
from typing import Any, Final

from router.core.fleet import Roster
from router.core.kv.index import WorkerId
from router.core.schedule.cost import (
    STEPS_WAITED,
    ReplicaScore,
    adapter_move_s,
    context,
    decode_s,
    kappa,
    lost_work,
    next_slot_s,
    zone_s,
)
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import ReplicaLoad
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot
from router.core.schedule.step_model import step_model

# Of a load vector; all else is unpacked at once.
_BUSY_UNTIL: Final = ReplicaLoad._fields.index("busy_until")
_FRESH: Final = ReplicaLoad._fields.index("fresh")
_PACE: Final = ReplicaLoad._fields.index("prefill_pace")
_VICTIMS: Final = ReplicaLoad._fields.index("victims")
# A ReplicaScore without its replica, in the order of its fields.
_Terms = tuple[int, int, float, float, float, float, float, float, float, float, float, float, float]
_CACHED: Final = 1
_PREFILL_S: Final = 2
_COST_S: Final = -1
# A replica's constants: (block size, its StepModel's four, decode_s, zone_s, next_slot_s by slots in use, decode_s +
# zone_s).
_Constants = tuple[int, float, float, float, float, float, float, tuple[float, ...], float]


class RosterCosts:
    """The costs of one request at some replicas, the k-th at `positions[k]` of the roster."""

    __slots__ = ("_roster", "_terms", "positions")

    def __init__(self, roster: Roster, positions: list[int], terms: list[_Terms]) -> None:
        self._roster = roster
        self.positions = positions
        self._terms = terms

    def __len__(self) -> int:
        """How many replicas."""
        return len(self.positions)

    def costs_s(self) -> list[float]:
        """Each replica's whole cost, in the order of `positions`."""
        return [terms[_COST_S] for terms in self._terms]

    def cached_tokens(self) -> list[int]:
        """Tokens of the prompt that each replica has cached, in the order of `positions`."""
        return [terms[_CACHED] for terms in self._terms]

    def score(self, k: int) -> ReplicaScore:
        """The k-th replica's cost, term by term, as a ReplicaScore."""
        return ReplicaScore(self._roster.replicas[self.positions[k]].id, *self._terms[k])


class ReplicaConstants:
    """Per-replica constants of the cost model: made once for a roster, and kept with it.

    It has no reference to the roster, which refers to it: the two would live until the garbage collector comes.

    ids, rows  of each replica, in the roster's order; equal rows are one object
    """

    __slots__ = ("_move_s", "costs", "ids", "rows")

    def __init__(self, roster: Roster, costs: CostSettings) -> None:
        middle = roster.middle
        self._move_s: dict[str, Mapping[WorkerId, float]] = {"": {}}
        self.costs = costs
        slots = {
            most: tuple([next_slot_s(used, most, costs) for used in range(most + 1)])
            for most in {replica.max_loras for replica in roster.replicas}
        }
        self.ids = [replica.id for replica in roster.replicas]
        rows: list[_Constants] = [
            (
                replica.block_size,
                *step,
                decode_s(step, middle, costs),
                zone_s(replica, costs),
                slots[replica.max_loras],
                decode_s(step, middle, costs) + zone_s(replica, costs),
            )
            for replica in roster.replicas
            for step in [step_model(replica, middle, costs)]
        ]
        same: dict[_Constants, _Constants] = {}
        self.rows = [same.setdefault(row, row) for row in rows]

    @classmethod
    def of(cls, roster: Roster, costs: CostSettings) -> "ReplicaConstants":
        """The constants kept in the roster; with other settings, new ones are made and kept."""
        kept: ReplicaConstants | None = roster.kept.get(cls)
        if kept is None or kept.costs is not costs:
            kept = roster.kept[cls] = cls(roster, costs)
        return kept

    def move_s(self, engine_name: str, roster: Roster) -> Mapping[WorkerId, float]:
        """Seconds to bring an adapter to the device, by replica; without replicas that have it there. Cached."""
        found = self._move_s.get(engine_name)
        if found is None:
            found = self._move_s[engine_name] = {
                replica.id: adapter_move_s(replica, engine_name, roster.middle, self.costs)
                for replica in [roster.replicas[i] for i in roster.able(engine_name)]
                if replica.residents[engine_name].location != "device"
            }
        return found


def roster_costs(  # noqa: C901, PLR0912, PLR0915  (one loop)
    request: RoutingRequest, snapshot: FleetSnapshot, able: Sequence[int], *, only_close: bool = False
) -> RosterCosts:
    """The costs of this request at these positions of the roster.

    only_close  leave out the replicas that do not tie with the best: see CostSettings.tie_limit_s
    """
    costs, loads, now, price = snapshot.costs, snapshot.loads, snapshot.now, kappa(snapshot.rho, snapshot.costs)
    name, prompt, depth_of = request.engine_name, request.prompt_tokens, snapshot.depths.get
    lower, backlog = snapshot.lower, snapshot.backlog
    constants = ReplicaConstants.of(snapshot.roster, costs)
    moves = constants.move_s(name, snapshot.roster)
    id_of = ids = constants.ids
    rows: Sequence[Any] = constants.rows
    vectors: Sequence[Any] = loads.vectors
    resting = loads.resting
    if len(able) < len(rows):
        ids, rows = [ids[i] for i in able], [rows[i] for i in able]
        vectors, resting = [vectors[i] for i in able], [resting[i] for i in able]
    harm, crowding, base_placed = costs.decode_harm, costs.crowding, loads.base_placed(now)
    attention_tokens, output_tokens = costs.attention_tokens, snapshot.roster.middle.output_tokens
    eviction = costs.eviction
    usual = attention_tokens + snapshot.context_tokens
    last = prompt - 1 if prompt else 0
    # Tokens of work at so many cached: mostly as many as at the replica before, which has nothing of the prompt either.
    known, tokens = -1, 0.0
    best = limit = inf
    settled = 0
    positions: list[int] = []
    found: list[_Terms] = []
    # The last resting replica: another one with as much of the prompt and the same constants differs in its cache
    # pressure alone.
    like: Any = None
    like_depth, like_pace, like_cost_s, like_terms = -1, 1.0, 0.0, like
    is_plain = not (lower or backlog or moves)
    depths = map(depth_of, ids, repeat(0))
    for i, row, vector, rests, depth in zip(able, rows, vectors, resting, depths, strict=True):
        pace = vector[_PACE]
        if row is like and depth == like_depth and pace == like_pace:
            if rests is not None:
                cost_s, pressure_s = like_cost_s, 0.0
                if rests > base_placed:
                    pressure_s = crowding * like_terms[_PREFILL_S] * (rests - base_placed)
                    cost_s += pressure_s
                if cost_s > limit:
                    continue
                evicted_s = 0.0
                if vector[_VICTIMS]:
                    lost = lost_work(vector[_VICTIMS], prompt - depth * row[0], attention_tokens)
                    evicted_s = lost / usual * (row[4] * pace)
                    cost_s += price * eviction * evicted_s
                    if cost_s > limit:
                        continue
                if only_close and cost_s < best:
                    best, limit, settled = cost_s, costs.tie_limit_s(cost_s), len(found)
                positions.append(i)
                found.append(
                    (*like_terms[:8], pressure_s, evicted_s, *like_terms[10:12], cost_s)
                    if pressure_s or evicted_s
                    else like_terms
                )
                continue
            if like_cost_s + (vector[_BUSY_UNTIL] - now) > limit:
                continue  # its queue alone is too long
        block_size, token_s, sequence_s, context_token_s, prefill_token_s, decode, zone, slot_costs, always_s = row
        prefill_token_s *= pace
        cached, fetched = depth * block_size, 0.0
        if lower and id_of[i] in lower:
            host, storage = lower[id_of[i]]
            cached += (host + storage) * block_size
            fetched = block_size * (host * (1 - costs.host_credit) + storage * (1 - costs.storage_credit))
        if cached > last:
            cached = last - last % block_size  # prediction_accuracy.hit_tokens
        if cached != known:
            known, tokens = cached, (prompt - cached) * (attention_tokens + context(prompt, cached)) / usual
        prefill_s = tokens * prefill_token_s
        if fetched:
            device = depth * block_size
            fetched *= max(0, cached - device) / ((host + storage) * block_size)
            prefill_s += fetched * (attention_tokens + (device + cached) / 2) / usual * prefill_token_s
        work_s, adapter_s = prefill_s, 0.0
        if moves and id_of[i] in moves and name not in vector[_FRESH]:
            adapter_s = moves[id_of[i]]
            work_s += adapter_s
        cost_s = price * work_s + always_s
        slot_s = queue_s = waited_s = interference_s = pressure_s = 0.0
        # Nothing else of a resting replica matters: that, and unpacking the others' loads at once, halves the time.
        if rests is not None:
            placed = rests
            if is_plain:
                like, like_depth, like_pace, like_cost_s = row, depth, pace, cost_s
                like_terms = depth, cached, prefill_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, decode, zone, cost_s
        else:
            (
                busy_until, queue_s, others_until, in_prefill, in_decode, others, engine_names, slots_used, _, slot_at,
                full_s, request_s, kv_tokens, kv_free_tokens, kv_token_s, placed, _, _,
            ) = vector  # fmt: skip
            # ReplicaLoad.queue_s and kv_wait_s. Zeros are not added: each sum makes an object.
            if busy_until > now and busy_until - now > queue_s:
                queue_s = busy_until - now
            if others_until > now:
                queue_s += others_until - now
            if full_s:
                queue_s += full_s
            if kv_free_tokens < prompt <= kv_tokens:
                queue_s += min(request_s, (prompt - kv_free_tokens) * kv_token_s)
            if name and name not in engine_names:
                if slot_at > now:
                    slot_s = slot_at - now
                pressure_s = slot_costs[slots_used] if slots_used < len(slot_costs) else slot_costs[-1]
            decoding = in_decode + others
            in_use = kv_tokens - kv_free_tokens if kv_free_tokens < kv_tokens < inf else 0.0
            # step_model.running_step_s and batch_s.
            if decoding:
                waited_s = STEPS_WAITED * (token_s + sequence_s * decoding + context_token_s * in_use)
            own_s = sequence_s + context_token_s * prompt
            batch_s = (in_prefill + decoding) * (own_s + sequence_s) + context_token_s * in_use
            interference_s = harm * (work_s * (in_prefill + decoding) + output_tokens * batch_s)
            cost_s += slot_s + queue_s + waited_s + interference_s + pressure_s
        if backlog and id_of[i] in backlog:
            queue_s += backlog[id_of[i]]
            cost_s += backlog[id_of[i]]
        if placed > base_placed:
            displaced_s = crowding * work_s * (placed - base_placed)
            pressure_s += displaced_s
            cost_s += displaced_s
        if cost_s > limit:
            continue
        evicted_s = 0.0
        if vector[_VICTIMS]:
            lost = lost_work(vector[_VICTIMS], prompt - depth * block_size, attention_tokens)
            evicted_s = lost / usual * prefill_token_s
            cost_s += price * eviction * evicted_s
            if cost_s > limit:
                continue
        if only_close and cost_s < best:
            best, limit, settled = cost_s, costs.tie_limit_s(cost_s), len(found)
        positions.append(i)
        found.append(
            (
                depth,
                cached,
                prefill_s,
                adapter_s,
                slot_s,
                queue_s,
                waited_s,
                interference_s,
                pressure_s,
                evicted_s,
                decode,
                zone,
                cost_s,
            )
        )
    if settled:
        # Those before the best were compared with a higher limit.
        early = [k for k in range(settled) if found[k][_COST_S] <= limit]
        positions[:settled], found[:settled] = [positions[k] for k in early], [found[k] for k in early]
    return RosterCosts(snapshot.roster, positions, found)
