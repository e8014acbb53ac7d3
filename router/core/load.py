"""What this router has in flight, and the wait and utilisation that follow from it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp

from router.core.fleet import Report
from router.core.index import WorkerId

# Seconds over which admitted work counts towards utilisation (rho).
_HORIZON_S = 30.0
# Until a request has ended here: a guess, nothing measured.
_FIRST_REQUEST_S = 2.0
_SMOOTHING = 0.1


@dataclass(slots=True, eq=False)
class InFlight:
    """One request at one replica, from dispatch to end."""

    worker: WorkerId
    engine_name: str
    prefill_s: float
    began_at: float
    in_prefill: bool = True
    ended: bool = False


@dataclass(slots=True)
class _Book:
    flights: set[InFlight] = field(default_factory=set)
    prefill_s: float = 0.0
    in_prefill: int = 0
    engine_names: dict[str, int] = field(default_factory=dict)
    request_s: float = _FIRST_REQUEST_S
    prefill_each_s: float = 0.0
    in_prefill_at_report: int = 0
    in_flight_at_report: int = 0
    report_at: float = -1.0


@dataclass(frozen=True, slots=True)
class Own:
    """This router's own share of a replica's load, frozen. Seconds and counts."""

    prefill_s: float = 0.0
    in_flight: int = 0
    engine_names: frozenset[str] = frozenset()
    request_s: float = _FIRST_REQUEST_S
    others_queue_s: float = 0.0
    others_in_flight: int = 0


class LoadBook:
    """Counts requests in prefill and in decode apart, and forgets each exactly once, however it ends."""

    def __init__(self) -> None:
        self._books: dict[WorkerId, _Book] = {}
        self._admitted: dict[str, tuple[float, float]] = {}

    def begin(self, worker: WorkerId, engine_name: str, prefill_s: float, now: float) -> InFlight:
        """Note a request that is about to be sent; its first-token work is `prefill_s` seconds."""
        flight = InFlight(worker, engine_name, prefill_s, now)
        book = self._books.setdefault(worker, _Book())
        book.flights.add(flight)
        book.prefill_s += prefill_s
        book.in_prefill += 1
        book.engine_names[engine_name] = book.engine_names.get(engine_name, 0) + 1
        book.prefill_each_s += _SMOOTHING * (prefill_s - book.prefill_each_s)
        return flight

    def first_token(self, flight: InFlight) -> None:
        """Its prefill is over; repeats change nothing."""
        if flight.in_prefill and not flight.ended:
            flight.in_prefill = False
            self._leave_prefill(flight)

    def end(self, flight: InFlight, now: float) -> None:
        """It is over, well or badly; repeats change nothing."""
        if flight.ended:
            return
        book = self._books.get(flight.worker)
        if flight.in_prefill:
            self._leave_prefill(flight)
        flight.ended = True
        if book is None or flight not in book.flights:
            return
        book.flights.discard(flight)
        left = book.engine_names[flight.engine_name] - 1
        if left:
            book.engine_names[flight.engine_name] = left
        else:
            del book.engine_names[flight.engine_name]
        book.request_s += _SMOOTHING * (now - flight.began_at - book.request_s)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker that is gone; its requests may still `end`, which then changes nothing."""
        self._books.pop(worker, None)

    def reported(self, worker: WorkerId, report: Report) -> None:
        """Note what of the engine's own counts was ours, at the moment they were read."""
        book = self._books.setdefault(worker, _Book())
        if report.at != book.report_at:
            book.report_at = report.at
            book.in_prefill_at_report = book.in_prefill
            book.in_flight_at_report = len(book.flights)

    def own(self, worker: WorkerId, report: Report) -> Own:
        """Our share of a replica's load, and what the engine reported beyond it when it last did."""
        book = self._books.get(worker)
        if book is None:
            return Own(others_in_flight=report.running + report.waiting)
        others_waiting = max(0, report.waiting - book.in_prefill_at_report)
        return Own(
            prefill_s=book.prefill_s,
            in_flight=len(book.flights),
            engine_names=frozenset(book.engine_names),
            request_s=book.request_s,
            others_queue_s=others_waiting * book.prefill_each_s,
            others_in_flight=max(0, report.running + report.waiting - book.in_flight_at_report),
        )

    def in_flight(self) -> Iterable[tuple[WorkerId, str, int]]:
        """(worker, engine name, requests in flight) of everything that is in flight."""
        for worker, book in self._books.items():
            for engine_name, count in book.engine_names.items():
                yield worker, engine_name, count

    def admit(self, base_model: str, seconds: float, now: float) -> None:
        """Add prefill and load seconds to the base model's admitted work."""
        total, at = self._admitted.get(base_model, (0.0, now))
        self._admitted[base_model] = (total * exp((at - now) / _HORIZON_S) + seconds, now)

    def utilisation(self, base_model: str, replicas: int, now: float) -> float:
        """rho: admitted seconds per replica-second, exponentially weighted over 30 s, fleet-wide."""
        total, at = self._admitted.get(base_model, (0.0, now))
        return total * exp((at - now) / _HORIZON_S) / (_HORIZON_S * max(1, replicas))

    def _leave_prefill(self, flight: InFlight) -> None:
        book = self._books.get(flight.worker)
        if book is not None and flight in book.flights:
            book.in_prefill -= 1
            # Clamped: a thousand float additions and subtractions need not end at zero.
            book.prefill_s = max(0.0, book.prefill_s - flight.prefill_s) if book.in_prefill else 0.0
