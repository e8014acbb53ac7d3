"""The numbers of the cost model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostSettings:
    """The numbers of the cost model (cost.py), each a setting of the router. Those without a source are guesses."""

    # Before any replica has reported a rate: an 8B model on one 80 GB GPU does about this.
    prefill_tokens_per_s: float = 10_000.0
    # Context at which attention costs as much as everything else: a Llama 8B spends 16 GFLOP on a token and 0.52 MFLOP
    # on each token before it (4 x 32 layers x 4,096).
    attention_tokens: float = 30_000.0
    # Share of a cached block's prefill that is saved where the engine must first fetch the block from another medium.
    host_credit: float = 0.9
    storage_credit: float = 0.5
    # An adapter in host memory moves to a device slot: rank 64 of an 8B model is 336 MB over PCIe.
    host_to_device_s: float = 0.02
    # An adapter that the engine must read again, until one load has been measured.
    load_s: float = 1.0
    # Weight of a second of decoding that others lose against a second before the first token: by a prefill or a load,
    # and by one more sequence in each step of an answer. `benchmarks.trace --scenes`: 0.1 to 0.3 do alike, with 0.1 the
    # first tokens are soonest; without the latter part a crowd for one adapter stays on few replicas.
    decode_harm: float = 0.1
    # Weight of a second of decoding against a second before the first token. Above 0 the faster replicas draw work, and
    # their caches turn over: 0.05 lowers hits by 0.01 to 0.02 in `benchmarks.trace`, replicas 20 % apart, and brings
    # first tokens no sooner. For fleets of mixed GPUs.
    decode_share: float = 0.0
    # Cost of a replica in another zone: a millisecond or two more, and traffic that clouds charge for. In seconds, so
    # that requests leave the zone only where that gains more.
    other_zone_s: float = 0.05
    # Later cost of a second of work, for each e-fold by which the replica's cache is displaced faster than that of the
    # least loaded: the work displaces blocks, and an adapter draws its traffic there. This and the next five:
    # `benchmarks.trace`, loads 1 and 2, 750 and 2,000 blocks; about 60 settings, flat around these.
    crowding: float = 1.2
    # Weight of a second that is expected to be computed again, because this work pushes it out of the cache, beside a
    # second of work. With 1 programs of agents whose caches are too small end 3 % sooner in `benchmarks.trace`, and
    # first tokens of the conversation trace come 1 % later: so it is shown, and counts where it is set.
    eviction: float = 0.0
    # Cost of the last free adapter slot to the next adapter that needs one, and how steeply that falls with more free.
    slot_s: float = 2.0
    slot_power: float = 4.0
    # 1: work in an idle fleet costs the time that it takes. Above, an idle fleet queues to save prefill: 4 gives 0.47 s
    # in place of 0.48 at light load, and is worse in all other scenes of `benchmarks.trace`.
    kappa_min: float = 1.0
    kappa_max: float = 16.0
    # Within this share of the best cost (or this many seconds) the choice is random, so that routers do not herd.
    tie_share: float = 0.03
    tie_s: float = 0.0005
    # Above 0: every replica gets a chance, weighted by exp(-cost / temperature).
    temperature_s: float = 0.0
    # Weight of a replica's own measured rate; the rest is the fleet's median.
    own_rate_share: float = 0.8

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of its range."""
        for name in ("prefill_tokens_per_s", "attention_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, found {getattr(self, name):g}")
        if not 1 <= self.kappa_min <= self.kappa_max:
            raise ValueError(f"1 <= kappa_min <= kappa_max must hold, found {self.kappa_min:g} and {self.kappa_max:g}")
        for name in ("host_credit", "storage_credit", "own_rate_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, found {getattr(self, name):g}")

    def tie_limit_s(self, best_s: float) -> float:
        """The highest cost that ties with the best one."""
        return best_s * (1 + self.tie_share) + self.tie_s
