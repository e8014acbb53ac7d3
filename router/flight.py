"""A request at a replica, from dispatch to end: what it counts for, and what its answer teaches."""

from collections.abc import Callable
from dataclasses import dataclass

from router.core.estimate import Guess
from router.core.load import InFlight
from router.parts import Parts, Record, Routed
from router.surface.usage import EngineUsage
from router.usage import Use

# A request that had no more than this queued before it began as the index was when it was decided.
_PROMPT_START_S = 0.1


@dataclass(slots=True)
class Flight:
    """A request at a replica: its load, its speculative blocks and its use, each given back exactly once."""

    parts: Parts
    routed: Routed
    record: Record
    load: InFlight
    release: Callable[[], None]
    use: Use
    guess: Guess | None = None
    released: bool = False
    output_tokens: int = 0

    @classmethod
    def begin(cls, parts: Parts, routed: Routed, *, waited_s: float = 0.0) -> "Flight":
        decision = routed.decision
        replica, score = decision.replica, decision.score
        now = parts.clock()
        trust = parts.trust.state(replica.id)
        record = Record(routed.request_id, routed.at, routed.tokens_from, decision, trust, waited_s)
        # First: it runs the shadow policies, and one that fails must leave nothing held.
        flight = parts.mind.begin(decision, now)
        parts.decisions.append(record)
        index = parts.feeds.index(replica.base_model, replica.block_size)
        held = index.hold(parts.feeds.member(replica.id, decision.rank), routed.hashes)
        prompt_tokens = decision.ask.prompt_tokens if routed.prompt.chains else 0
        use = parts.usage.dispatched(replica.id, routed.engine_model, prompt_tokens, now)
        parts.metrics.in_flight.inc()
        parts.metrics.waited.observe(waited_s)
        parts.metrics.live_cost.inc(score.cost_s)
        parts.metrics.predicted_tokens.inc(score.cached_tokens)
        parts.metrics.prompt_tokens.inc(prompt_tokens)
        return cls(parts, routed, record, flight, lambda: index.release(held), use)

    def first_token(self) -> None:
        """Prefill is over; the engine's own events take over from our guess in a moment."""
        now = self.parts.clock()
        self.record.first_data_s = now - self.load.began_at
        self.parts.mind.load.first_token(self.load, now)
        worker, hashes = self.routed.decision.replica.id, self.routed.hashes
        self.guess = self.parts.feeds.served(worker, hashes, began_at=self.load.began_at, now=now)
        self.parts.waiting.poke()
        self._release_later()

    def compare(self, usage: EngineUsage | None) -> None:
        """Hold the predicted hit against the engine's own word, where it gave one."""
        self.output_tokens = (usage.completion_tokens or 0) if usage else 0
        if usage is None or usage.cached_tokens is None or not self.routed.prompt.chains:
            return
        parts, decision = self.parts, self.routed.decision
        self.record.cached_tokens = usage.cached_tokens
        worker, predicted = decision.replica.id, decision.score.cached_tokens
        # Behind a queue a full cache has lost the prefix before its turn comes: that says nothing about the index.
        if predicted <= usage.cached_tokens or decision.score.queue_s <= _PROMPT_START_S:
            parts.trust.compared(worker, predicted, usage.cached_tokens, usage.prompt_tokens, parts.clock())
        if self.guess is not None:
            parts.feeds.answered(self.guess, usage.cached_tokens // decision.replica.block_size)
        parts.metrics.cached_tokens.inc(usage.cached_tokens)
        if worker in parts.discovery.fleet.replicas:
            parts.metrics.kv_error.labels(worker).set(parts.trust.error_share(worker))

    def end(self, *, is_error: bool = False, is_streamed: bool = False) -> None:
        """Over, however it ended; repeats change nothing.

        is_error     the engine failed it
        is_streamed  so that what came first of the answer was its first token
        """
        if self.load.ended:
            return
        record = self.record
        if record.first_data_s is None:
            self.use.ended(0.0, 0, None, is_error=is_error)
        else:
            report = record.decision.replica.report
            work_s = record.decision.score.prefill_s
            if report.decode_tokens_per_s:
                # A step decodes for all that run, so each is charged its share of it.
                work_s += self.output_tokens / report.decode_tokens_per_s / max(1, report.running)
            self.use.ended(work_s, self.output_tokens, record.first_data_s if is_streamed else None, is_error=is_error)
        self.parts.mind.load.end(self.load, self.parts.clock())
        self.parts.metrics.in_flight.dec()
        self.parts.waiting.poke()
        if not self.released:
            self.released = True
            self.release()

    def _release_later(self) -> None:
        if not self.released:
            self.released = True
            self.parts.speculations.add(self.release)
