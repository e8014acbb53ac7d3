"""Which replicas get no requests for a while, because what was sent there failed. Pure: time and chance are arguments.

A circuit belongs to an incarnation: a worker whose engine started again begins with a closed one. It opens on failures
in a row, on a share of failures that is an outlier among the replicas of its base model, and on silence; it stays open
for a time that doubles with each opening in a row, then lets one request after another try, and closes at the first
success. Where an engine has answered, with an error, the request may be what is wrong: then it opens only when the
engine fails a request of our own, too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from random import Random
from statistics import median
from typing import Literal, Protocol

from router.core.failover.verdict import reasons_blaming
from router.core.fleet import Excluded, Incarnation, Replica
from router.core.kv.index import WorkerId

CircuitState = Literal["closed", "open", "half_open"]

# Work is there and nothing has come back for longer than it can explain: open at once, for all of it would wait.
SILENT = "silent"
# Its agent says so, who has asked the engine for a token. Open at once, and for as long as that is said.
HUNG = "hung"
# Failures that count for a circuit: those of attempts that blame the replica, and any other 5xx (`engine_error`) but
# 501, which vLLM says to requests that its model is not made for. A 4xx is the client's, and an adapter that an engine
# no longer knows is a stale report: counting such answers would shut out a whole fleet.
COUNTED = reasons_blaming("replica") | {"engine_error", HUNG, SILENT}
# Of these, what an engine says that is up. vLLM 0.32 says 500 to requests that are wrong, such as with
# `"structured_outputs": true`, and within milliseconds: they come in a row between answers that take seconds, and one
# client's would shut out an engine after the other for everybody (seen).
ANSWERED = frozenset({"engine_error", "first_event_error"})
_NOBODY: Excluded = frozenset()


def is_fault(status: int) -> bool:
    """Whether an answer's status speaks against the engine: see COUNTED."""
    return status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED


class TrialRequest(Protocol):
    """A request that was sent to find out; `ended` however it ended."""

    ended: bool


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When circuits open, and for how long. The numbers are guesses, in the range of what other proxies default to.

    failures        in a row
    outlier_share   of the requests of the last `window_s` that failed, if there were `least_requests` of them, and if
                    it is twice as much as at the median of the others
    eject_share     of a base model's replicas: how many the outlier rule may shut out at most
    open_s          doubles with each opening that follows another one, up to `most_open_s`
    jitter          share of that time that chance may add, so that routers do not try again in step
    silent_s        see `SILENT`; beyond the time that what was sent there should take
    trial_s         one that has not ended by then is not waited for: another request may try
    look_s          how often at most an engine that answers with errors is looked at: so long it is taken for well
    """

    failures: int = 5
    window_s: float = 30.0
    least_requests: int = 20
    outlier_share: float = 0.3
    eject_share: float = 0.5
    open_s: float = 2.0
    most_open_s: float = 60.0
    jitter: float = 0.5
    silent_s: float = 20.0
    trial_s: float = 30.0
    look_s: float = 5.0

    def __post_init__(self) -> None:
        if self.failures < 1 or self.least_requests < 1:
            raise ValueError("failures and least_requests must be at least 1")
        if not 0 < self.open_s <= self.most_open_s:
            raise ValueError(f"0 < open_s <= most_open_s must hold, found {self.open_s:g} and {self.most_open_s:g}")
        if not 0 <= self.eject_share <= 1:
            raise ValueError(f"eject_share must be between 0 and 1, found {self.eject_share:g}")


@dataclass(slots=True)
class _Circuit:
    """`good` and `bad` are counted from `counted_from` on; `in_a_row` failures, `openings` in a row. It was last looked
    at because of `doubt`, and last served a request at `last_success_at`.
    """

    good: int = 0
    bad: int = 0
    counted_from: float = -inf
    in_a_row: int = 0
    failed_at: float = -inf
    openings: int = 0
    changed_at: float = -inf
    open_until: float = -inf
    is_shut: bool = False
    was_silent: bool = False
    was_hung: bool = False
    trial: TrialRequest | None = None
    tried_at: float = -inf
    looked_at: float = -inf
    doubt: str = ""
    last_success_at: float = -inf

    def counted(self, now: float, window_s: float) -> int:
        """Requests in the window; older ones are forgotten by halves, so that none is needed a request."""
        if now - self.counted_from > window_s:
            is_old = now - self.counted_from > 2 * window_s
            self.good, self.bad = (0, 0) if is_old else (self.good // 2, self.bad // 2)
            self.counted_from = now
        return self.good + self.bad

    @property
    def bad_share(self) -> float:
        """Of those that are counted, one or more."""
        return self.bad / (self.good + self.bad)


@dataclass(slots=True)
class CircuitBreaker:
    """The circuits of every replica where something failed.

    on_change         called with (replica, new state, reason) at every opening and closing
    probe             sends a health probe to a replica, whose result goes to `record_probe`; None: errors alone decide
    ignored_circuits  requests sent to a replica with an open circuit, because every able replica's circuit was open
    """

    rules: BreakerRules = field(default_factory=BreakerRules)
    on_change: Callable[[Replica, CircuitState, str], None] = lambda _replica, _state, _why: None
    probe: Callable[[Replica], None] | None = None
    ignored_circuits: int = 0
    _circuits: dict[Incarnation, _Circuit] = field(default_factory=dict)
    _shut: dict[Incarnation, _Circuit] = field(default_factory=dict)

    def open_incarnations(self, now: float) -> Excluded:
        """Whom no request should be sent to now: open, or half-open with its trial under way."""
        if not self._shut:
            return _NOBODY
        return frozenset([who for who, circuit in self._shut.items() if not self._may_try(circuit, now)])

    def state(self, replica: Replica, now: float) -> CircuitState:
        """Open until its time is over, then half-open until a success or a failure."""
        circuit = self._shut.get(replica.incarnation)
        if circuit is None:
            return "closed"
        return "open" if now < circuit.open_until else "half_open"

    def record_dispatch(self, replica: Replica, trial: TrialRequest, now: float) -> None:
        """A request goes to it; where a circuit is half-open it is the trial."""
        circuit = self._shut.get(replica.incarnation) if self._shut else None
        if circuit is None:
            return
        if self._may_try(circuit, now):
            circuit.trial, circuit.tried_at = trial, now
        else:
            self.ignored_circuits += 1

    def is_trial(self, replica: Replica, request: TrialRequest) -> bool:
        """Whether this request was sent there to find out; it should not be waited for as long as any other."""
        circuit = self._shut.get(replica.incarnation) if self._shut else None
        return circuit is not None and circuit.trial is request

    def record_success(self, replica: Replica, now: float, sent_at: float = inf) -> None:
        """It answered, below 400. One answer closes a circuit, if it was asked after that opened or silence was why."""
        # Circuits begin with a first failure: where there are none a request that works pays for this look alone.
        circuit = self._circuits.get(replica.incarnation) if self._circuits else None
        if circuit is None:
            return
        circuit.good += 1
        circuit.in_a_row = 0
        circuit.last_success_at = now
        if circuit.is_shut and (circuit.was_silent or sent_at >= circuit.changed_at):
            self._close(replica, circuit, now, "answered")

    def record_failure(
        self,
        replica: Replica,
        reason: str,
        now: float,
        rng: Random,
        *,
        fleet: Sequence[Replica] = (),
        sent_at: float = inf,
    ) -> bool:
        """Whether its circuit is open now, having taken this failure into account.

        fleet    all replicas of its base model; without them nobody is an outlier
        sent_at  when the request was sent: one that was sent before the circuit changed says nothing new
        """
        who = replica.incarnation
        circuit = self._circuits.get(who)
        if circuit is None:
            circuit = self._circuits[who] = _Circuit(counted_from=now)
        if reason not in COUNTED or sent_at < circuit.changed_at or now < circuit.open_until:
            return circuit.is_shut
        circuit.counted(now, self.rules.window_s)
        circuit.bad += 1
        circuit.failed_at = now
        circuit.in_a_row += 1
        is_outlier = False
        if not (circuit.is_shut or reason in {SILENT, HUNG} or circuit.in_a_row >= self.rules.failures):
            is_outlier = self._is_outlier(circuit, fleet, now)
            if not is_outlier:
                return False
        why = "outlier" if is_outlier else reason
        if reason in ANSWERED and self.probe is not None:
            if now - circuit.looked_at > self.rules.look_s:
                circuit.looked_at, circuit.doubt = now, why
                self.probe(replica)
            return circuit.is_shut
        self._open(replica, circuit, why, now, rng)
        return True

    def record_probe(self, replica: Replica, now: float, rng: Random, *, is_well: bool) -> None:
        """It was asked for something of our own, and gave it or failed."""
        circuit = self._circuits.get(replica.incarnation)
        if circuit is None:
            return
        if not is_well:
            circuit.looked_at = -inf  # the next error is a new one
            if now >= circuit.open_until:
                self._open(replica, circuit, circuit.doubt, now, rng)
        elif circuit.is_shut:
            self._close(replica, circuit, now, "answered")
        else:
            circuit.bad = circuit.in_a_row = 0

    def record_not_hung(self, replica: Replica, now: float) -> None:
        """Its agent does not say that it hangs."""
        circuit = self._shut.get(replica.incarnation) if self._shut else None
        if circuit is not None and circuit.was_hung:
            self._close(replica, circuit, now, "trusted")

    def last_success_at(self, replica: Replica) -> float:
        """When it last answered a request since it first failed one; -inf: not since then."""
        circuit = self._circuits.get(replica.incarnation)
        return -inf if circuit is None else circuit.last_success_at

    def changed_at(self, replica: Replica) -> float:
        """When its circuit last opened or closed; what was sent before that says nothing of how it is now."""
        circuit = self._circuits.get(replica.incarnation)
        return -inf if circuit is None else circuit.changed_at

    def forget_others(self, replicas: Iterable[Replica], now: float) -> None:
        """These are all there are: circuits of other incarnations are forgotten, and those without failures of late."""
        if not self._circuits:
            return
        left = {replica.incarnation: replica for replica in replicas}
        well = {replica.id: replica for replica in left.values() if replica.incarnation not in self._shut}
        quiet_s = max(2 * self.rules.window_s, self.rules.most_open_s)
        for who, circuit in list(self._circuits.items()):
            is_quiet = not circuit.is_shut and now - max(circuit.changed_at, circuit.failed_at) > quiet_s
            if who not in left or is_quiet:
                del self._circuits[who]
                if self._shut.pop(who, None) is not None and who[0] in well:
                    self.on_change(well[who[0]], "closed", "restarted")

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker that is gone."""
        for who in [who for who in self._circuits if who[0] == worker]:
            del self._circuits[who]
            self._shut.pop(who, None)

    def _is_outlier(self, circuit: _Circuit, fleet: Sequence[Replica], now: float) -> bool:
        rules = self.rules
        if circuit.counted(now, rules.window_s) < rules.least_requests or circuit.bad_share < rules.outlier_share:
            return False
        others, ejected = [], 1
        for replica in fleet:
            other = self._circuits.get(replica.incarnation)
            if other is None:
                others.append(0.0)
            elif other is not circuit:
                ejected += other.is_shut
                if other.counted(now, rules.window_s) >= rules.least_requests:
                    others.append(other.bad_share)
        usual = median(others) if others else 0.0
        return circuit.bad_share >= 2 * usual and ejected <= rules.eject_share * len(fleet)

    def _open(self, replica: Replica, circuit: _Circuit, why: str, now: float, rng: Random) -> None:
        rules = self.rules
        if not circuit.is_shut and now - circuit.changed_at > rules.most_open_s:
            circuit.openings = 0
        for_s = min(rules.most_open_s, rules.open_s * 2.0 ** min(circuit.openings, 30))
        circuit.openings += 1
        circuit.open_until = now + for_s * (1 + rules.jitter * rng.random())
        circuit.changed_at = now
        circuit.is_shut = True
        circuit.was_hung = why == HUNG
        circuit.was_silent = why == SILENT or circuit.was_hung
        circuit.trial = None
        self._shut[replica.incarnation] = circuit
        self.on_change(replica, "open", why)

    def _close(self, replica: Replica, circuit: _Circuit, now: float, why: str) -> None:
        circuit.is_shut = False
        circuit.changed_at = now
        circuit.open_until = -inf
        circuit.good = circuit.bad = 0
        circuit.counted_from = now
        circuit.trial = None
        del self._shut[replica.incarnation]
        self.on_change(replica, "closed", why)

    def _may_try(self, circuit: _Circuit, now: float) -> bool:
        if now < circuit.open_until:
            return False
        return circuit.trial is None or circuit.trial.ended or now - circuit.tried_at > self.rules.trial_s
