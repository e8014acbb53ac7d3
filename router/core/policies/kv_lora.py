"""The replica where a request ends soonest and delays the others least: prefix, adapter and queue in one cost."""

from collections.abc import Mapping, Sequence
from math import exp
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
        self._known: tuple[Roster, list[_Row], dict[str, Mapping[WorkerId, float]]] = (Roster(), [], {})

    def choose(self, ask: Ask, scene: Scene) -> int:
        able = within_slots(ask, scene, scene.able(ask))
        return able[0] if len(able) == 1 else pick(able, self.costs_s(ask, scene, able), scene)

    def costs_s(self, ask: Ask, scene: Scene, able: tuple[int, ...]) -> list[float]:  # noqa: C901, PLR0912  (one loop)
        """The cost of each able replica: Scene.score for all of them in one loop, a tenth of its time.

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
        # Tokens of work at so many cached: mostly the same as for the replica before, that has nothing of a prompt too.
        known, tokens = -1, 0.0
        found = []
        for (id_, block_size, token_s, answer_s, max_loras), own in zip(rows, felt, strict=True):
            # In one go: reading them one by one would take most of this loop's time.
            (
                busy_until,
                behind_s,
                others_until,
                in_prefill,
                in_decode,
                others,
                engine_names,
                slots_used,
                fresh,
                slot_at,
                full_s,
                request_s,
                kv_tokens,
                kv_free_tokens,
                kv_token_s,
                placed,
            ) = own
            cached, extra = depth_of(id_, 0) * block_size, 0.0
            if lower and id_ in lower:
                host, storage = lower[id_]
                cached += (host + storage) * block_size
                extra = block_size * (host * (1 - costs.host_credit) + storage * (1 - costs.storage_credit))
            if cached > last:
                cached = last - last % block_size  # trust.hit_tokens
            if cached != known:
                known, tokens = cached, (prompt - cached) * (attention_tokens + (prompt + cached) / 2) * per_context
            work_s = tokens * token_s
            if extra:
                work_s += extra * (attention_tokens + (prompt + cached) / 2) * per_context * token_s
            wait_s = busy_until - now
            if wait_s < behind_s:  # noqa: PLR1730  (a call of max takes longer)
                wait_s = behind_s
            if others_until > now:
                wait_s += others_until - now
            wait_s += full_s + harm * work_s * (in_prefill + in_decode + others)
            if kv_free_tokens < prompt <= kv_tokens:
                wait_s += min(request_s, (prompt - kv_free_tokens) * kv_token_s)
            if backlog:
                wait_s += backlog.get(id_, 0.0)
            if name and name not in engine_names:
                if slot_at > now:
                    wait_s += slot_at - now
                if slots_used and max_loras:
                    wait_s += costs.slot_s * min(1.0, slots_used / max_loras) ** costs.slot_power
            if moves and id_ in moves and name not in fresh:
                work_s += moves[id_]
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
                    replica.id,
                    replica.block_size,
                    1 / prefill_rate(replica, middle, costs),
                    decode_s(replica, middle, costs) + zone_s(replica, costs),
                    replica.max_loras,
                )
                for replica in roster.replicas
            ]
            self._known = roster, rows, {}
        return rows

    def _moves(self, name: str, scene: Scene) -> Mapping[WorkerId, float]:
        """Seconds to bring an adapter to the device, by replica; without those that report it there."""
        roster, _, moves = self._known
        found = moves.get(name)
        if found is None:
            found = moves[name] = {
                replica.id: move_s(replica, name, roster.middle, scene.costs)
                for replica in [roster.replicas[i] for i in roster.able(name)]
                if replica.residents[name].location != "device"
            }
        return found


# (id, block size, seconds per prompt token, seconds per answer, max_loras) of a replica. Plain, as `Felt`.
_Row = tuple[WorkerId, int, float, float, int]


def within_slots(ask: Ask, scene: Scene, able: tuple[int, ...]) -> tuple[int, ...]:
    """Those where this adapter opens no slot beyond `max_loras`; all of them when there is no such replica."""
    name = ask.engine_name
    if not name or not scene.loads.has_full:
        return able
    fits = [i for i in able if scene.loads.has_slot(i, name)]
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
