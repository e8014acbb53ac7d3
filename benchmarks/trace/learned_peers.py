"""Rules of peers that learn latencies from their own requests. Facts are theirs, the code is not."""

from collections.abc import Sequence
from random import Random
from typing import ClassVar

from benchmarks.trace.rules import Exact
from benchmarks.trace.token_peers import LlmDTokenLoad
from benchmarks.trace.workload import TraceRequest

Features = tuple[float, ...]


class LatencyModel:
    """Seconds as a linear function of features, by recursive least squares that slowly forgets."""

    forgetting: ClassVar[float] = 0.998
    prior: ClassVar[float] = 100.0

    def __init__(self, features: int) -> None:
        self.learned = 0
        self._weights = [0.0] * features
        self._inverse = [[self.prior * (i == j) for j in range(features)] for i in range(features)]

    def predict(self, features: Features) -> float:
        """Seconds; never below a millisecond."""
        return max(0.001, sum(w * x for w, x in zip(self._weights, features, strict=True)))

    def learn(self, features: Features, seconds: float) -> None:
        """One more measurement."""
        self.learned += 1
        rows = self._inverse
        gain = [sum(cell * x for cell, x in zip(row, features, strict=True)) for row in rows]
        scale = self.forgetting + sum(g * x for g, x in zip(gain, features, strict=True))
        error = seconds - sum(w * x for w, x in zip(self._weights, features, strict=True))
        self._weights = [w + g / scale * error for w, g in zip(self._weights, gain, strict=True)]
        self._inverse = [
            [(cell - g * h / scale) / self.forgetting for cell, h in zip(row, gain, strict=True)]
            for row, g in zip(rows, gain, strict=True)
        ]


def state_features(waiting: int, running: int, kv_usage: float, prompt: int, uncached: float, behind: int) -> Features:
    """What llm-d's predictor knows of a request at a pod, with the product that its trees find by themselves.

    uncached  prompt tokens that are not cached; behind: tokens in prefill there
    """
    return 1.0, waiting / 10, running / 10, kv_usage, prompt / 10_000, uncached / 10_000, behind / 10_000


class LlmDPredicted(LlmDTokenLoad):
    """llm-d's predicted latency (requestcontrol/dataproducer/predictedlatency and scheduling/scorer/latency).

    First token and time per token are predicted from waiting, running, KV in use, prompt, cached share and tokens in
    prefill, by one model for all pods, learned online. Without objectives the least of 0.8 x first token + 0.2 x time
    per token wins, each scaled to its range, among those that pass the prefix filter; before 100 measurements its
    composite of KV in use, queue and prefix. Theirs are trees by XGBoost; a linear model is ours. Their guide draws by
    score; the best score is taken here.
    """

    first_token_weight: ClassVar[float] = 0.8
    least_learned: ClassVar[int] = 100

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        size = len(state_features(0, 0, 0.0, 0, 0.0, 0))
        self.first_token_model, self.token_model = LatencyModel(size), LatencyModel(size)
        self._behind = [0] * workers
        self._seen: dict[TraceRequest, list[Features]] = {}

    def choose(self, request: TraceRequest) -> int:
        """The least predicted latency."""
        shares = self.prefix_shares(request)
        seen = self._seen[request] = [self._features(request, n, shares[n]) for n in range(self.workers)]
        if self.first_token_model.learned < self.least_learned:
            return self.least([_composite(features, share) for features, share in zip(seen, shares, strict=True)])
        first_token_s = [self.first_token_model.predict(features) for features in seen]
        among = self.sticky(request, first_token_s)
        first = _scaled([first_token_s[n] for n in among])
        token = _scaled([self.token_model.predict(seen[n]) for n in among])
        weight = self.first_token_weight if any(token) else 1.0
        costs = dict(
            zip(among, [weight * f + (1 - weight) * t for f, t in zip(first, token, strict=True)], strict=True)
        )
        return self.least([costs.get(n, 2.0) for n in range(self.workers)])

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the accounts; what was seen of the worker is what its first token will teach."""
        super().sent(request, worker)
        self._seen[request] = [self._seen[request][worker]]
        self._behind[worker] += request.prompt_tokens

    def first_token(self, request: TraceRequest) -> None:
        """A measurement."""
        self._behind[request.worker] -= request.prompt_tokens
        self.first_token_model.learn(self._seen[request][0], request.first_token - request.sent)

    def ended(self, request: TraceRequest) -> None:
        """A measurement of its time per token."""
        super().ended(request)
        (features,) = self._seen.pop(request)
        if request.first_token < 0:
            self._behind[request.worker] -= request.prompt_tokens
        elif request.output_tokens > 1 and request.last_token > 0:
            gaps = request.output_tokens - 1
            self.token_model.learn(features, (request.last_token - request.first_token) / gaps)

    def _features(self, request: TraceRequest, worker: int, share: float) -> Features:
        reading = self.readings[worker]
        waiting, running, usage = (reading.waiting, reading.running, reading.kv_usage) if reading else (0, 0, 0.0)
        prompt = request.prompt_tokens
        return state_features(waiting, running, usage, prompt, prompt * (1 - share), self._behind[worker])


class Lodestar(Exact):
    """Lodestar (arXiv 2606.00946): the engine whose own model, learned online, predicts the soonest first token.

    Its abstract says as much: at each request a snapshot of the instances' state and of the request, and a predictor
    trained by what is observed. Features and model are ours: those of llm-d's predictor, with the tokens that are
    cached by KV events and those in work by the router's own account. Until 30 first tokens of an engine, the least
    busy of those without is taken.
    """

    least_learned: ClassVar[int] = 30

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        size = len(state_features(0, 0, 0.0, 0, 0.0, 0))
        self.models = [LatencyModel(size) for _ in range(workers)]
        self._behind = [0] * workers
        self._mine: dict[TraceRequest, tuple[Features, int]] = {}

    def choose(self, request: TraceRequest) -> int:
        """The soonest first token."""
        uncached = self.uncached(request)
        seen = [self._features(request, n, uncached[n]) for n in range(self.workers)]
        learned = [model.learned for model in self.models]
        if min(learned) < self.least_learned:
            busy = [self.in_flight[n] if learned[n] < self.least_learned else 1 << 30 for n in range(self.workers)]
            worker = self.least(busy)
        else:
            worker = self.least([model.predict(f) for model, f in zip(self.models, seen, strict=True)])
        self._mine[request] = seen[worker], uncached[worker]
        return worker

    def sent(self, request: TraceRequest, worker: int) -> None:
        """Into the account."""
        self._behind[worker] += self._mine[request][1]

    def first_token(self, request: TraceRequest) -> None:
        """A measurement."""
        features, tokens = self._mine.pop(request)
        self._behind[request.worker] -= tokens
        self.models[request.worker].learn(features, request.first_token - request.sent)

    def ended(self, request: TraceRequest) -> None:
        """Out of the account, if its client has left before."""
        if request in self._mine:
            self._behind[request.worker] -= self._mine.pop(request)[1]

    def _features(self, request: TraceRequest, worker: int, uncached: int) -> Features:
        reading = self.readings[worker]
        waiting, usage = (reading.waiting, reading.kv_usage) if reading else (0, 0.0)
        return state_features(
            waiting, self.in_flight[worker], usage, request.prompt_tokens, uncached, self._behind[worker]
        )


def _composite(features: Features, share: float) -> float:
    """llm-d's score without predictions, as a cost: KV in use and queue less the cached share."""
    return features[3] + features[1] - share


def _scaled(values: Sequence[float]) -> list[float]:
    """Each as a share of their range; zeros where they are all equal."""
    least, most = min(values), max(values)
    return [(value - least) / (most - least) if most > least else 0.0 for value in values]
