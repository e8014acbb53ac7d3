"""The one record of a request at a replica, from its dispatch to its end, and the newest of these records."""

from collections import deque
from collections.abc import Sequence
from math import inf

import msgspec

from lorafleet.identity import BlockHash
from router.core.fleet import Replica
from router.core.kv.estimate import PredictedCache
from router.core.kv.index import KvIndex, PendingBlocks
from router.core.kv.prediction_accuracy import TrustState
from router.core.resolve import RequestTarget
from router.core.schedule.policy import Decision
from router.core.schedule.replica_book import LoadEntry
from router.protocols.usage import EngineUsage
from router.tokenizing.tokens import Source, Tokens

# Kept decisions, and seconds between two of them under load: they reach back ten seconds or more. All others are freed
# while they are in the processor's caches: 3 to 5 us less a request at 64 replicas.
_KEPT_DECISIONS, _KEPT_EVERY_S = 1000, 0.01
_KEPT_S = _KEPT_DECISIONS * _KEPT_EVERY_S


class DispatchedRequest(msgspec.Struct, eq=False):
    """A request at a replica. `router.request.dispatched` has the functions that begin, compare and end it.

    tenant           of the caller; empty: none
    at               wall clock
    trust            accuracy of the replica's predictions
    waited_s         in the router's queue, for what `queued_for` says; empty: it was sent at once
    load             its entry in the load book, given back exactly once
    is_trial         it tries a replica whose circuit is half-open
    predicted_tokens  of the prompt, predicted to be cached at the replica; 0 for an approximate prompt
    is_hashed        its prompt has block hashes
    prompt, hashes   token ids, and block hashes by that replica's block size and salt; dropped at the end, because a
                     thousand long ones, kept with the newest decisions, add up
    cache_salt       of the hashed request
    pending, index   blocks that count as cached until the engine's own events say so, and where; None: none
    estimate         what was recorded as cached at an engine that reports nothing
    first_data_s     from dispatch to first token or whole answer; None: there is none yet
    usage            the engine's; None: it has reported none yet
    cached_tokens    in that usage, where it is about this prompt alone
    lost_tokens      prompt tokens that only other callers' caches held; None: they were not looked up
    output_tokens    generated, as far as known
    is_error         the engine failed it
    is_computed      the engine has computed it, though maybe not to its end; it did not refuse it
    """

    request_id: str
    tenant: str
    target: RequestTarget
    decision: Decision
    replica: Replica
    at: float
    tokens_from: Source
    trust: TrustState
    waited_s: float
    load: LoadEntry
    is_trial: bool
    predicted_tokens: int
    is_hashed: bool
    prompt: Tokens
    hashes: Sequence[BlockHash]
    cache_salt: str = ""
    pending: PendingBlocks | None = None
    index: KvIndex | None = None
    estimate: PredictedCache | None = None
    queued_for: str = ""
    first_data_s: float | None = None
    usage: EngineUsage | None = None
    cached_tokens: int | None = None
    lost_tokens: int | None = None
    output_tokens: int = 0
    is_error: bool = False
    is_computed: bool = False


class Decisions(deque[DispatchedRequest]):
    """The newest decisions; under load a sample of them."""

    __slots__ = ("_full_at",)

    def __init__(self) -> None:
        super().__init__(maxlen=_KEPT_DECISIONS)
        self._full_at = -inf

    def add(self, record: DispatchedRequest, now: float) -> None:
        """Keep this record, unless so many came lately that the kept ones would reach back less than ten seconds."""
        full_at = max(self._full_at, now)
        if full_at - now < _KEPT_S:
            self._full_at = full_at + _KEPT_EVERY_S
            self.append(record)
