"""What this router has in flight, and the waits and the utilisation that follow from it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, inf, log

import msgspec

from router.core.fleet import Replica
from router.core.kv.index import WorkerId
from router.core.schedule.cost import context
from router.core.schedule.load_snapshot import (
    FIRST_REQUEST_S,
    PLACED_S,
    FleetLoad,
    LoadTable,
    LoadVector,
    ReplicaLoad,
)

# Seconds over which admitted work counts towards utilisation (rho).
_HORIZON_S = 30.0
# Until a request has ended here, and one has begun: guesses, nothing measured.
_FIRST_PREFILL_S = 0.2
_FIRST_CONTEXT_TOKENS = 1000.0
# No fleet is expected to have more routers than that.
_LEAST_SHARE = 1 / 16
_SMOOTHING = 0.1
# The KV cache of an engine that does not tell its size: a guess that all such engines share.
_KV_TOKENS = 200_000
# Moments remembered per worker, so that a report read some seconds ago is held against what we had there then. Changes
# within one count as one: however many requests come, five seconds of them are remembered.
_REMEMBERED = 512
_MOMENT_S = 0.01


# An engine lets a request of an adapter that runs pass by one that waits for its adapter's slot (vLLM 0.32
# v1/core/sched/scheduler.py: skipped for max_loras), so that an adapter asked for without a pause never gives its slot
# up. Who has waited there for the first is given way: for the second, from each report on, nothing is sent that takes a
# slot. It is more than is ever queued at an engine (`late_binding_s`), and ends by itself where reports do.
_PASSED_OVER_S = 10.0
_GIVEN_WAY_S = 5.0


# A prefill that took less than this share of what was predicted says that predictions are wrong, not that there was
# luck; of predictions that are short nothing depends. One after another brings trust back by this share.
_CONTRADICTED_SHARE = 0.5
_LEAST_EXPECTED_S = 0.1
_LEAST_PACE = 0.001
_PACE_RETURN = 0.25


class LoadEntry(msgspec.Struct, eq=False):
    """One request at one replica, from dispatch to end. `book`: what it counts in, its worker forgotten or not.

    sequences    as the engine counts: `n` answers to each of its prompts
    is_streamed  so that it shows its first token; any other is silent until its whole answer is there, however long,
                 and leaves prefill when a report shows that it runs
    is_answered  its first token, or its whole answer, has come
    expected_s   from dispatch to the end of its prefill, as predicted then
    """

    worker: WorkerId
    engine_name: str
    prefill_s: float
    uncached_tokens: int
    prompt_tokens: int
    began_at: float
    work: "_ModelBook"
    book: "_ReplicaBook"
    sequences: int = 1
    in_prefill: bool = True
    is_unreported: bool = True
    is_streamed: bool = True
    is_answered: bool = False
    ended: bool = False
    expected_s: float = 0.0


@dataclass(slots=True)
class _RosterBooks:
    """The books of one roster's replicas, in its order, and the loads they came to when last read.

    stale   positions whose load has changed since
    """

    replicas: tuple[Replica, ...]
    books: "list[_ReplicaBook]"
    table: LoadTable
    stale: set[int]

    def is_of(self, replicas: tuple[Replica, ...]) -> bool:
        """Whether these are the same workers in the same order, and all of their books still report here."""
        is_same = [replica.id for replica in replicas] == [replica.id for replica in self.replicas]
        return is_same and all(book.stale is self.stale for book in self.books)


@dataclass(slots=True)
class _ReplicaBook:
    """Of one worker. Sums are kept as requests come and go: a decision must not cost more the more are in flight.

    prefill_s, largest_s  of those in prefill: seconds of work together, and of the largest; `as_large`: how many are it
    unreported_tokens     uncached tokens of those that the engine's report does not know of, or that are in prefill
    names                 how many requests run each; `engine_names`, `slots_used` and `fresh` as in Own, the first
                          None: it and the second are to be made anew
    passed_over           the oldest that waits for an adapter slot for too long, as of the last report
    reported_at           when the engine's own counts were read; `moved_at`: when they had last moved
    base_model            what its worker serves
    boot_id               of its engine: another one has nothing of what was sent to the one before
    sequences, prefill_sequences   of all in flight, and of those in prefill
    history               (until when, in prefill, in flight): sequences of ours, since the one before; `noted_at`: the
                          last
    pace                  the share of the predicted seconds that prefills took of late; 1.0 where predictions hold
    stale, position       where to say that what was felt of it is no longer so
    max_loras, max_seqs, kv_tokens, kv_tokens_used, reported_request_s   what it and its engine say of themselves
    """

    base_model: str
    boot_id: str = ""
    flights: set[LoadEntry] = field(default_factory=set)
    in_prefill: dict[LoadEntry, None] = field(default_factory=dict)
    prefill_s: float = 0.0
    largest_s: float = 0.0
    as_large: int = 0
    unreported_tokens: int = 0
    sequences: int = 0
    prefill_sequences: int = 0
    names: dict[str, int] = field(default_factory=dict)
    engine_names: frozenset[str] | None = None
    slots_used: int = 0
    fresh: frozenset[str] = frozenset()
    passed_over: LoadEntry | None = None
    busy_until: float = -inf
    freed_tokens: int = 0
    placed_tokens: float = 0.0
    placed_at: float = 0.0
    ended: int = 0
    mean_request_s: float = 0.0
    heard_at: float = -inf
    dispatched_at: dict[str, float] = field(default_factory=dict)
    history: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    noted_at: float = -inf
    max_loras: int = 0
    max_seqs: float = inf
    kv_tokens: int = 0
    kv_tokens_used: float = 0.0
    reported_request_s: float = FIRST_REQUEST_S
    reported_at: float = -inf
    moved_at: float = inf
    others_until: float = -inf
    others_in_flight: int = 0
    prefill_pace: float = 1.0
    stale: set[int] = field(default_factory=set)
    position: int = 0

    def changes(self, now: float) -> None:
        """What is ours there will be otherwise from now on."""
        self.stale.add(self.position)
        if now - self.noted_at >= _MOMENT_S:
            self.noted_at = now
            self.history.append((now, self.prefill_sequences, self.sequences))

    def add(self, flight: LoadEntry) -> None:
        """One more, in prefill."""
        now, prefill_s, name, names = flight.began_at, flight.prefill_s, flight.engine_name, self.names
        sequences = flight.sequences
        self.changes(now)
        self.flights.add(flight)
        self.in_prefill[flight] = None
        self.sequences += sequences
        self.prefill_sequences += sequences
        self.busy_until = max(self.busy_until, now) + prefill_s
        flight.expected_s = self.busy_until - now
        self.prefill_s += prefill_s
        if prefill_s > self.largest_s:
            self.largest_s, self.as_large = prefill_s, 1
        elif prefill_s == self.largest_s:
            self.as_large += 1
        self.unreported_tokens += flight.uncached_tokens
        if name in names:
            names[name] += 1
        else:
            names[name] = 1
            self.engine_names = None
        self.dispatched_at[name] = now
        if name not in self.fresh and now > self.reported_at:
            self.fresh |= {name}
        self.placed_tokens = self.placed_tokens * exp((self.placed_at - now) / PLACED_S) + flight.uncached_tokens
        self.placed_at = now

    def correct(self, flight: LoadEntry, now: float) -> None:
        """Its prefill is over, or its whole answer there: a prediction that was far too long is corrected at once."""
        expected_s = flight.expected_s
        if expected_s < _LEAST_EXPECTED_S:
            return
        share = (now - flight.began_at) / expected_s
        share = 1.0 if share > _CONTRADICTED_SHARE else max(_LEAST_PACE, share)
        if share < self.prefill_pace:
            self.prefill_pace = share
        elif flight.is_streamed:
            self.prefill_pace += _PACE_RETURN * (share - self.prefill_pace)

    def leave_prefill(self, flight: LoadEntry, now: float) -> None:
        """Its prefill is over, or it is."""
        flight.in_prefill = False
        left = self.in_prefill
        del left[flight]
        self.prefill_sequences -= flight.sequences
        if not left:
            self.prefill_s = self.largest_s = 0.0
            self.as_large = 0
            self.busy_until = -inf
        else:
            # Summed anew when it may have been rounded.
            self.prefill_s = self.prefill_s - flight.prefill_s if len(left) > 1 else sum([f.prefill_s for f in left])
            if flight.prefill_s == self.largest_s:
                self.as_large -= 1
                if not self.as_large:
                    seconds = [f.prefill_s for f in left]
                    self.largest_s = max(seconds)
                    self.as_large = seconds.count(self.largest_s)
            # What is left begins now: however wrong the predictions were, the error does not outlive them.
            self.busy_until = now + self.prefill_s
        if flight.began_at <= self.reported_at:
            self._is_known(flight)

    def remove(self, flight: LoadEntry) -> None:
        """It is over, and out of prefill."""
        self.flights.discard(flight)
        self.sequences -= flight.sequences
        if flight.is_unreported:
            self.unreported_tokens -= flight.uncached_tokens
        if flight.began_at <= self.reported_at:
            self.freed_tokens += flight.uncached_tokens
        name, names = flight.engine_name, self.names
        left = names[name] - 1
        if left:
            names[name] = left
        else:
            del names[name]
            self.engine_names = None

    def apply_report(self, at: float, waiting: int) -> int:
        """There are new counts of the engine's; returns how many sequences in prefill they show to run.

        waiting  sequences that it has not begun: of ours at most the newest
        """
        self.reported_at = at
        self.freed_tokens = 0
        running = self._running(at, waiting)
        for flight in running:
            self.leave_prefill(flight, at)
        waits = self._slotless()
        self.passed_over = waits[0] if waits and waits[0].began_at <= at - _PASSED_OVER_S else None
        for flight in self.flights:
            if not flight.in_prefill and flight.began_at <= at:
                self._is_known(flight)
        self.dispatched_at = {n: when for n, when in self.dispatched_at.items() if n in self.names or when > at}
        self.fresh = frozenset([name for name, when in self.dispatched_at.items() if when > at])
        return sum([flight.sequences for flight in running])

    def _running(self, at: float, waiting: int) -> list[LoadEntry]:
        """Those that will show nothing before their whole answer, but were prefilled by then: the engine had begun
        them, and the time that it takes had passed.
        """
        slotless = set(self._slotless())
        waiting = max(0, waiting - sum([flight.sequences for flight in slotless]))
        there = [flight for flight in self.in_prefill if flight.began_at <= at and flight not in slotless]
        begun = sum([flight.sequences for flight in there]) - waiting
        running, until = [], -inf
        for flight in there:
            begun -= flight.sequences
            until = max(until, flight.began_at) + flight.prefill_s
            if begun < 0 or until > at:
                break
            if not flight.is_streamed:
                running.append(flight)
        return running

    def _slotless(self) -> list[LoadEntry]:
        """Those that cannot have begun, the oldest first: requests of other adapters have all slots."""
        if not 0 < self.max_loras < len(self.names) - ("" in self.names):
            return []
        running = {flight.engine_name for flight in self.flights if not flight.in_prefill} - {""}
        if len(running) < self.max_loras:
            return []
        return [flight for flight in self.in_prefill if flight.engine_name and flight.engine_name not in running]

    def _is_known(self, flight: LoadEntry) -> None:
        if flight.is_unreported:
            flight.is_unreported = False
            self.unreported_tokens -= flight.uncached_tokens

    def had(self, at: float) -> tuple[int, int]:
        """Sequences in prefill and in flight at that time; as far back as is remembered."""
        had = self.prefill_sequences, self.sequences
        for until, in_prefill, in_flight in reversed(self.history):
            if until <= at:
                break
            had = in_prefill, in_flight
        return had


@dataclass(slots=True)
class _ModelBook:
    """Of one base model: admitted seconds (decaying), when, the middle length of a sequence's prefill, the middle
    context, and how many requests are in flight with how many sequences and prompt tokens.
    """

    seconds: float = 0.0
    at: float = 0.0
    prefill_each_s: float = _FIRST_PREFILL_S
    context_tokens: float = _FIRST_CONTEXT_TOKENS
    in_flight: int = 0
    sequences: int = 0
    in_flight_tokens: int = 0


class LoadBook:
    """Counts requests in prefill and in decode apart, and forgets each exactly once, however it ends."""

    def __init__(self) -> None:
        self._books: dict[WorkerId, _ReplicaBook] = {}
        self._work: dict[str, _ModelBook] = {}
        self._rosters: dict[str, _RosterBooks] = {}

    def add(  # noqa: PLR0917  (for each request, and names take time)
        self,
        worker: WorkerId,
        engine_name: str,
        prefill_s: float,
        now: float,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        base_model: str = "",
        adapter_s: float = 0.0,
        sequences: int = 1,
    ) -> LoadEntry:
        """Note a request that is about to be sent; until its first token it is `prefill_s` seconds of work.

        adapter_s  until its adapter is on the device: admitted to the base model's work with the rest
        """
        work = self._work.get(base_model)
        if work is None:
            work = self._work[base_model] = _ModelBook(at=now)
        work.seconds = work.seconds * exp((work.at - now) / _HORIZON_S) + prefill_s + adapter_s
        work.at = now
        work.prefill_each_s += _SMOOTHING * (prefill_s / sequences - work.prefill_each_s)
        work.context_tokens += _SMOOTHING * (context(prompt_tokens, cached_tokens) - work.context_tokens)
        work.in_flight += 1
        work.sequences += sequences
        work.in_flight_tokens += prompt_tokens
        book = self._books.get(worker) or self._book_of(worker, base_model)
        uncached_tokens = prompt_tokens - cached_tokens
        flight = LoadEntry(worker, engine_name, prefill_s, uncached_tokens, prompt_tokens, now, work, book, sequences)
        book.add(flight)
        return flight

    def record_first_token(self, flight: LoadEntry, now: float) -> None:
        """Its prefill is over; repeats change nothing."""
        if flight.is_answered or flight.ended:
            return
        flight.is_answered = True
        book = flight.book
        book.heard_at = now
        book.correct(flight, now)
        if flight.in_prefill:
            book.changes(now)
            book.leave_prefill(flight, now)

    def record_data(self, worker: WorkerId, at: float) -> None:
        """More of some answer came from there: its engine is alive."""
        book = self._books.get(worker)
        if book is not None:
            book.heard_at = max(book.heard_at, at)

    def prefill_pace(self, worker: WorkerId) -> float:
        """The share of the predicted seconds that a replica's prefills took of late; 1.0 where predictions hold."""
        book = self._books.get(worker)
        return 1.0 if book is None else book.prefill_pace

    def silent_s(self, worker: WorkerId, now: float, *, since: float = -inf) -> float:
        """For how long a replica has said nothing to anybody, beyond the time that what it has to do may take.

        Whoever waits for a first token would have heard of it. For a whole answer one may wait long: what speaks for
        silence then is that the engine's own counters did not move either.

        since  requests from before that do not count; 0.0 where nobody waits
        """
        book = self._books.get(worker)
        if book is None:
            return 0.0
        waiting = [flight for flight in book.flights if not flight.is_answered and flight.began_at >= since]
        streams = [flight.began_at for flight in waiting if flight.is_streamed]
        silent_s = still_s = 0.0
        if streams:
            own = self.replica_load(worker)
            # Behind running requests the first token is as far away as their last one.
            behind_s = own.request_s if own.full_s or own.slot_at > -inf or own.kv_free_tokens <= 0 else 0.0
            silent_s = now - max(min(streams), book.heard_at) - behind_s
        if waiting:
            began_at = min(flight.began_at for flight in waiting)
            still_s = book.reported_at - max(began_at, book.heard_at, book.moved_at)
        return max(0.0, silent_s - book.prefill_s, still_s - book.prefill_s)

    def remove(self, flight: LoadEntry, now: float, *, is_answered: bool = False) -> None:
        """It is over, well or badly; repeats change nothing.

        is_answered  its whole answer has just come, and `record_first_token` was not called for it
        """
        if flight.ended:
            return
        flight.ended = True
        book, work = flight.book, flight.work
        work.in_flight -= 1
        work.sequences -= flight.sequences
        work.in_flight_tokens -= flight.prompt_tokens
        book.changes(now)
        if flight.in_prefill:
            book.leave_prefill(flight, now)
        if is_answered or flight.is_answered:
            # Only of those that were answered: a refusal takes no time, and says nothing of one. The plain mean at
            # first, so that one odd request does not count for ten.
            book.ended += 1
            book.heard_at = now
            if not flight.is_answered:
                book.correct(flight, now)
            share = max(_SMOOTHING, 1 / book.ended)
            book.mean_request_s += share * (now - flight.began_at - book.mean_request_s)
        book.remove(flight)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker that is gone; its requests may still `remove`, which then nobody sees."""
        if self._books.pop(worker, None) is not None:
            self._rosters.clear()

    def apply_report(self, replica: Replica) -> None:
        """Take an engine's own counts, and off them what was ours when they were read."""
        book = self._book_of(replica.id, replica.base_model)
        if book.boot_id != replica.engine_boot_id:
            if book.boot_id:
                # What still waits for the engine that was there before ends in its own book, unseen.
                self.forget(replica.id)
                book = self._book_of(replica.id, replica.base_model)
            book.boot_id = replica.engine_boot_id
        report = replica.report
        book.base_model = replica.base_model
        book.max_loras, book.max_seqs = replica.max_loras, replica.max_num_seqs
        book.kv_tokens = replica.total_kv_blocks * replica.block_size
        book.kv_tokens_used = report.kv_usage * book.kv_tokens
        book.reported_request_s = report.request_s or FIRST_REQUEST_S
        book.moved_at = report.moved_at
        book.stale.add(book.position)
        if report.at == book.reported_at:
            return
        in_prefill, in_flight = book.had(report.at)
        in_prefill -= book.apply_report(report.at, report.waiting)
        # Of ours in prefill the engine counts one as running already: it works on the first while the others wait.
        book.others_in_flight = max(0, report.running + report.waiting - in_flight)
        others_waiting = min(book.others_in_flight, max(0, report.waiting - max(0, in_prefill - 1)))
        work = self._work.get(replica.base_model)
        each_s = _FIRST_PREFILL_S if work is None else work.prefill_each_s
        book.others_until = report.at + others_waiting * each_s if others_waiting else -inf

    def forget_report(self, worker: WorkerId) -> None:
        """Nobody tells of its engine any more: what it had to do for others then is over, or as good as unknown."""
        book = self._books.get(worker)
        if book is not None:
            book.others_in_flight, book.others_until = 0, -inf
            book.kv_tokens_used, book.freed_tokens = 0.0, 0
            book.stale.add(book.position)

    def replica_load(self, worker: WorkerId) -> ReplicaLoad:
        """The load of one replica; an idle one where nothing is known of it."""
        book = self._books.get(worker)
        return ReplicaLoad() if book is None else ReplicaLoad(*_load_vector(book))

    def fleet_load(self, base_model: str, replicas: tuple[Replica, ...]) -> FleetLoad:
        """The load of each replica of a base model, in order; computed anew only for those that changed."""
        roster = self._rosters.get(base_model)
        if roster is None:
            roster = self._rosters[base_model] = self._roster_books(replicas)
        elif roster.replicas is not replicas:
            # Reports come many times a second, mostly from the same replicas.
            if roster.is_of(replicas):
                roster.replicas = replicas
            else:
                roster = self._rosters[base_model] = self._roster_books(replicas)
        for position in roster.stale:
            roster.table.update(position, _load_vector(roster.books[position]))
        roster.stale.clear()
        return roster.table.snapshot()

    def _roster_books(self, replicas: tuple[Replica, ...]) -> _RosterBooks:
        books = [self._book_of(replica.id, replica.base_model) for replica in replicas]
        roster = _RosterBooks(replicas, books, LoadTable(len(books)), set(range(len(books))))
        for position, book in enumerate(books):
            book.stale, book.position = roster.stale, position
        return roster

    def counts_by_name(self) -> Iterable[tuple[WorkerId, str, int]]:
        """(worker, what its engine calls the thing that runs, requests in flight) of everything that is in flight."""
        for worker, book in self._books.items():
            for engine_name, count in book.names.items():
                yield worker, engine_name or book.base_model, count

    def utilisation(self, base_model: str, loads: FleetLoad, now: float) -> tuple[float, float]:
        """rho, and the usual context of this base model's prefills (see cost.context).

        rho    admitted seconds per replica-second, exponentially weighted over 30 s, fleet-wide
        loads  of every replica. What other routers admit is not known, but how much of what the engines have in
               flight is ours: they admit the rest.
        """
        work = self._work.get(base_model)
        if work is None:
            return 0.0, _FIRST_CONTEXT_TOKENS
        ours, others = work.sequences, loads.others_in_flight
        share = max(_LEAST_SHARE, (ours + 1) / (ours + others + 1)) if others else 1.0
        spread_s = _HORIZON_S * (len(loads) or 1) * share
        return work.seconds * exp((work.at - now) / _HORIZON_S) / spread_s, work.context_tokens

    @property
    def total_in_flight(self) -> int:
        """Requests that have begun and not ended, those at forgotten workers too."""
        return sum(work.in_flight for work in self._work.values())

    def in_flight_tokens(self, base_model: str) -> int:
        """Prompt tokens of what this router has at the engines of a base model."""
        work = self._work.get(base_model)
        return 0 if work is None else work.in_flight_tokens

    def _book_of(self, worker: WorkerId, base_model: str) -> _ReplicaBook:
        book = self._books.get(worker)
        if book is None:
            book = self._books[worker] = _ReplicaBook(base_model)
        return book


def _load_vector(book: _ReplicaBook) -> LoadVector:
    """The replica's load, in the order of ReplicaLoad's fields."""
    others, names, total = book.others_in_flight, book.engine_names, book.kv_tokens
    in_prefill, all_of_ours = book.prefill_sequences, book.sequences
    # By ours that ended, else as the engine says, else a guess.
    request_s = book.mean_request_s or book.reported_request_s
    full_s = kv_token_s = behind_s = 0.0
    kv_tokens = kv_free_tokens = inf
    slot_at = placed = -inf
    if names is None:
        names = book.engine_names = frozenset(book.names)
        book.slots_used = len(names) - ("" in names)
    beyond = all_of_ours + others + 1 - book.max_seqs
    if beyond > 0:
        full_s = request_s * beyond / book.max_seqs
    if 0 < book.max_loras <= book.slots_used:
        slot_at = _slot_at(book.flights, book.max_loras, request_s)
        if book.passed_over is not None and book.passed_over.in_prefill:
            names, slot_at = frozenset(), max(slot_at, book.reported_at + _GIVEN_WAY_S)
    if total:
        # What the engine says, less what has ended since, and with what it has not begun; a prefix that several
        # requests share is in use once.
        in_use = book.kv_tokens_used + book.unreported_tokens - book.freed_tokens
        if in_use < 0:
            in_use = 0.0
        kv_tokens, kv_free_tokens = total, total - in_use
        # Running requests give back all of theirs in the time that one takes.
        kv_token_s = request_s / in_use if in_use > 1 else request_s
    if book.placed_tokens > 0:
        placed = log(book.placed_tokens / (total or _KV_TOKENS)) + book.placed_at / PLACED_S
    if book.prefill_s > book.largest_s:
        behind_s = book.prefill_s - book.largest_s
    return (
        book.busy_until,
        behind_s,
        book.others_until,
        in_prefill,
        all_of_ours - in_prefill,
        others,
        names,
        book.slots_used,
        book.fresh,
        slot_at,
        full_s,
        request_s,
        kv_tokens,
        kv_free_tokens,
        kv_token_s,
        placed,
    )


def _slot_at(flights: Iterable[LoadEntry], max_loras: int, request_s: float) -> float:
    """When one adapter more gets a device slot, all of them in use: each is free when its last request has ended."""
    ends: dict[str, float] = {}
    for flight in flights:
        if flight.engine_name:
            ends[flight.engine_name] = max(ends.get(flight.engine_name, -inf), flight.began_at + request_s)
    return sorted(ends.values())[len(ends) - max_loras]
