"""What a policy is asked, sees and answers. All of it is frozen: the same ask and scene decide the same again."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

from router.core.cost import Costs, Score, context, decode_s, kappa, move_s, prefill_rate, zone_s
from router.core.errors import NoReplica
from router.core.fleet import Excluded, Replica, Roster, rejection
from router.core.index import WorkerId
from router.core.load import Loads
from router.core.trust import hit_tokens

NOTHING: Mapping[Any, Any] = MappingProxyType({})
_NONE = (0, 0)


# Tuples, as everything that each request makes anew: a frozen dataclass takes four times as long to make.
class Ask(NamedTuple):
    """One request, as far as the choice of a replica depends on it.

    excluded      what failed this request; an engine that started again is not among it
    session       who asks again and again: the session header, or else the body's `user`; may be empty
    first_blocks  a hash of the prompt's first blocks under its adapter; 0 when it was not tokenized
    """

    base_model: str
    engine_name: str
    prompt_tokens: int
    excluded: Excluded = frozenset()
    session: str = ""
    first_blocks: int = 0


class Scene(NamedTuple):
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
    loads: Loads
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
    costs: Costs = Costs()

    def able(self, ask: Ask) -> tuple[int, ...]:
        """Positions of the replicas that pass every filter; raises NoReplica when none does.

        Where every replica that passes the others is shut, all of them are asked: a router that is cut off, or counts
        wrongly, must not be what takes an adapter away.
        """
        able = self.roster.able(ask.engine_name)
        if ask.excluded:
            able = tuple(i for i in able if self.roster.replicas[i].incarnation not in ask.excluded)
        if not able:
            why = ", ".join(f"{worker}: {reason}" for worker, reason in sorted(self.rejected(ask).items()))
            raise NoReplica(
                f"no replica of {ask.base_model!r} can serve this now ({why or 'the fleet has none of it'})"
            )
        if self.shut:
            able = tuple(i for i in able if self.roster.replicas[i].incarnation not in self.shut) or able
        return able

    def rejected(self, ask: Ask) -> dict[WorkerId, str]:
        """The filter that each replica fails, of those that fail one."""
        reasons = {
            r.id: "failed this request before" if r.incarnation in ask.excluded else rejection(r, ask.engine_name)
            for r in self.roster.replicas
        }
        rejected = {worker: reason for worker, reason in reasons.items() if reason is not None}
        shut = {
            r.id: "circuit open" for r in self.roster.replicas if r.incarnation in self.shut and r.id not in rejected
        }
        return rejected | shut if len(rejected) + len(shut) < len(reasons) else rejected

    def score(self, ask: Ask, position: int) -> Score:
        """What this request costs on one replica: the cost model term by term, as `POST /v1/route` shows it.

        kv_lora.py has the same for all replicas in one loop; a test holds the two together.
        """
        costs, middle, now = self.costs, self.roster.middle, self.now
        replica, own = self.roster.replicas[position], self.loads[position]
        id_, block_size, engine_name, prompt_tokens = replica.id, replica.block_size, ask.engine_name, ask.prompt_tokens
        depth_blocks = self.depths.get(id_, 0)
        host, storage = self.lower.get(id_, _NONE)
        cached = hit_tokens(depth_blocks + host + storage, block_size, prompt_tokens)
        fetched = host * (1 - costs.host_credit) + storage * (1 - costs.storage_credit)
        work_tokens = prompt_tokens - cached + block_size * fetched
        # Relative to the usual context, because the measured rate has that one's attention in it.
        least_tokens = costs.attention_tokens
        attention = (least_tokens + context(prompt_tokens, cached)) / (least_tokens + self.context_tokens)
        prefill_s = work_tokens * attention / prefill_rate(replica, middle, costs)
        adapter_s = slot_s = opening_s = 0.0
        if engine_name:
            if engine_name not in own.fresh:
                adapter_s = move_s(replica, engine_name, middle, costs)
            if engine_name not in own.engine_names:
                slot_s = max(0.0, own.slot_at - now)
                if replica.max_loras:
                    opening_s = costs.slot_s * min(1.0, own.slots_used / replica.max_loras) ** costs.slot_power
        queue_s = own.queue_s(now) + own.full_s + own.room_s(prompt_tokens) + self.backlog.get(id_, 0.0)
        harm_s = costs.decode_harm * prefill_s * (own.in_flight + own.others_in_flight)
        work_s = prefill_s + adapter_s
        crowd_s = costs.crowding * work_s * (own.crowding(now) - self.least_crowding) + opening_s
        answer_s, far_s = decode_s(replica, middle, costs), zone_s(replica, costs)
        return Score(
            id_,
            depth_blocks,
            cached,
            prefill_s,
            adapter_s,
            slot_s,
            queue_s,
            harm_s,
            crowd_s,
            answer_s,
            far_s,
            self.kappa * work_s + slot_s + queue_s + harm_s + crowd_s + answer_s + far_s,
        )

    @property
    def least_crowding(self) -> float:
        """Of all replicas, able or not: what it is measured from does not change with the adapter."""
        return self.loads.least_crowding(self.now)

    @property
    def kappa(self) -> float:
        """How much dearer work is than waiting now."""
        return kappa(self.rho, self.costs)


class Decision(NamedTuple):
    """The chosen replica, at `position` of the scene's roster, and everything that it was chosen from."""

    policy: str
    ask: Ask
    scene: Scene
    position: int
    replica: Replica
    score: Score

    @property
    def rank(self) -> int | None:
        """The data-parallel rank to ask for; None: whichever the engine likes."""
        return self.scene.ranks.get(self.replica.id)

    @property
    def scores(self) -> tuple[Score, ...]:
        """Every able replica's terms."""
        return tuple(self.scene.score(self.ask, i) for i in self.scene.able(self.ask))

    @property
    def rejected(self) -> dict[WorkerId, str]:
        """The filter that each other replica failed."""
        return self.scene.rejected(self.ask)


class Policy(Protocol):
    """A rule that picks one replica. It keeps nothing between decisions that could change one."""

    name: ClassVar[str]

    def choose(self, ask: Ask, scene: Scene) -> int:
        """The position in the roster; raises NoReplica when every replica failed a filter."""
        ...


def decide(policy: Policy, ask: Ask, scene: Scene) -> Decision:
    """filter -> cost -> pick; raises NoReplica."""
    position = policy.choose(ask, scene)
    return Decision(policy.name, ask, scene, position, scene.roster.replicas[position], scene.score(ask, position))
