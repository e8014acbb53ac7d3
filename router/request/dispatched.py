"""A request at a replica, from dispatch to end: its load, and its predicted cached tokens against the reported ones."""

from time import time

from router.core.kv.estimate import PredictedCache
from router.core.kv.index import PendingBlocks
from router.core.resolve import RequestTarget
from router.core.schedule.policy import Decision
from router.core.schedule.request import HashedRequest
from router.protocols.usage import EngineUsage
from router.request.services import RequestRecord, Services
from router.tokenizing.tokens import Source

# Seconds of queue: behind a shorter one the request began with the cache as it was when it was decided.
_PROMPT_START_S = 0.1


class DispatchedRequest:
    """A request at a replica: its load entry, pending blocks and usage count, each given back exactly once.

    replica           of the decision
    hashes            block hashes of the prompt, by that replica's block size and salt
    predicted_tokens  of the prompt, predicted to be cached at the replica; 0 for an approximate prompt
    record            what is kept of it when it is over
    load              its entry in the load book
    """

    __slots__ = (
        "_estimate",
        "_hold",
        "_index",
        "_services",
        "_use",
        "decision",
        "hashed",
        "hashes",
        "load",
        "predicted_tokens",
        "record",
        "replica",
        "target",
    )

    def __init__(  # noqa: PLR0917  (for each request, and names take time)
        self,
        services: Services,
        request_id: str,
        target: RequestTarget,
        hashed: HashedRequest,
        tokens_from: Source,
        asked_at: float,
        is_streamed: bool,
        decision: Decision,
    ) -> None:
        """Count the request at its replica (load, pending blocks, usage, metrics), and add its decision to those kept.

        asked_at  by Services.clock, when it was ready to be sent: since then it has waited
        """
        now = decision.snapshot.now
        replica, score, routing = decision.replica, decision.score, hashed.request
        worker, waited_s = replica.id, now - asked_at
        # First, because it runs the shadow policies: one that fails must leave nothing to give back.
        self.load = services.scheduler.record_dispatch(decision, now)
        self.load.is_streamed = is_streamed
        self._services = services
        self.target = target
        self.hashed = hashed
        self.decision = decision
        self.replica = replica
        is_approximate = routing.is_approximate
        trust = "estimate" if is_approximate else services.accuracy.state(worker)
        self.record = RequestRecord(request_id, time(), tokens_from, decision, trust, waited_s)
        services.decisions.add(self.record, now)
        self.hashes = hashed.chain(worker, replica.block_size) if replica.caches_prefixes else ()
        self._hold: PendingBlocks | None = None
        if self.hashes:
            self._index = services.feeds.index(replica.base_model, replica.block_size, is_approximate=is_approximate)
            ranks = decision.snapshot.ranks
            member = services.feeds.member_name(worker, ranks.get(worker)) if ranks else worker
            self._hold = self._index.add_pending(member, self.hashes)
        is_known = bool(hashed.chains) and not is_approximate
        prompt_tokens = routing.prompt_tokens if is_known else 0
        self.predicted_tokens = score.cached_tokens if is_known else 0
        # By the engine's name of the model.
        self._use = services.usage.record_dispatch(worker, routing.engine_name or target.base_model, prompt_tokens, now)
        self._estimate: PredictedCache | None = None
        metrics = services.metrics
        metrics.waited.observe(waited_s)
        metrics.live_cost.value += score.cost_s
        metrics.predicted_tokens.value += self.predicted_tokens
        metrics.prompt_tokens.value += prompt_tokens

    def record_first_token(self) -> None:
        """Record a stream's first token: end its prefill in the load book, and wake the queue.

        Also sets the record's `first_data_s` and hands over the pending blocks, see `_record_prefilled`.
        """
        services, now = self._services, self._services.clock()
        services.scheduler.load.record_first_token(self.load, now)
        services.queue.poke()
        self._record_prefilled(now)

    def record_whole_answer(self) -> None:
        """Record that a whole answer has come; `end` follows, which ends its prefill in the load book.

        Sets the record's `first_data_s` and hands over the pending blocks, see `_record_prefilled`.
        """
        self._record_prefilled(self._services.clock())

    def _record_prefilled(self, now: float) -> None:
        """Set `first_data_s`, and have the pending blocks removed a little later: the engine's own events follow.

        For an estimated cache, or an approximate prompt, record the blocks as cached in the feeds.
        """
        services, record, began_at = self._services, self.record, self.load.began_at
        record.first_data_s = now - began_at
        is_approximate = self.hashed.request.is_approximate
        if record.trust == "estimate" and not is_approximate:
            self._estimate = services.feeds.record_served(self.replica.id, self.hashes, began_at=began_at, now=now)
        if self._hold is not None:
            if is_approximate:
                name = self._hold.worker
                services.feeds.record_served_approximate(self.replica, name, self.hashes, began_at=began_at, now=now)
            services.speculations.add(self._index.remove_pending, self._hold)
            self._hold = None

    def compare(self, usage: EngineUsage, *, is_one_of_many: bool = False) -> bool | None:
        """Compare predicted cached tokens with those in the engine's usage: update accuracy, feed, metrics and record.

        Returns whether they agree; None if nothing follows for the prompt's ids. Nothing is compared if the engine
        reports none, or the prompt was not hashed; of an approximate one only the record changes.

        is_one_of_many  the engine prefilled the prompt several times, and reports one of them, not the first
        """
        cached = usage.cached_tokens
        if cached is None:
            return None
        if self.target.adapter is not None and not is_one_of_many:
            adapters = self._services.metrics.adapters
            adapters.of(self.target.adapter.lora_id).add_tokens(usage.prompt_tokens, cached)
        if not self.hashed.chains:
            return None
        if self.hashed.request.is_approximate:
            # Shown only: blocks of an approximate prompt are not the engine's, so nothing was predicted.
            self.record.cached_tokens = None if is_one_of_many else cached
            return None
        services, score = self._services, self.decision.score
        services.metrics.cached_tokens.value += cached
        if is_one_of_many:
            return None
        self.record.cached_tokens = cached
        predicted = score.cached_tokens
        # Behind a queue a full cache may have lost the prefix by then: that says nothing about the index.
        agrees = None
        if predicted <= cached or score.queue_s <= _PROMPT_START_S:
            agrees = services.accuracy.record_comparison(
                self.replica.id, predicted, cached, usage.prompt_tokens, services.clock()
            )
        if self._estimate is not None:
            services.feeds.correct_estimate(self._estimate, cached // self.replica.block_size)
        return agrees

    def end(self, *, is_error: bool = False, is_streamed: bool = False, output_tokens: int = 0) -> float:
        """Give back the load entry, pending blocks and usage count, and wake the queue. Safe to call twice.

        Returns the request's share of the engine's seconds of decoding; 0.0: not known.

        is_error       the engine failed the request
        is_streamed    the first data of the answer was its first token
        output_tokens  generated tokens, as far as is known
        """
        if self.load.ended:
            return 0.0
        services, first_data_s = self._services, self.record.first_data_s
        now, decode_s = services.clock(), 0.0
        if first_data_s is None:
            self._use.record_end(0.0, 0, None, now, is_error)
        else:
            report = self.replica.report
            if report.decode_tokens_per_s:
                # A step decodes one token of each running request, so each is charged its share.
                decode_s = output_tokens / report.decode_tokens_per_s / max(1, report.running)
            work_s = self.decision.score.prefill_s + decode_s
            self._use.record_end(work_s, output_tokens, first_data_s if is_streamed else None, now, is_error)
        services.scheduler.load.remove(self.load, now, is_answered=first_data_s is not None)
        services.queue.poke()
        if self._hold is not None:
            self._index.remove_pending(self._hold)
            self._hold = None
        return decode_s
