"""What is counted at one worker, and the load vector that follows from it; private to the load book."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, inf, log

import msgspec

from router.core.kv.index import WorkerId
from router.core.schedule.load_snapshot import FIRST_REQUEST_S, PLACED_S, LoadVector
from router.core.sessions.book import SessionState
from router.core.sessions.held import HeldSessions

# Until a request has begun here: guesses, nothing measured.
FIRST_PREFILL_S = 0.2
FIRST_CONTEXT_TOKENS = 1000.0
# The KV cache of an engine that does not tell its size: a guess that all such engines share.
_KV_TOKENS = 200_000
# Moments remembered per worker, so that an old report is compared with what was in flight when it was read. Changes
# within one moment are one: however many requests come, five seconds are remembered.
_MAX_MOMENTS = 512
_MOMENT_S = 0.01
# vLLM lets requests of a running adapter pass one that waits for its adapter's slot (vLLM 0.32
# v1/core/sched/scheduler.py: skipped for max_loras), so an adapter in constant use never gives its slot up. Where a
# request has waited for 10 s, nothing that takes a slot is sent for 5 s after each report. 10 s is more than is ever
# queued at an engine (`late_binding_s`).
_PASSED_OVER_S = 10.0
_GIVEN_WAY_S = 5.0
# A first token in less than half of the predicted time says that predictions are wrong, not that it was lucky.
_CONTRADICTED_SHARE = 0.5
_LEAST_EXPECTED_S = 0.1
_LEAST_PACE, _MOST_PACE = 0.001, 100.0
# A prefill is evidence of the pace where it is most of what was predicted, and long beside HTTP and tokenizing. One
# counts as at most so many times slower or faster than predicted: an engine may stall, and a first prefill compiles.
_LEAST_OWN_SHARE = 0.5
_LEAST_PREFILL_S = 0.1
_MOST_OFF = 8.0
# What a first token takes beyond its prediction moves by this share of itself, and by no less than a millisecond: so
# half of the first tokens come later, however long the slow ones take.
_BEYOND_SHARE = 0.1
_LEAST_BEYOND_S = 0.01
# Weights of the first prefills, and of all later ones.
_FIRST_PACES = 4
_PACE_SHARE = 0.1


class LoadEntry(msgspec.Struct, eq=False):
    """One request at one replica, from dispatch to end.

    work, book       the books that count it, also after its worker was forgotten
    sequences        sequences that the engine runs for it
    is_unreported    no report of the engine counts its tokens yet
    is_streamed      it shows its first token. Any other request is silent until its whole answer is there, and leaves
                     prefill when a report shows that it runs
    is_exact         what its replica has cached of its prompt was known, not estimated
    is_answered      its first token, or its whole answer, has arrived
    first_token_s    seconds from dispatch to its first token by the cost model; prefill_s of them at this pace
    beyond_s         seconds that first tokens usually take beyond that there
    session          whose turn it is; None: not known
    work_s           seconds of its engine's time that it was, of these `decode_s` beyond its prefill; known at its end
    clock_s          the book's work clock when it began
    """

    worker: WorkerId
    engine_name: str
    prefill_s: float
    uncached_tokens: int
    prompt_tokens: int
    began_at: float
    work: "ModelBook"
    book: "ReplicaBook"
    sequences: int = 1
    in_prefill: bool = True
    is_unreported: bool = True
    is_streamed: bool = True
    is_exact: bool = True
    is_answered: bool = False
    ended: bool = False
    first_token_s: float = 0.0
    beyond_s: float = 0.0
    pace: float = 1.0
    session: SessionState | None = None
    work_s: float = 0.0
    decode_s: float = 0.0
    clock_s: float = 0.0

    @property
    def predicted_s(self) -> float:
        """Predicted seconds from dispatch to the first token."""
        return self.first_token_s + self.beyond_s


@dataclass(slots=True)
class ReplicaBook:
    """The requests in flight at one worker, and what its engine reported.

    Sums are kept as requests come and go, so that a decision costs the same however many are in flight.

    boot_id               the engine's; another engine has nothing of what was sent to this one
    prefill_s, largest_s, largest_count   of the requests in prefill: seconds of work together, seconds of the largest,
                          and how many are as large
    unreported_tokens     uncached tokens that the engine's report does not count yet, or that are in prefill
    sequences, prefill_sequences   of all requests in flight, and of those in prefill
    counts_by_name        requests in flight by what they run
    engine_names, slots_used, fresh   as in ReplicaLoad; engine_names is None when it and slots_used must be made anew
    passed_over           the oldest request that had waited too long for an adapter slot at the last report
    freed_tokens          uncached tokens of requests that ended since the report that counted them
    data_at               when data of any answer last arrived
    history               (until, in prefill, in flight): our sequences until then; `noted_at`: the last entry's time
    reported_at, moved_at  when the engine's counters were read, and when they had last moved
    beyond_s              seconds that first tokens usually take beyond the cost model
    prefill_pace, paced, has_pace   as in ReplicaLoad; the prefills that it was learned from, and whether there are any:
                          else it is that of another replica of the base model
    rate                  prefill tokens per second, by the engine's agent; 0.0: not known
    held, own_share       the sessions whose KV the engine has, and the share of its requests, and so of its cache, that
                          is this router's
    stale, position       the set that collects positions of changed replicas, and this one's
    max_loras, max_seqs, kv_tokens, kv_tokens_used, reported_request_s   from the worker's and the engine's reports
    clock_s, clock_at     the work clock, see `advance_clock`, and the time to which it has been advanced
    """

    base_model: str
    boot_id: str = ""
    entries: set[LoadEntry] = field(default_factory=set)
    in_prefill: dict[LoadEntry, None] = field(default_factory=dict)
    prefill_s: float = 0.0
    largest_s: float = 0.0
    largest_count: int = 0
    unreported_tokens: int = 0
    sequences: int = 0
    prefill_sequences: int = 0
    counts_by_name: dict[str, int] = field(default_factory=dict)
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
    data_at: float = -inf
    dispatched_at: dict[str, float] = field(default_factory=dict)
    history: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_MAX_MOMENTS))
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
    beyond_s: float = 0.0
    paced: int = 0
    has_pace: bool = False
    rate: float = 0.0
    held: HeldSessions = field(default_factory=HeldSessions)
    own_share: float = 1.0
    stale: set[int] = field(default_factory=set)
    position: int = 0
    clock_s: float = 0.0
    clock_at: float = -inf

    def advance_clock(self, now: float) -> None:
        """Advance the work clock: each second of the engine is shared out evenly among all sequences in flight.

        So the shares of all requests add up to the time for which the engine is busy. Call before their number changes.
        """
        if now > self.clock_at:
            if self.sequences:
                self.clock_s += (now - self.clock_at) / (self.sequences + self.others_in_flight)
            self.clock_at = now

    def charge_prefill(self, entry: LoadEntry) -> None:
        """Charge a prefill that is over to its request alone: all of ours in flight get their shares of it back."""
        entry.work_s = entry.prefill_s
        self.clock_s -= entry.prefill_s / self.sequences

    def charge_share(self, entry: LoadEntry, *, has_prefill: bool) -> None:
        """Charge a request that ends with its share of the engine's seconds since it began.

        has_prefill  its prefill was charged before: the share is decoding. Else it left within its prefill
        """
        share_s = entry.sequences * (self.clock_s - entry.clock_s)
        entry.work_s = max(0.0, entry.work_s + share_s)
        entry.decode_s = max(0.0, share_s) if has_prefill else 0.0

    def mark_changed(self, now: float) -> None:
        """Mark the load as stale, and add the sequences until now to the history; call before each change."""
        self.advance_clock(now)
        self.stale.add(self.position)
        if now - self.noted_at >= _MOMENT_S:
            self.noted_at = now
            self.history.append((now, self.prefill_sequences, self.sequences))

    def add(self, entry: LoadEntry) -> None:
        """Count one more request, in prefill.

        Adds its sequences, prefill seconds and tokens, and marks its adapter as used, and as fresh until reported.
        """
        now, prefill_s, name, names = entry.began_at, entry.prefill_s, entry.engine_name, self.counts_by_name
        sequences = entry.sequences
        self.mark_changed(now)
        entry.clock_s = self.clock_s
        self.entries.add(entry)
        self.in_prefill[entry] = None
        self.sequences += sequences
        self.prefill_sequences += sequences
        self.busy_until = max(self.busy_until, now) + prefill_s
        self.prefill_s += prefill_s
        if prefill_s > self.largest_s:
            self.largest_s, self.largest_count = prefill_s, 1
        elif prefill_s == self.largest_s:
            self.largest_count += 1
        self.unreported_tokens += entry.uncached_tokens
        if name in names:
            names[name] += 1
        else:
            names[name] = 1
            self.engine_names = None
        self.dispatched_at[name] = now
        if name not in self.fresh and now > self.reported_at:
            self.fresh = self._used_last(self.fresh | {name})
        self.placed_tokens = self.placed_tokens * exp((self.placed_at - now) / PLACED_S) + entry.uncached_tokens
        self.placed_at = now
        if entry.session is not None:
            self.held.place(entry.session, name, entry.prompt_tokens, entry.uncached_tokens)

    def _used_last(self, names: frozenset[str]) -> frozenset[str]:
        """Those of these names that are in device slots by vLLM's LRU rule: the `max_loras` adapters sent there last.

        Names of requests in flight stay, and the base model, which takes no slot.
        """
        over = len(names) - self.max_loras
        if over <= 0 or not self.max_loras:
            return names
        idle = [name for name in names if name and name not in self.counts_by_name]
        oldest = sorted(idle, key=lambda name: (self.dispatched_at[name], name))
        return names.difference(oldest[: over - ("" in names)])

    def is_on_device(self, name: str, *, was_reported: bool) -> bool:
        """Whether an adapter is in a device slot, as far as is known: by the last report, and by what was sent since.

        was_reported  whether it was in one at the last report
        """
        if name in self.counts_by_name or name in self.fresh:
            return True
        is_any_left = not self.max_loras or len(self.fresh) - ("" in self.fresh) < self.max_loras
        return was_reported and is_any_left

    def update_pace(self, entry: LoadEntry, now: float) -> None:
        """Correct the prefill pace by a prefill that just ended; at once if its prediction was far too long.

        An estimate says nothing: it may have missed what was cached. A whole answer can say no more than that its
        prediction was far too long: it took longer than its prefill.
        """
        expected_s, own_s, took_s = entry.first_token_s, entry.prefill_s, now - entry.began_at
        if (
            not entry.is_exact
            or took_s <= 0
            or own_s < max(_LEAST_PREFILL_S * entry.pace, _LEAST_OWN_SHARE * expected_s)
        ):
            return
        if expected_s >= _LEAST_EXPECTED_S and took_s < _CONTRADICTED_SHARE * expected_s:
            self.prefill_pace = min(self.prefill_pace, _bounded_pace(entry.pace * took_s / expected_s))
            self.paced, self.has_pace = 0, True
        elif entry.is_streamed:
            off = min(_MOST_OFF, (took_s - (expected_s - own_s)) / own_s)
            self.paced, self.has_pace = self.paced + 1, True
            share = max(_PACE_SHARE, 1 / (_FIRST_PACES + self.paced))
            self.prefill_pace = _bounded_pace(self.prefill_pace + share * (entry.pace * off - self.prefill_pace))

    def update_beyond(self, entry: LoadEntry, now: float) -> None:
        """Correct what first tokens take beyond the cost model, by one whose prefill was too short to correct the pace.

        That is HTTP, tokenizing, the engine's other processes, and requests of other routers.
        """
        if entry.is_exact and entry.is_streamed and entry.prefill_s < _LEAST_PREFILL_S * entry.pace:
            step_s = _BEYOND_SHARE * max(_LEAST_BEYOND_S, self.beyond_s)
            is_later = now - entry.began_at > entry.first_token_s + self.beyond_s
            self.beyond_s = self.beyond_s + step_s if is_later else max(0.0, self.beyond_s - step_s)

    def apply_rate(self, tokens_per_s: float) -> None:
        """Take over the rate that the engine's agent has learned; the pace goes on meaning the same seconds a token.

        Without a rate before, or now, the pace begins anew: it was one by the fleet's rate, or by the guess.
        """
        if tokens_per_s != self.rate and self.has_pace:
            if tokens_per_s and self.rate:
                self.prefill_pace = _bounded_pace(self.prefill_pace * tokens_per_s / self.rate)
            else:
                self.prefill_pace, self.paced, self.has_pace = 1.0, 0, False
        self.rate = tokens_per_s

    def leave_prefill(self, entry: LoadEntry, now: float) -> None:
        """Count this request out of prefill. The next prefill counts as begun now.

        Drops its prefill seconds, and counts it as reported if the last report is later than its start.
        """
        entry.in_prefill = False
        left = self.in_prefill
        del left[entry]
        self.prefill_sequences -= entry.sequences
        if not left:
            self.prefill_s = self.largest_s = 0.0
            self.largest_count = 0
            self.busy_until = -inf
        else:
            # Summed anew when rounding may have added up.
            self.prefill_s = (
                self.prefill_s - entry.prefill_s if len(left) > 1 else sum([entry.prefill_s for entry in left])
            )
            if entry.prefill_s == self.largest_s:
                self.largest_count -= 1
                if not self.largest_count:
                    seconds = [entry.prefill_s for entry in left]
                    self.largest_s = max(seconds)
                    self.largest_count = seconds.count(self.largest_s)
            # The next prefill begins now: so a wrong prediction is forgotten with its prefill.
            self.busy_until = now + self.prefill_s
        if entry.began_at <= self.reported_at:
            self._count_as_reported(entry)

    def remove(self, entry: LoadEntry) -> None:
        """Forget a request that has ended and left prefill, its tokens and adapter; call `leave_prefill` first.

        Tokens of one that began before the last report count as freed. Clears `engine_names` with an adapter's last
        one.
        """
        self.entries.discard(entry)
        self.sequences -= entry.sequences
        if entry.is_unreported:
            self.unreported_tokens -= entry.uncached_tokens
        if entry.began_at <= self.reported_at:
            self.freed_tokens += entry.uncached_tokens
        name, names = entry.engine_name, self.counts_by_name
        left = names[name] - 1
        if left:
            names[name] = left
        else:
            del names[name]
            self.engine_names = None

    def apply_report(self, at: float, waiting: int) -> int:
        """Apply a new report of the engine; returns how many of our sequences it shows to have left prefill silently.

        Moves those out of prefill, and updates the fresh adapters and the request that waits for a slot.
        waiting  sequences that the engine has not begun; of ours those are the newest
        """
        self.reported_at = at
        self.freed_tokens = 0
        running = self._past_prefill(at, waiting)
        for entry in running:
            self.charge_prefill(entry)
            self.leave_prefill(entry, at)
        waits = self._without_slot()
        self.passed_over = waits[0] if waits and waits[0].began_at <= at - _PASSED_OVER_S else None
        for entry in self.entries:
            if not entry.in_prefill and entry.began_at <= at:
                self._count_as_reported(entry)
        self.dispatched_at = {
            n: when for n, when in self.dispatched_at.items() if n in self.counts_by_name or when > at
        }
        self.fresh = self._used_last(frozenset([name for name, when in self.dispatched_at.items() if when > at]))
        return sum([entry.sequences for entry in running])

    def _past_prefill(self, at: float, waiting: int) -> list[LoadEntry]:
        """Unstreamed requests whose prefill was over at a report: the engine had begun them, and their time was up."""
        if not self.in_prefill:
            return []
        without_slot = set(self._without_slot())
        waiting = max(0, waiting - sum([entry.sequences for entry in without_slot]))
        there = [entry for entry in self.in_prefill if entry.began_at <= at and entry not in without_slot]
        begun = sum([entry.sequences for entry in there]) - waiting
        running, until = [], -inf
        for entry in there:
            begun -= entry.sequences
            until = max(until, entry.began_at) + entry.prefill_s
            if begun < 0 or until > at:
                break
            if not entry.is_streamed:
                running.append(entry)
        return running

    def _without_slot(self) -> list[LoadEntry]:
        """Requests that cannot have begun, the oldest first: other adapters have all slots."""
        if not 0 < self.max_loras < len(self.counts_by_name) - ("" in self.counts_by_name):
            return []
        running = {entry.engine_name for entry in self.entries if not entry.in_prefill} - {""}
        if len(running) < self.max_loras:
            return []
        return [entry for entry in self.in_prefill if entry.engine_name and entry.engine_name not in running]

    def _count_as_reported(self, entry: LoadEntry) -> None:
        """Take a request's tokens out of those that no report counts yet. Does nothing the second time."""
        if entry.is_unreported:
            entry.is_unreported = False
            self.unreported_tokens -= entry.uncached_tokens

    def sequences_at(self, at: float) -> tuple[int, int]:
        """Our sequences in prefill and in flight at a time, as far back as the history goes."""
        found = self.prefill_sequences, self.sequences
        for until, in_prefill, in_flight in reversed(self.history):
            if until <= at:
                break
            found = in_prefill, in_flight
        return found


@dataclass(slots=True)
class ModelBook:
    """The work of one base model.

    seconds, at       seconds of admitted work, decaying; as of when
    prefill_each_s    prefill of a usual sequence
    context_tokens    context of a usual prefill; see cost.context
    in_flight, sequences, in_flight_tokens   requests in flight, their sequences and prompt tokens
    """

    seconds: float = 0.0
    at: float = 0.0
    prefill_each_s: float = FIRST_PREFILL_S
    context_tokens: float = FIRST_CONTEXT_TOKENS
    in_flight: int = 0
    sequences: int = 0
    in_flight_tokens: int = 0


def _bounded_pace(pace: float) -> float:
    return min(_MOST_PACE, max(_LEAST_PACE, pace))


def load_vector(book: ReplicaBook) -> LoadVector:
    """The replica's load, in the order of ReplicaLoad's fields. Renews the book's `engine_names`."""
    others, names, total = book.others_in_flight, book.engine_names, book.kv_tokens
    in_prefill, all_of_ours = book.prefill_sequences, book.sequences
    # From our requests that ended, else from the engine, else a guess.
    request_s = book.mean_request_s or book.reported_request_s
    full_s = kv_token_s = behind_s = 0.0
    kv_tokens = kv_free_tokens = inf
    slot_at = placed = -inf
    if names is None:
        names = book.engine_names = frozenset(book.counts_by_name)
        book.slots_used = len(names) - ("" in names)
    beyond = all_of_ours + others + 1 - book.max_seqs
    if beyond > 0:
        full_s = request_s * beyond / book.max_seqs
    if 0 < book.max_loras <= book.slots_used:
        slot_at = _slot_at(book.entries, book.max_loras, request_s)
        if book.passed_over is not None and book.passed_over.in_prefill:
            names, slot_at = frozenset(), max(slot_at, book.reported_at + _GIVEN_WAY_S)
    if total:
        # The engine's figure, less what ended since, plus what it has not begun. A prefix that several requests share
        # is in use once.
        in_use = book.kv_tokens_used + book.unreported_tokens - book.freed_tokens
        if in_use < 0:
            in_use = 0.0
        kv_tokens, kv_free_tokens = total, total - in_use
        # Running requests free all of their tokens in the time that one takes.
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
        book.prefill_pace,
        book.held.victims(max(book.noted_at, book.reported_at)),
    )


def _slot_at(entries: Iterable[LoadEntry], max_loras: int, request_s: float) -> float:
    """When one adapter more gets a device slot, all being in use: a slot is free when its last request has ended."""
    ends: dict[str, float] = {}
    for entry in entries:
        if entry.engine_name:
            ends[entry.engine_name] = max(ends.get(entry.engine_name, -inf), entry.began_at + request_s)
    return sorted(ends.values())[len(ends) - max_loras]
