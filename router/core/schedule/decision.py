"""What a policy is asked, sees and answers. All of it is frozen: the same ask and scene decide the same again."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

import msgspec

from router.core.errors import NoReplica
from router.core.fleet import Excluded, Incarnation, Replica, Roster, rejection
from router.core.kv.index import WorkerId
from router.core.kv.prediction_accuracy import hit_tokens
from router.core.schedule.cost import CostSettings, ReplicaConstants, ReplicaScore, Terms, context, kappa
from router.core.schedule.load import BUSY_UNTIL, FRESH, Felt, FleetLoad

NOTHING: Mapping[Any, Any] = MappingProxyType({})
_PREFILL_S: Final = 2  # of Terms


# Structs, as everything that each request makes anew: a named tuple takes four times as long to make and three times as
# long to read, a frozen dataclass longer still.
class RoutingRequest(msgspec.Struct, frozen=True):
    """One request, as far as the choice of a replica depends on it.

    excluded      what failed this request; an engine that started again is not among it
    session       who asks again and again: the session header, or else the body's `user`; may be empty
    first_blocks  a hash of the prompt's first blocks under its adapter; 0 when it was not tokenized. Of an approximate
                  prompt one that all turns of its conversation have in common
    only          the engine that keeps what it follows up on, if it does
    sequences     that an engine makes of it: `n` answers to each of its prompts
    total_tokens  of its prompt and answer, where replicas differ in how many they take; 0: not known, or of no matter
    is_approximate  its prompt was not tokenized: what is cached of it is estimated by what was sent before
    """

    base_model: str
    engine_name: str
    prompt_tokens: int
    excluded: Excluded = frozenset()
    session: str = ""
    first_blocks: int = 0
    only: Incarnation | None = None
    sequences: int = 1
    total_tokens: int = 0
    is_approximate: bool = False


class FleetSnapshot(msgspec.Struct, frozen=True):
    """Everything that a decision reads of the world.

    loads           of each replica of `roster`, in its order
    depths          contiguous blocks per replica in device memory; `lower`: how many more follow them in host memory
                    and in storage
    ranks           of workers with several data-parallel ranks: the one that has the most, where that matters
    backlog         seconds of work per replica that wait in the router and would go there first
    shut            replicas whose circuit is open, see breaker.py
    rho             utilisation of the base model's fleet
    context_tokens  the usual context of its prefills; see cost.context
    seed, turn      this decision's chance, and its number
    """

    roster: Roster
    loads: FleetLoad
    depths: Mapping[WorkerId, int] = NOTHING
    lower: Mapping[WorkerId, tuple[int, int]] = NOTHING
    ranks: Mapping[WorkerId, int] = NOTHING
    backlog: Mapping[WorkerId, float] = NOTHING
    shut: Excluded = frozenset()
    rho: float = 0.0
    context_tokens: float = 1000.0
    now: float = 0.0
    seed: int = 0
    turn: int = 0
    costs: CostSettings = CostSettings()

    def able(self, request: RoutingRequest) -> tuple[int, ...]:
        """Positions of the replicas that pass every filter; raises NoReplica when none does.

        Where every replica that passes the others is shut, all of them are asked: a router that is cut off, or counts
        wrongly, must not be what takes an adapter away.
        """
        able = self.roster.able(request.engine_name)
        if request.total_tokens:
            able = tuple(i for i in able if too_short(self.roster, i, request) is None)
        if request.excluded:
            able = tuple(i for i in able if self.roster.replicas[i].incarnation not in request.excluded)
        if request.only is not None:
            able = tuple(i for i in able if self.roster.replicas[i].incarnation == request.only)
        if not able:
            why = ", ".join(f"{worker}: {reason}" for worker, reason in sorted(self.rejected(request).items()))
            raise NoReplica(
                f"no replica of {request.base_model!r} can serve this now ({why or 'the fleet has none of it'})"
            )
        if self.shut:
            able = tuple(i for i in able if self.roster.replicas[i].incarnation not in self.shut) or able
        return able

    def rejected(self, request: RoutingRequest) -> dict[WorkerId, str]:
        """The filter that each replica fails, of those that fail one."""
        reasons = {
            r.id: _refused(r, request) or rejection(r, request.engine_name) or too_short(self.roster, i, request)
            for i, r in enumerate(self.roster.replicas)
        }
        rejected = {worker: reason for worker, reason in reasons.items() if reason is not None}
        shut = {
            r.id: "circuit open" for r in self.roster.replicas if r.incarnation in self.shut and r.id not in rejected
        }
        return rejected | shut if len(rejected) + len(shut) < len(reasons) else rejected

    def score(self, request: RoutingRequest, position: int) -> ReplicaScore:
        """What this request costs on one replica, term by term: as `terms`, at a third of what that takes for one.

        Plain as that is: by the names of an Own it takes twice as long. A test holds the two to each other exactly.
        """
        roster, costs, name = self.roster, self.costs, request.engine_name
        prices = ReplicaConstants.of(roster, costs)
        if self.lower or self.backlog or (name and prices.moves(name, roster)):
            _, (terms,) = self.terms(request, (position,))
            return self.named(position, terms)
        loads, now, prompt, worker = self.loads, self.now, request.prompt_tokens, prices.ids[position]
        block_size, token_s, answer_s, far_s, opening, always_s = prices.rows[position]
        depth = self.depths.get(worker, 0)
        cached = hit_tokens(depth, block_size, prompt) if depth else 0
        attention_tokens = costs.attention_tokens
        per_context = 1 / (attention_tokens + self.context_tokens)
        prefill_s = (prompt - cached) * (attention_tokens + context(prompt, cached)) * per_context * token_s
        cost_s = kappa(self.rho, costs) * prefill_s + always_s
        slot_s = queue_s = harm_s = crowd_s = 0.0
        placed = loads.resting[position]
        if placed is None:
            (
                busy_until,
                queue_s,
                others_until,
                in_prefill,
                in_decode,
                others,
                engine_names,
                slots_used,
                _,
                slot_at,
                full_s,
                request_s,
                kv_tokens,
                kv_free_tokens,
                kv_token_s,
                placed,
            ) = loads.felt[position]
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
                crowd_s = opening[slots_used] if slots_used < len(opening) else opening[-1]
            harm_s = costs.decode_harm * prefill_s * (in_prefill + in_decode + others)
            cost_s += slot_s + queue_s + harm_s + crowd_s
        uncrowded = loads.uncrowded(now)
        if placed > uncrowded:
            crowded_s = costs.crowding * prefill_s * (placed - uncrowded)
            crowd_s += crowded_s
            cost_s += crowded_s
        return ReplicaScore(
            worker, depth, cached, prefill_s, 0.0, slot_s, queue_s, harm_s, crowd_s, answer_s, far_s, cost_s
        )

    def named(self, position: int, terms: Terms) -> ReplicaScore:
        """A replica's terms, by their names."""
        return ReplicaScore(self.roster.replicas[position].id, *terms)

    def scored(self, request: RoutingRequest, position: int) -> tuple[int, ReplicaScore]:
        """A policy's answer: this replica."""
        return position, self.score(request, position)

    def terms(  # noqa: C901, PLR0912, PLR0915  (one loop)
        self, request: RoutingRequest, able: Sequence[int], *, only_close: bool = False
    ) -> tuple[list[int], list[Terms]]:
        """What this request costs on each of these replicas: the cost model.

        One loop over plain tuples, because every decision does this for all replicas; a test holds it to the same
        written tidily, which takes ten times as long. What it makes and keeps counts twice: it drives everything else
        out of the processor's first cache.

        only_close  leave out what is not about as good as the best of them: see Costs.close_to
        returns     their positions, and their terms
        """
        costs, loads, now, price = self.costs, self.loads, self.now, kappa(self.rho, self.costs)
        name, prompt, depth_of = request.engine_name, request.prompt_tokens, self.depths.get
        lower, backlog = self.lower, self.backlog
        prices = ReplicaConstants.of(self.roster, costs)
        moves = prices.moves(name, self.roster)
        id_of = ids = prices.ids
        rows: Sequence[Any] = prices.rows
        felt: Sequence[Felt] = loads.felt
        resting = loads.resting
        if len(able) < len(rows):
            ids, rows = [ids[i] for i in able], [rows[i] for i in able]
            felt, resting = [felt[i] for i in able], [resting[i] for i in able]
        harm, crowding, uncrowded = costs.decode_harm, costs.crowding, loads.uncrowded(now)
        attention_tokens = costs.attention_tokens
        # Relative to the usual context, because the measured rate has that one's attention in it.
        per_context = 1 / (attention_tokens + self.context_tokens)
        last = prompt - 1 if prompt else 0
        # Tokens of work at so many cached: mostly the same as for the replica before, that has nothing of a prompt too.
        known, tokens = -1, 0.0
        best = limit = inf
        settled = 0
        at: list[int] = []
        found: list[Terms] = []
        # Of those at rest the last: what has as much of the prompt, and the same price, differs in its crowding alone.
        like: Any = None
        like_depth, like_cost_s, like_terms = -1, 0.0, like
        is_plain = not (lower or backlog or moves)
        depths = map(depth_of, ids, repeat(0))
        for i, row, own, rests, depth in zip(able, rows, felt, resting, depths, strict=True):
            if row is like and depth == like_depth:
                if rests is not None:
                    cost_s, crowd_s = like_cost_s, 0.0
                    if rests > uncrowded:
                        crowd_s = crowding * like_terms[_PREFILL_S] * (rests - uncrowded)
                        cost_s += crowd_s
                    if cost_s > limit:
                        continue
                    if only_close and cost_s < best:
                        best, limit, settled = cost_s, costs.close_to(cost_s), len(found)
                    at.append(i)
                    found.append((*like_terms[:7], crowd_s, *like_terms[8:10], cost_s) if crowd_s else like_terms)
                    continue
                if like_cost_s + (own[BUSY_UNTIL] - now) > limit:
                    continue  # its queue alone is too long
            block_size, token_s, answer_s, far_s, opening, always_s = row
            cached, extra = depth * block_size, 0.0
            if lower and id_of[i] in lower:
                host, storage = lower[id_of[i]]
                cached += (host + storage) * block_size
                extra = block_size * (host * (1 - costs.host_credit) + storage * (1 - costs.storage_credit))
            if cached > last:
                cached = last - last % block_size  # trust.hit_tokens
            if cached != known:
                known, tokens = cached, (prompt - cached) * (attention_tokens + context(prompt, cached)) * per_context
            prefill_s = tokens * token_s
            if extra:
                # At their own context, and no more than count as cached: fetched they never cost more than computed.
                device = depth * block_size
                extra *= max(0, cached - device) / ((host + storage) * block_size)
                prefill_s += extra * (attention_tokens + (device + cached) / 2) * per_context * token_s
            work_s, adapter_s = prefill_s, 0.0
            if moves and id_of[i] in moves and name not in own[FRESH]:
                adapter_s = moves[id_of[i]]
                work_s += adapter_s
            cost_s = price * work_s + always_s
            slot_s = queue_s = harm_s = crowd_s = 0.0
            # Of one that rests nothing else is looked at: that, and reading the others' in one go, halves the time.
            if rests is not None:
                placed = rests
                if is_plain:
                    like, like_depth, like_cost_s = row, depth, cost_s
                    like_terms = depth, cached, prefill_s, 0.0, 0.0, 0.0, 0.0, 0.0, answer_s, far_s, cost_s
            else:
                (
                    busy_until,
                    queue_s,
                    others_until,
                    in_prefill,
                    in_decode,
                    others,
                    engine_names,
                    slots_used,
                    _,
                    slot_at,
                    full_s,
                    request_s,
                    kv_tokens,
                    kv_free_tokens,
                    kv_token_s,
                    placed,
                ) = own
                # Own.queue_s and Own.room_s. What is nothing is not added: each sum makes an object.
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
                    crowd_s = opening[slots_used] if slots_used < len(opening) else opening[-1]
                harm_s = harm * prefill_s * (in_prefill + in_decode + others)
                cost_s += slot_s + queue_s + harm_s + crowd_s
            if backlog and id_of[i] in backlog:
                queue_s += backlog[id_of[i]]
                cost_s += backlog[id_of[i]]
            if placed > uncrowded:
                crowded_s = crowding * work_s * (placed - uncrowded)
                crowd_s += crowded_s
                cost_s += crowded_s
            if cost_s > limit:
                continue
            if only_close and cost_s < best:
                best, limit, settled = cost_s, costs.close_to(cost_s), len(found)
            terms = (depth, cached, prefill_s, adapter_s, slot_s, queue_s, harm_s, crowd_s, answer_s, far_s, cost_s)
            at.append(i)
            found.append(terms)
        if settled:
            # What came before the best was held against less.
            early = [k for k in range(settled) if found[k][-1] <= limit]
            at[:settled], found[:settled] = [at[k] for k in early], [found[k] for k in early]
        return at, found

    @property
    def kappa(self) -> float:
        """How much dearer work is than waiting now."""
        return kappa(self.rho, self.costs)


def too_short(roster: Roster, position: int, request: RoutingRequest) -> str | None:
    """Why this replica must not be given so long a request. Where it is too long for every one that could be asked it
    is for an engine to say so.
    """
    takes = roster.replicas[position].max_model_len
    if not 0 < takes < request.total_tokens <= roster.longest(request.engine_name) or request.only is not None:
        return None
    return f"takes {takes} tokens, and this may come to {request.total_tokens}"


def _refused(replica: Replica, request: RoutingRequest) -> str | None:
    if replica.incarnation in request.excluded:
        return "failed this request before"
    return "does not keep the earlier response" if request.only not in (None, replica.incarnation) else None


class Decision(msgspec.Struct, frozen=True):
    """The chosen replica, at `position` of the scene's roster, and everything that it was chosen from."""

    policy: str
    request: RoutingRequest
    snapshot: FleetSnapshot
    position: int
    replica: Replica
    score: ReplicaScore

    @property
    def rank(self) -> int | None:
        """The data-parallel rank to ask for; None: whichever the engine likes."""
        return self.snapshot.ranks.get(self.replica.id)

    @property
    def scores(self) -> tuple[ReplicaScore, ...]:
        """Every able replica's terms."""
        return tuple(map(self.snapshot.named, *self.snapshot.terms(self.request, self.snapshot.able(self.request))))

    @property
    def rejected(self) -> dict[WorkerId, str]:
        """The filter that each other replica failed."""
        return self.snapshot.rejected(self.request)


class RoutingPolicy(Protocol):
    """A rule that picks one replica. It keeps nothing between decisions that could change one."""

    name: ClassVar[str]

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        """The position in the roster, and its score; raises NoReplica when every replica failed a filter."""
        ...


def decide(policy: RoutingPolicy, request: RoutingRequest, snapshot: FleetSnapshot) -> Decision:
    """filter -> cost -> pick; raises NoReplica."""
    position, score = policy.choose(request, snapshot)
    return Decision(policy.name, request, snapshot, position, snapshot.roster.replicas[position], score)
