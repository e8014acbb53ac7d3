"""The replica where a request ends soonest and delays the others least: prefix, adapter and queue in one cost."""

from collections.abc import Mapping, Sequence
from math import exp, inf
from random import Random
from typing import ClassVar

from router.core.cost import decode_s, move_s, prefill_rate, zone_s
from router.core.decision import NOTHING, Ask, Scene
from router.core.fleet import Roster
from router.core.index import WorkerId
from router.core.load import PLACED_S, Felt


class KvLora:
    """Least cost wins; what is within a few percent of it shares at random, so that several routers do not herd."""

    name: ClassVar[str] = "kv_lora"

    def __init__(self) -> None:
        # What does not change while a roster lives, which is for many decisions.
        self._known: tuple[Roster, list[_Row], dict[str, Mapping[int, float]]] = (Roster(), [], {})

    def choose(self, ask: Ask, scene: Scene) -> int:
        able = within_slots(ask, scene, scene.able(ask))
        costs = self.costs_s(ask, scene, able)
        return pick(able, costs, scene)

    def costs_s(self, ask: Ask, scene: Scene, able: tuple[int, ...]) -> list[float]:  # noqa: C901, PLR0912  (one loop)
        """The cost of each able replica: cost.score for all of them in one loop, a tenth of its time.

        A test holds the two together; read that one to understand, change both.
        """
        costs, now, price = scene.costs, scene.now, scene.kappa
        name, prompt, depth_of = ask.engine_name, ask.prompt_tokens, scene.depths.get
        lower, backlog = scene.lower, scene.backlog
        rows: Sequence[_Row] = self._of_roster(scene)
        felt: Sequence[Felt] = scene.loads.felt
        if len(able) < len(rows):
            rows, felt = [rows[i] for i in able], [felt[i] for i in able]
        moves = self._moves(name, scene) if name else NOTHING
        attention_tokens, harm, crowding = costs.attention_tokens, costs.decode_harm, costs.crowding
        faded, least = now / PLACED_S, scene.least_crowding
        per_context = 1 / (attention_tokens + scene.context_tokens)
        last = max(0, prompt - 1)
        # Tokens of work by tokens cached: few numbers for many replicas, most of which have nothing of a prompt.
        known: dict[int, float] = {}
        found = []
        for (i, id_, block_size, token_s, answer_s, max_loras), own in zip(rows, felt, strict=True):
            # In one go: reading them one by one would take most of this loop's time.
            (
                busy_until,
                behind_s,
                others_until,
                in_flight,
                engine_names,
                slots_used,
                fresh,
                slot_at,
                full_s,
                kv_free_tokens,
                placed,
            ) = own
            cached, extra = depth_of(id_, 0) * block_size, 0.0
            if lower and id_ in lower:
                host, storage = lower[id_]
                cached += (host + storage) * block_size
                extra = block_size * (host * (1 - costs.host_credit) + storage * (1 - costs.storage_credit))
            if cached > last:
                cached = last - last % block_size  # trust.hit_tokens
            tokens = known.get(cached)
            if tokens is None:
                tokens = known[cached] = (prompt - cached) * (attention_tokens + (prompt + cached) / 2) * per_context
            work_s = tokens * token_s
            if extra:
                work_s += extra * (attention_tokens + (prompt + cached) / 2) * per_context * token_s
            ours_s, others_s = busy_until - now, others_until - now
            wait_s = ours_s if ours_s > behind_s else behind_s  # noqa: FURB136  (a call of max takes longer)
            if others_s > 0.0:
                wait_s += others_s
            wait_s += full_s + harm * work_s * in_flight
            if prompt > kv_free_tokens:
                wait_s += scene.loads[i].room_s(prompt)
            if backlog:
                wait_s += backlog.get(id_, 0.0)
            if name and name not in engine_names:
                if slot_at > now:
                    wait_s += slot_at - now
                if slots_used and max_loras:
                    wait_s += costs.slot_s * min(1.0, slots_used / max_loras) ** costs.slot_power
            if moves and i in moves and name not in fresh:
                work_s += moves[i]
            crowded = placed - faded
            if crowded > least:
                wait_s += crowding * work_s * (crowded - least)
            found.append(price * work_s + wait_s + answer_s)
        return found

    def _of_roster(self, scene: Scene) -> list["_Row"]:
        roster, rows, _ = self._known
        if roster is not scene.roster:
            roster, middle, costs = scene.roster, scene.roster.middle, scene.costs
            rows = [
                (
                    i,
                    replica.id,
                    replica.block_size,
                    1 / prefill_rate(replica, middle, costs),
                    decode_s(replica, middle, costs) + zone_s(replica, costs),
                    replica.max_loras,
                )
                for i, replica in enumerate(roster.replicas)
            ]
            self._known = roster, rows, {}
        return rows

    def _moves(self, name: str, scene: Scene) -> Mapping[int, float]:
        """Seconds to bring an adapter to the device, by position; without those that report it there."""
        roster, _, moves = self._known
        found = moves.get(name)
        if found is None:
            found = moves[name] = {
                i: move_s(roster.replicas[i], name, roster.middle, scene.costs)
                for i in roster.able(name)
                if roster.replicas[i].residents[name].location != "device"
            }
        return found


# (position, id, block size, seconds per prompt token, seconds per answer, max_loras) of a replica. Plain, as `Felt`.
_Row = tuple[int, WorkerId, int, float, float, int]


def within_slots(ask: Ask, scene: Scene, able: tuple[int, ...]) -> tuple[int, ...]:
    """Those where this adapter opens no slot beyond `max_loras`; all of them when there is no such replica."""
    name = ask.engine_name
    if not name:
        return able
    fits = [i for i in able if scene.loads[i].slot_at == -inf or name in scene.loads[i].engine_names]
    return tuple(fits) or able


def pick(able: tuple[int, ...], costs_s: list[float], scene: Scene) -> int:
    """One of the cheapest at random; with a temperature any of them, the cheaper the likelier."""
    best = min(costs_s)
    temperature_s = scene.costs.temperature_s
    if temperature_s > 0:
        weights = [exp((best - cost) / temperature_s) for cost in costs_s]
        return Random(scene.seed).choices(able, weights)[0]
    limit = best * (1 + scene.costs.tie_share) + scene.costs.tie_s
    close = [i for i, cost in zip(able, costs_s, strict=True) if cost <= limit]
    # The seed itself is the chance: making a generator of it would take longer than all the rest.
    return close[scene.seed % len(close)]
