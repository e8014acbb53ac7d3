"""The replica where a request ends soonest and delays the others least: prefix, adapter and queue in one cost."""

from math import exp, inf
from random import Random
from typing import ClassVar

from router.core.cost import decode_s, prefill_rate
from router.core.decision import Ask, Scene
from router.core.fleet import Replica, Roster
from router.core.load import PLACED_S, Own


class KvLora:
    """Least cost wins; what is within a few percent of it shares at random, so that several routers do not herd."""

    name: ClassVar[str] = "kv_lora"

    def __init__(self) -> None:
        # The last roster's seconds per prompt token and per answer: a snapshot lives for many decisions.
        self._known: tuple[Roster, list[float], list[float]] = (Roster(), [], [])

    def choose(self, ask: Ask, scene: Scene) -> int:
        able = within_slots(ask, scene, scene.able(ask))
        costs = self.costs_s(ask, scene, able)
        return pick(able, costs, scene)

    def costs_s(self, ask: Ask, scene: Scene, able: tuple[int, ...]) -> list[float]:
        """The cost of each able replica: cost.score for all of them in one loop, a tenth of its time.

        A test holds the two together; read that one to understand, change both.
        """
        costs, now, price = scene.costs, scene.now, scene.kappa
        name, prompt, depth_of = ask.engine_name, ask.prompt_tokens, scene.depths.get
        replicas, loads, lower, backlog = scene.roster.replicas, scene.loads, scene.lower, scene.backlog
        token_s, answer_s = self._of_roster(scene)
        attention_tokens, harm = costs.attention_tokens, costs.decode_harm
        faded, least = now / PLACED_S, scene.least_crowding
        per_context = 1 / (attention_tokens + scene.context_tokens)
        last = max(0, prompt - 1)
        # Most replicas have nothing of a prompt: for them this is the same.
        whole_tokens = prompt * (attention_tokens + prompt / 2) * per_context
        found = []
        for i in able:
            replica, own = replicas[i], loads[i]
            # In one go: reading them one by one would take most of this loop's time.
            (
                busy_until,
                behind_s,
                others_until,
                in_prefill,
                in_decode,
                others_in_flight,
                _,
                _,
                _,
                _,
                full_s,
                _,
                _,
                kv_free_tokens,
                _,
                placed,
            ) = own
            id_ = replica.id
            depth = depth_of(id_, 0)
            if depth or (lower and id_ in lower):
                cached, extra = depth * replica.block_size, 0.0
                if lower and id_ in lower:
                    host, storage = lower[id_]
                    cached += (host + storage) * replica.block_size
                    extra = replica.block_size * (host * (1 - costs.host_credit) + storage * (1 - costs.storage_credit))
                if cached > last:
                    cached = last - last % replica.block_size  # trust.hit_tokens
                uncached = prompt - cached
                work_s = (uncached + extra) * (attention_tokens + cached + uncached / 2) * per_context * token_s[i]
            else:
                work_s = whole_tokens * token_s[i]
            ours_s, others_s = busy_until - now, others_until - now
            wait_s = ours_s if ours_s > behind_s else behind_s  # noqa: FURB136  (a call of max takes longer)
            if others_s > 0.0:
                wait_s += others_s
            wait_s += full_s + harm * work_s * (in_prefill + in_decode + others_in_flight)
            if prompt > kv_free_tokens:
                wait_s += own.room_s(prompt)
            if backlog:
                wait_s += backlog.get(id_, 0.0)
            if name:
                move_s, slot_wait_s = _adapter(name, replica, own, scene)
                work_s += move_s
                wait_s += slot_wait_s
            crowded = placed - faded
            if crowded > least:
                wait_s += costs.crowding * work_s * (crowded - least)
            found.append(price * work_s + wait_s + answer_s[i])
        return found

    def _of_roster(self, scene: Scene) -> tuple[list[float], list[float]]:
        roster, token_s, answer_s = self._known
        if roster is not scene.roster:
            roster, middle, costs = scene.roster, scene.roster.middle, scene.costs
            token_s = [1 / prefill_rate(replica, middle, costs) for replica in roster.replicas]
            answer_s = [decode_s(replica, middle, costs) for replica in roster.replicas]
            self._known = roster, token_s, answer_s
        return token_s, answer_s


def _adapter(name: str, replica: Replica, own: Own, scene: Scene) -> tuple[float, float]:
    """Seconds to bring an adapter to the device, and for a slot there with what taking it costs others."""
    costs = scene.costs
    move_s = wait_s = 0.0
    if name not in own.fresh:
        location = replica.residents[name].location
        if location == "host":
            move_s = costs.host_to_device_s
        elif location != "device":
            move_s = replica.report.load_s or scene.roster.middle.load_s or costs.load_s
    if name not in own.engine_names:
        if own.slot_at > scene.now:
            wait_s = own.slot_at - scene.now
        if own.slots_used and replica.max_loras:
            wait_s += costs.slot_s * min(1.0, own.slots_used / replica.max_loras) ** costs.slot_power
    return move_s, wait_s


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
    return close[0] if len(close) == 1 else Random(scene.seed).choice(close)
