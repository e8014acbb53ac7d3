"""The load book: what this router has in flight, and the waits and the utilisation that follow from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf

from router.core.fleet import Replica
from router.core.kv.index import WorkerId
from router.core.schedule.cost import context
from router.core.schedule.load_snapshot import FIRST_REQUEST_S, FleetLoad, LoadTable, ReplicaLoad
from router.core.schedule.replica_book import (
    FIRST_CONTEXT_TOKENS,
    FIRST_PREFILL_S,
    LoadEntry,
    ModelBook,
    ReplicaBook,
    load_vector,
)
from router.core.sessions.book import SessionState

# Seconds over which admitted work counts towards utilisation (rho).
_HORIZON_S = 30.0
# No fleet is expected to have more than 16 routers.
_LEAST_SHARE = 1 / 16
_SMOOTHING = 0.1


@dataclass(slots=True)
class _RosterBooks:
    """The books of one roster's replicas, in its order, and the loads they came to when last read.

    stale   positions whose load has changed since they were last read
    read    the loads as they were last read
    """

    replicas: tuple[Replica, ...]
    books: list[ReplicaBook]
    table: LoadTable
    stale: set[int]
    read: FleetLoad | None = None

    def is_of(self, replicas: tuple[Replica, ...]) -> bool:
        """Whether these are the same workers in the same order, and all of their books still report to `stale`."""
        is_same = [replica.id for replica in replicas] == [replica.id for replica in self.replicas]
        return is_same and all(book.stale is self.stale for book in self.books)


class LoadBook:
    """The requests of this router at every worker, in prefill and in decode, and the load that follows from them.

    Each request is counted once, from `add` to `remove`, however it ends.
    """

    def __init__(self) -> None:
        self._books: dict[WorkerId, ReplicaBook] = {}
        self._models: dict[str, ModelBook] = {}
        self._rosters: dict[str, _RosterBooks] = {}
        self._unpaced: set[WorkerId] = set()

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
        first_token_s: float = 0.0,
        session: SessionState | None = None,
    ) -> LoadEntry:
        """Count a request that is about to be sent, in prefill; also updates its model's usual prefill and context.

        prefill_s      seconds of work that it is until its first token
        adapter_s      seconds until its adapter is on the device; counts for the base model's utilisation
        first_token_s  seconds until its first token by the cost model
        session        whose turn it is; None: not known
        """
        work = self._models.get(base_model)
        if work is None:
            work = self._models[base_model] = ModelBook(at=now)
        work.seconds = work.seconds * exp((work.at - now) / _HORIZON_S) + prefill_s + adapter_s
        work.at = now
        work.prefill_each_s += _SMOOTHING * (prefill_s / sequences - work.prefill_each_s)
        work.context_tokens += _SMOOTHING * (context(prompt_tokens, cached_tokens) - work.context_tokens)
        work.in_flight += 1
        work.sequences += sequences
        work.in_flight_tokens += prompt_tokens
        book = self._books.get(worker) or self._book_of(worker, base_model)
        uncached_tokens = prompt_tokens - cached_tokens
        entry = LoadEntry(worker, engine_name, prefill_s, uncached_tokens, prompt_tokens, now, work, book, sequences)
        entry.first_token_s, entry.pace, entry.session = first_token_s, book.prefill_pace, session
        entry.beyond_s = book.beyond_s
        book.add(entry)
        return entry

    def record_first_token(self, entry: LoadEntry, now: float) -> None:
        """Record a request's first token: it leaves prefill, and its engine counts as alive.

        Its duration corrects the replica's prefill pace, or what its first tokens take beyond the cost model. Does
        nothing the second time or after the request's end.
        """
        if entry.is_answered or entry.ended:
            return
        entry.is_answered = True
        book = entry.book
        book.data_at = now
        book.update_beyond(entry, now)
        self._update_pace(entry, now)
        if entry.in_prefill:
            book.mark_changed(now)
            book.charge_prefill(entry)
            book.leave_prefill(entry, now)

    def record_data(self, worker: WorkerId, at: float) -> None:
        """Record that data of some answer arrived from a worker at a time: its engine is alive. The latest time counts.

        Ignored for an unknown worker.
        """
        book = self._books.get(worker)
        if book is not None:
            book.data_at = max(book.data_at, at)

    def silent_s(self, worker: WorkerId, now: float, *, since: float = -inf) -> float:
        """Seconds for which a replica has sent nothing, beyond what its work explains; 0.0 where no request waits.

        A stream's first token is due when the work before it is done. A whole answer may take long, so then the
        replica counts as silent only while its engine's own counters stand still, too.

        since  requests sent before that do not count
        """
        book = self._books.get(worker)
        if book is None:
            return 0.0
        waiting = [entry for entry in book.entries if not entry.is_answered and entry.began_at >= since]
        streams = [entry.began_at for entry in waiting if entry.is_streamed]
        silent_s = still_s = 0.0
        if streams:
            own = self.replica_load(worker)
            # Behind running requests the first token is as far away as their last one.
            behind_s = own.request_s if own.full_s or own.slot_at > -inf or own.kv_free_tokens <= 0 else 0.0
            silent_s = now - max(min(streams), book.data_at) - behind_s
        if waiting:
            began_at = min(entry.began_at for entry in waiting)
            still_s = book.reported_at - max(began_at, book.data_at, book.moved_at)
        return max(0.0, silent_s - book.prefill_s, still_s - book.prefill_s)

    def remove(self, entry: LoadEntry, now: float, *, is_answered: bool = False) -> None:
        """Forget a request that ended, well or badly. An answered one updates the replica's usual request time.

        Takes it out of prefill and all counts, and sets the seconds that it was. Safe to call twice.
        is_answered  its whole answer has just arrived, and `record_first_token` was not called for it
        """
        if entry.ended:
            return
        entry.ended = True
        book, work = entry.book, entry.work
        work.in_flight -= 1
        work.sequences -= entry.sequences
        work.in_flight_tokens -= entry.prompt_tokens
        book.mark_changed(now)
        if entry.session is not None:
            entry.session.end_turn(now)
            book.held.end_turn(entry.session)
        has_prefill = is_answered or not entry.in_prefill
        if entry.in_prefill:
            if has_prefill:
                book.charge_prefill(entry)
            book.leave_prefill(entry, now)
        book.charge_share(entry, has_prefill=has_prefill)
        if is_answered or entry.is_answered:
            # Only of answered requests: a refusal takes no time. The plain mean at first, so that one odd request does
            # not count for ten.
            book.ended += 1
            book.data_at = now
            if not entry.is_answered:
                self._update_pace(entry, now)
            share = max(_SMOOTHING, 1 / book.ended)
            book.mean_request_s += share * (now - entry.began_at - book.mean_request_s)
        book.remove(entry)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker that is gone, and the cached rosters.

        Its requests may still be removed, without effect on later load.
        """
        if self._books.pop(worker, None) is not None:
            self._rosters.clear()

    def apply_report(self, replica: Replica) -> None:
        """Apply a worker's newest report: sequences beyond ours are other clients'. Another boot empties the book.

        A report seen before updates only sizes and KV use. Marks the load as changed.
        """
        book = self._book_of(replica.id, replica.base_model)
        if book.boot_id != replica.engine_boot_id:
            if book.boot_id:
                # Requests at the engine before this one end in that one's book.
                self.forget(replica.id)
                book = self._book_of(replica.id, replica.base_model)
            book.boot_id = replica.engine_boot_id
        report = replica.report
        book.apply_rate(report.prefill_tokens_per_s)
        book.base_model = replica.base_model
        book.max_loras, book.max_seqs = replica.max_loras, replica.max_num_seqs
        book.kv_tokens = replica.total_kv_blocks * replica.block_size
        book.kv_tokens_used = report.kv_usage * book.kv_tokens
        book.reported_request_s = report.request_s or FIRST_REQUEST_S
        book.moved_at = report.moved_at
        book.held.residents = replica.residents
        if book.kv_tokens and replica.caches_prefixes:
            book.held.most_tokens = book.kv_tokens * book.own_share
        book.stale.add(book.position)
        if report.at == book.reported_at:
            return
        book.advance_clock(report.at)
        in_prefill, in_flight = book.sequences_at(report.at)
        in_prefill -= book.apply_report(report.at, report.waiting)
        # The engine counts one of ours in prefill as running: it works on the first while the others wait.
        book.others_in_flight = max(0, report.running + report.waiting - in_flight)
        if in_flight or book.others_in_flight:
            share = in_flight / (in_flight + book.others_in_flight)
            book.own_share += _SMOOTHING * (share - book.own_share)
        others_waiting = min(book.others_in_flight, max(0, report.waiting - max(0, in_prefill - 1)))
        work = self._models.get(replica.base_model)
        each_s = FIRST_PREFILL_S if work is None else work.prefill_each_s
        book.others_until = report.at + others_waiting * each_s if others_waiting else -inf

    def forget_report(self, worker: WorkerId) -> None:
        """Forget a worker's last report, because its reports have stopped: other clients' work and KV use are unknown.

        Marks its load as changed. Ignored for an unknown worker.
        """
        book = self._books.get(worker)
        if book is not None:
            book.others_in_flight, book.others_until = 0, -inf
            book.kv_tokens_used, book.freed_tokens = 0.0, 0
            book.stale.add(book.position)

    def replica_load(self, worker: WorkerId) -> ReplicaLoad:
        """The load of one replica; an idle one where nothing is known of it."""
        book = self._books.get(worker)
        return ReplicaLoad() if book is None else ReplicaLoad(*load_vector(book))

    def book(self, worker: WorkerId) -> ReplicaBook | None:
        """The book of one replica; None where no request went to it and no report came."""
        return self._books.get(worker)

    def fleet_load(self, base_model: str, replicas: tuple[Replica, ...]) -> FleetLoad:
        """The load of each replica of a base model, in order. Updates the kept table for changed replicas only.

        The same object until a load changes.
        """
        roster = self._rosters.get(base_model)
        if roster is None:
            roster = self._rosters[base_model] = self._roster_books(replicas)
        elif roster.replicas is not replicas:
            # Reports come many times a second, mostly from the same replicas.
            if roster.is_of(replicas):
                roster.replicas = replicas
            else:
                roster = self._rosters[base_model] = self._roster_books(replicas)
        if roster.read is None or roster.stale:
            for position in roster.stale:
                roster.table.update(position, load_vector(roster.books[position]))
            roster.stale.clear()
            roster.read = roster.table.snapshot()
        return roster.read

    def _roster_books(self, replicas: tuple[Replica, ...]) -> _RosterBooks:
        """The books of these replicas, which report their changes to this roster from now on."""
        books = [self._book_of(replica.id, replica.base_model) for replica in replicas]
        roster = _RosterBooks(replicas, books, LoadTable(len(books)), set(range(len(books))))
        for position, book in enumerate(books):
            book.stale, book.position = roster.stale, position
        return roster

    def counts_by_name(self) -> Iterable[tuple[WorkerId, str, int]]:
        """(worker, name that its engine has for the adapter or base model, requests in flight) of all in flight."""
        for worker, book in self._books.items():
            for engine_name, count in book.counts_by_name.items():
                yield worker, engine_name or book.base_model, count

    def utilisation(self, base_model: str, loads: FleetLoad, now: float) -> tuple[float, float]:
        """(rho, usual context of its prefills) of a base model; see cost.kappa and cost.context.

        rho is seconds of admitted work per replica and second, exponentially weighted over 30 s. What other routers
        admit is not known: they are taken to admit as much as their share of the sequences in flight.

        loads  of every replica of the base model
        """
        work = self._models.get(base_model)
        if work is None:
            return 0.0, FIRST_CONTEXT_TOKENS
        ours, others = work.sequences, loads.others_in_flight
        share = max(_LEAST_SHARE, (ours + 1) / (ours + others + 1)) if others else 1.0
        spread_s = _HORIZON_S * (len(loads) or 1) * share
        return work.seconds * exp((work.at - now) / _HORIZON_S) / spread_s, work.context_tokens

    @property
    def total_in_flight(self) -> int:
        """Requests of this router in flight, those at forgotten workers included."""
        return sum(work.in_flight for work in self._models.values())

    def in_flight_tokens(self, base_model: str) -> int:
        """Prompt tokens of this router's requests at the engines of a base model."""
        work = self._models.get(base_model)
        return 0 if work is None else work.in_flight_tokens

    def _update_pace(self, entry: LoadEntry, now: float) -> None:
        """Correct the replica's pace; replicas of its base model without evidence of their own have the same.

        Else the first one that is found to be fast would get all requests.
        """
        book, before = entry.book, entry.book.prefill_pace
        book.update_pace(entry, now)
        if book.prefill_pace == before:
            return
        book.stale.add(book.position)
        for worker in list(self._unpaced):
            other = self._books.get(worker)
            if other is None or other.has_pace:
                self._unpaced.discard(worker)
            elif other.base_model == book.base_model:
                other.prefill_pace = book.prefill_pace
                other.stale.add(other.position)

    def _book_of(self, worker: WorkerId, base_model: str) -> ReplicaBook:
        """The worker's book; adds one where there is none."""
        book = self._books.get(worker)
        if book is None:
            book = self._books[worker] = ReplicaBook(base_model)
            self._unpaced.add(worker)
        return book
