"""What a request costs on a replica, in seconds: work, which delays everyone behind it, and waiting, which does not."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from router.core.fleet import EngineReport, Replica, Roster
from router.core.kv.index import WorkerId


@dataclass(frozen=True, slots=True)
class CostSettings:
    """The numbers of the cost model. Where no source is named the value is a guess, nothing measured."""

    # Before any replica has reported a rate: an 8B model on one 80 GB GPU does about this.
    prefill_tokens_per_s: float = 10_000.0
    # Context at which attention costs as much as everything else: a Llama 8B spends 16 GFLOP on a token and 0.52 MFLOP
    # on each token before it (4 x 32 layers x 4,096).
    attention_tokens: float = 30_000.0
    # How much of a cached block's prefill is saved where the engine must first fetch it from another medium.
    host_credit: float = 0.9
    storage_credit: float = 0.5
    # An adapter in host memory moves to a device slot: rank 64 of an 8B model is 336 MB over PCIe.
    host_to_device_s: float = 0.02
    # An adapter that the engine must read again, until one load has been measured.
    load_s: float = 1.0
    # What one second of prefill takes from each decode that runs beside it.
    decode_harm: float = 0.05
    # How much a second counts that an answer takes longer, against one that its first token comes later. Above 0 the
    # faster replicas draw work, and their caches turn over: with 0.05 hits are 0.01 to 0.02 lower in
    # `benchmarks.trace`, replicas 20 % apart, and first tokens no sooner. For fleets of mixed GPUs.
    decode_share: float = 0.0
    # What is said to a replica in another zone than the router's: a millisecond or two more, and traffic that clouds
    # charge for. In seconds, so that it stays where the rest is about as good. A guess, nothing measured.
    other_zone_s: float = 0.05
    # What a second of work costs later, for each e-fold by which its replica is more crowded than the least crowded: it
    # displaces blocks, and an adapter draws its traffic there. This and the next five: `benchmarks.trace`, loads 1 and
    # 2, 750 and 2,000 blocks; about 60 settings, flat around these.
    crowding: float = 1.2
    # What opening the last free adapter slot costs whoever needs one next, and how steeply that falls with more free.
    slot_s: float = 2.0
    slot_power: float = 4.0
    # Below that a fleet at rest spreads every prefix to save a tenth of a second, and misses later what it displaced.
    kappa_min: float = 4.0
    kappa_max: float = 16.0
    # Within this share of the best (or this many seconds) the choice is random, so that routers do not herd.
    tie_share: float = 0.03
    tie_s: float = 0.0005
    # Above 0: every replica gets a chance, weighted by exp(-cost / temperature).
    temperature_s: float = 0.0
    # How much of a replica's own measured rate counts; the rest is the fleet's median.
    own_rate_share: float = 0.8

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "attention_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, found {getattr(self, name):g}")
        if not 1 <= self.kappa_min <= self.kappa_max:
            raise ValueError(f"1 <= kappa_min <= kappa_max must hold, found {self.kappa_min:g} and {self.kappa_max:g}")
        for name in ("host_credit", "storage_credit", "own_rate_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, found {getattr(self, name):g}")

    def close_to(self, best_s: float) -> float:
        """The most that is about as good as the best."""
        return best_s * (1 + self.tie_share) + self.tie_s


class ReplicaScore(msgspec.Struct, frozen=True):
    """One replica's terms, in seconds but for `depth_blocks` and `cached_tokens`."""

    replica: WorkerId
    depth_blocks: int
    cached_tokens: int
    prefill_s: float
    adapter_s: float
    slot_s: float
    queue_s: float
    harm_s: float
    crowd_s: float
    decode_s: float
    zone_s: float
    cost_s: float


# The same as a plain tuple, without whose it is: a decision makes some of them, and a Score of one.
Terms = tuple[int, int, float, float, float, float, float, float, float, float, float]
# (block size, seconds per prompt token, decode_s, zone_s, opening_s by slots in use, decode_s + zone_s) of a replica.
# Plain, as `load.Felt`.
_Row = tuple[int, float, float, float, tuple[float, ...], float]


class ReplicaConstants:
    """What the replicas of a roster cost whatever is asked of them; made once, and kept with it for many decisions.

    It does not have the roster, which has it: each snapshot of the fleet would stay until the collector comes by.

    ids, rows  of each replica, in the roster's order; rows that are equal are one object
    """

    __slots__ = ("_moves", "costs", "ids", "rows")

    def __init__(self, roster: Roster, costs: CostSettings) -> None:
        middle = roster.middle
        self._moves: dict[str, Mapping[WorkerId, float]] = {"": {}}
        self.costs = costs
        opening = {
            most: tuple([opening_s(used, most, costs) for used in range(most + 1)])
            for most in {replica.max_loras for replica in roster.replicas}
        }
        self.ids = [replica.id for replica in roster.replicas]
        rows: list[_Row] = [
            (
                replica.block_size,
                1 / prefill_rate(replica, middle, costs),
                decode_s(replica, middle, costs),
                zone_s(replica, costs),
                opening[replica.max_loras],
                decode_s(replica, middle, costs) + zone_s(replica, costs),
            )
            for replica in roster.replicas
        ]
        same: dict[_Row, _Row] = {}
        self.rows = [same.setdefault(row, row) for row in rows]

    @classmethod
    def of(cls, roster: Roster, costs: CostSettings) -> "ReplicaConstants":
        """Those that the roster keeps, if they were made of these numbers."""
        found: ReplicaConstants | None = roster.kept.get(cls)
        if found is None or found.costs is not costs:
            found = roster.kept[cls] = cls(roster, costs)
        return found

    def moves(self, engine_name: str, roster: Roster) -> Mapping[WorkerId, float]:
        """Seconds to bring an adapter to the device, by replica of its roster; without those that report it there."""
        found = self._moves.get(engine_name)
        if found is None:
            found = self._moves[engine_name] = {
                replica.id: move_s(replica, engine_name, roster.middle, self.costs)
                for replica in [roster.replicas[i] for i in roster.able(engine_name)]
                if replica.residents[engine_name].location != "device"
            }
        return found


def kappa(rho: float, costs: CostSettings) -> float:
    """How much dearer work is than waiting: work delays everyone behind it, more so the busier the fleet."""
    spare = 1 - rho
    if spare * costs.kappa_min >= 1:
        return costs.kappa_min
    return 1 / spare if spare * costs.kappa_max > 1 else costs.kappa_max


def prefill_rate(replica: Replica, middle: EngineReport, costs: CostSettings) -> float:
    """Tokens per second: a replica's own measured rate, shrunk towards the fleet's; the default before any."""
    fleet = middle.prefill_tokens_per_s or costs.prefill_tokens_per_s
    own = replica.report.prefill_tokens_per_s or fleet
    return costs.own_rate_share * own + (1 - costs.own_rate_share) * fleet


def decode_s(replica: Replica, middle: EngineReport, costs: CostSettings) -> float:
    """What an answer of usual length takes on a replica, by its learned decode rate, weighted; 0.0 before any."""
    rate = replica.report.decode_tokens_per_s or middle.decode_tokens_per_s
    return costs.decode_share * middle.output_tokens / rate if rate else 0.0


def zone_s(replica: Replica, costs: CostSettings) -> float:
    """What is added for a replica that is known to be in another zone than the router."""
    return costs.other_zone_s if replica.is_far else 0.0


def opening_s(slots_used: int, max_loras: int, costs: CostSettings) -> float:
    """What one adapter more on a replica costs whoever needs a slot next."""
    return costs.slot_s * (slots_used / max_loras) ** costs.slot_power if slots_used and max_loras else 0.0


def context(prompt_tokens: int, cached_tokens: int) -> float:
    """How many tokens the average computed token of this prompt attends to."""
    return cached_tokens + (prompt_tokens - cached_tokens) / 2


def move_s(replica: Replica, engine_name: str, middle: EngineReport, costs: CostSettings) -> float:
    """Seconds until an adapter that a replica reports is in a device slot, if one is free."""
    location = replica.residents[engine_name].location
    if location == "device":
        return 0.0
    if location == "host":
        return costs.host_to_device_s
    return replica.report.load_s or middle.load_s or costs.load_s
