"""Circuit breakers: replicas that get no requests for a while, because requests there failed.

A circuit belongs to an incarnation: a restarted engine begins with a closed one. It opens on failures in a row, on a
failure rate that is an outlier among the replicas of its base model, and on silence. It stays open for a time that
doubles with each opening in a row, then is half-open: one trial request at a time. The first success closes it.

Where an engine answers with errors, the requests may be at fault: its circuit opens only if a health probe fails, too.

Pure: time and chance are arguments.
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

# Requests wait there, and no data has come for longer than its work explains: open at once, for all of it would wait.
SILENT = "silent"
# Its agent reports that the engine hangs: it gave no token. Open at once, and for as long as the agent reports it.
HUNG = "hung"
# Failures that count for a circuit: those of attempts that blame the replica, and any other 5xx (`engine_error`) but
# 501, which vLLM says to requests that its model is not made for. A 4xx is the client's, and an adapter that an engine
# no longer knows is a stale report: counting such answers would shut out a whole fleet.
COUNTED = reasons_blaming("replica") | {"engine_error", HUNG, SILENT}
# Of these, what an engine says that is up. vLLM 0.32 says 500 to requests that are wrong, such as with
# `"structured_outputs": true`, and within milliseconds: they come in a row between answers that take seconds, and one
# client's would shut out an engine after the other for everybody (seen).
ANSWERED = frozenset({"engine_error", "first_event_error"})
_NONE: Excluded = frozenset()


def is_fault(status: int) -> bool:
    """Whether an answer's status speaks against the engine: see COUNTED."""
    return status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED


class TrialRequest(Protocol):
    """A request that was sent to find out whether a replica works; `ended` when it is over, well or badly."""

    ended: bool


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When circuits open, and for how long. The numbers are guesses, in the range of other proxies' defaults.

    failures        failures in a row that open a circuit
    outlier_share   failed share of the last `window_s` that opens a circuit, given `least_requests` requests, and twice
                    the median of the other replicas
    eject_share     share of a base model's replicas that the outlier rule may exclude
    open_s          doubles with each opening in a row, up to `most_open_s`
    jitter          share of that time that chance may add, so that routers do not try again in step
    silent_s        silence beyond the predicted work that opens a circuit; see `SILENT`
    trial_s         a trial that has not ended by then is given up: another request may try
    look_s          least time between two health probes of an engine that answers with errors
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
        """Raise ValueError for a number out of its range."""
        if self.failures < 1 or self.least_requests < 1:
            raise ValueError("failures and least_requests must be at least 1")
        if not 0 < self.open_s <= self.most_open_s:
            raise ValueError(f"0 < open_s <= most_open_s must hold, found {self.open_s:g} and {self.most_open_s:g}")
        if not 0 <= self.eject_share <= 1:
            raise ValueError(f"eject_share must be between 0 and 1, found {self.eject_share:g}")


@dataclass(slots=True)
class _Circuit:
    """One incarnation's circuit.

    good, bad     successes and failures since `counted_from`
    in_a_row      failures since the last success
    openings      openings in a row
    doubt         why it was last probed
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
    probed_at: float = -inf
    doubt: str = ""
    last_success_at: float = -inf

    def requests_counted(self, now: float, window_s: float) -> int:
        """Requests in the window. Halves or drops older counts first, so that no timestamps need be kept."""
        if now - self.counted_from > window_s:
            is_old = now - self.counted_from > 2 * window_s
            self.good, self.bad = (0, 0) if is_old else (self.good // 2, self.bad // 2)
            self.counted_from = now
        return self.good + self.bad

    @property
    def bad_share(self) -> float:
        """Failed share of the counted requests, of which there must be one."""
        return self.bad / (self.good + self.bad)


@dataclass(slots=True)
class CircuitBreaker:
    """The circuits of every replica where something failed.

    on_change         called with (replica, new state, reason) at every opening and closing
    probe             sends a health probe to a replica, whose result goes to `record_probe`; None: errors alone decide
    ignored_circuits  requests sent to a replica with an open circuit, because every able replica's circuit was open
    circuits          one for each incarnation that failed lately
    """

    rules: BreakerRules = field(default_factory=BreakerRules)
    on_change: Callable[[Replica, CircuitState, str], None] = lambda _replica, _state, _why: None
    probe: Callable[[Replica], None] | None = None
    ignored_circuits: int = 0
    circuits: dict[Incarnation, _Circuit] = field(default_factory=dict)
    _shut: dict[Incarnation, _Circuit] = field(default_factory=dict)

    def __len__(self) -> int:
        """Circuits kept: one for each incarnation that failed lately."""
        return len(self.circuits)

    def open_incarnations(self, now: float) -> Excluded:
        """Incarnations to which no request should be sent now: open, or half-open with a trial in flight."""
        if not self._shut:
            return _NONE
        return frozenset(
            [incarnation for incarnation, circuit in self._shut.items() if not self._may_try(circuit, now)]
        )

    def state(self, replica: Replica, now: float) -> CircuitState:
        """A replica's circuit state: closed if never opened; half-open from the end of its time until an outcome."""
        circuit = self._shut.get(replica.incarnation)
        if circuit is None:
            return "closed"
        return "open" if now < circuit.open_until else "half_open"

    def record_dispatch(self, replica: Replica, trial: TrialRequest, now: float) -> None:
        """Record a request that is sent to a replica, as the trial of its half-open circuit, or despite an open one.

        A dispatch despite an open circuit is counted in `ignored_circuits`. Does nothing where the circuit is closed.
        """
        circuit = self._shut.get(replica.incarnation) if self._shut else None
        if circuit is None:
            return
        if self._may_try(circuit, now):
            circuit.trial, circuit.tried_at = trial, now
        else:
            self.ignored_circuits += 1

    def is_trial(self, replica: Replica, request: TrialRequest) -> bool:
        """Whether this request is the replica's trial, which has a shorter timeout than others."""
        circuit = self._shut.get(replica.incarnation) if self._shut else None
        return circuit is not None and circuit.trial is request

    def record_success(self, replica: Replica, now: float, sent_at: float = inf) -> None:
        """Record an answer with a status below 400. Closes a circuit that opened before `sent_at`, or for silence.

        Clears the failures in a row. Does nothing for an engine without recorded failures.
        """
        # Circuits begin with a first failure: without any, a request that works pays for this check alone.
        circuit = self.circuits.get(replica.incarnation) if self.circuits else None
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
        """Count a failed attempt. It may open the circuit or start a health probe; returns whether the circuit is open.

        reason   of a ReplicaUnreachable, or another reason in COUNTED
        fleet    all replicas of its base model; without them there are no outliers
        sent_at  when the request was sent: the failure of one sent before the circuit changed says nothing new
        """
        incarnation = replica.incarnation
        circuit = self.circuits.get(incarnation)
        if circuit is None:
            circuit = self.circuits[incarnation] = _Circuit(counted_from=now)
        if reason not in COUNTED or sent_at < circuit.changed_at or now < circuit.open_until:
            return circuit.is_shut
        circuit.requests_counted(now, self.rules.window_s)
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
            if now - circuit.probed_at > self.rules.look_s:
                circuit.probed_at, circuit.doubt = now, why
                self.probe(replica)
            return circuit.is_shut
        self._open(replica, circuit, why, now, rng)
        return True

    def record_probe(self, replica: Replica, now: float, rng: Random, *, is_well: bool) -> None:
        """Record a health probe's result. No effect on an engine without recorded failures.

        A failed probe opens the circuit unless it is open, and lets the next error be probed at once. A good one closes
        the circuit, or clears the failures of a closed one.
        """
        circuit = self.circuits.get(replica.incarnation)
        if circuit is None:
            return
        if not is_well:
            circuit.probed_at = -inf  # the next error may be probed at once
            if now >= circuit.open_until:
                self._open(replica, circuit, circuit.doubt, now, rng)
        elif circuit.is_shut:
            self._close(replica, circuit, now, "answered")
        else:
            circuit.bad = circuit.in_a_row = 0

    def record_not_hung(self, replica: Replica, now: float) -> None:
        """Record that the replica's agent reports no hang: closes a circuit that opened for one."""
        circuit = self._shut.get(replica.incarnation) if self._shut else None
        if circuit is not None and circuit.was_hung:
            self._close(replica, circuit, now, "trusted")

    def last_success_at(self, replica: Replica) -> float:
        """When the replica last answered a request; -inf: not since its first failure on record."""
        circuit = self.circuits.get(replica.incarnation)
        return -inf if circuit is None else circuit.last_success_at

    def open_until(self, replica: Replica) -> float:
        """When a replica's open circuit becomes half-open; -inf: the circuit is closed."""
        circuit = self.circuits.get(replica.incarnation)
        return -inf if circuit is None else circuit.open_until

    def changed_at(self, replica: Replica) -> float:
        """When a replica's circuit last opened or closed: requests sent before then say nothing about it now."""
        circuit = self.circuits.get(replica.incarnation)
        return -inf if circuit is None else circuit.changed_at

    def forget_others(self, replicas: Iterable[Replica], now: float) -> None:
        """Drop circuits of incarnations not among these, and circuits without recent failures.

        Calls `on_change` for the open circuit of an engine that has restarted.
        """
        if not self.circuits:
            return
        left = {replica.incarnation: replica for replica in replicas}
        well = {replica.id: replica for replica in left.values() if replica.incarnation not in self._shut}
        quiet_s = max(2 * self.rules.window_s, self.rules.most_open_s)
        for incarnation, circuit in list(self.circuits.items()):
            is_quiet = not circuit.is_shut and now - max(circuit.changed_at, circuit.failed_at) > quiet_s
            if incarnation not in left or is_quiet:
                del self.circuits[incarnation]
                if self._shut.pop(incarnation, None) is not None and incarnation[0] in well:
                    self.on_change(well[incarnation[0]], "closed", "restarted")

    def forget(self, worker: WorkerId) -> None:
        """Drop the circuits of a worker that is gone, without `on_change`."""
        for incarnation in [incarnation for incarnation in self.circuits if incarnation[0] == worker]:
            del self.circuits[incarnation]
            self._shut.pop(incarnation, None)

    def _is_outlier(self, circuit: _Circuit, fleet: Sequence[Replica], now: float) -> bool:
        """Whether a circuit's failed share is an outlier in its fleet, while few circuits are open. Fades counts."""
        rules = self.rules
        requests = circuit.requests_counted(now, rules.window_s)
        if requests < rules.least_requests or circuit.bad_share < rules.outlier_share:
            return False
        others, ejected = [], 1
        for replica in fleet:
            other = self.circuits.get(replica.incarnation)
            if other is None:
                others.append(0.0)
            elif other is not circuit:
                ejected += other.is_shut
                if other.requests_counted(now, rules.window_s) >= rules.least_requests:
                    others.append(other.bad_share)
        usual = median(others) if others else 0.0
        return circuit.bad_share >= 2 * usual and ejected <= rules.eject_share * len(fleet)

    def _open(self, replica: Replica, circuit: _Circuit, why: str, now: float, rng: Random) -> None:
        """Open a circuit, for longer at each opening in a row, and call `on_change`.

        Ends its trial. After a long closed time the openings are counted anew.
        """
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
        """Close a circuit, clear its counts and call `on_change`."""
        circuit.is_shut = False
        circuit.changed_at = now
        circuit.open_until = -inf
        circuit.good = circuit.bad = 0
        circuit.counted_from = now
        circuit.trial = None
        del self._shut[replica.incarnation]
        self.on_change(replica, "closed", why)

    def _may_try(self, circuit: _Circuit, now: float) -> bool:
        """Whether a trial request may be sent now: the circuit is half-open and no trial is in flight."""
        if now < circuit.open_until:
            return False
        return circuit.trial is None or circuit.trial.ended or now - circuit.tried_at > self.rules.trial_s
