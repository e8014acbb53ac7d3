"""Plans the requests of a benchmark: when each is sent, for which model, and with which prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request. `at_s`: seconds from the start; `tokens`: the prompt's ids."""

    at_s: float
    model: str
    tokens: tuple[int, ...]


def arrival_times(count: int, rate: float | None, rng: Random) -> list[float]:
    """When each request begins, in seconds: a Poisson process; all at once without a rate.

    The gaps are scaled so that the last request begins at count / rate: else a short run has another rate by chance.
    """
    if rate is None:
        return [0.0] * count
    times = list(accumulate(rng.expovariate(rate) for _ in range(count)))
    scale = count / rate / times[-1] if times and times[-1] else 1.0
    return [at * scale for at in times]


def zipf_weights(count: int, exponent: float) -> list[float]:
    """The share of each of `count` models: the n-th has 1 / n^exponent of the first; 0 is the same for all."""
    weights = [1.0 / rank**exponent for rank in range(1, count + 1)]
    whole = sum(weights)
    return [weight / whole for weight in weights]


def planned_requests(
    models: Sequence[str],
    vocabulary: Sequence[int],
    *,
    count: int,
    rate: float | None,
    input_tokens: int,
    shared_prefix: int,
    zipf: float,
    seed: int,
) -> Iterator[PlannedRequest]:
    """The requests of a run, in the order of their arrival; the same for the same seed.

    Each prompt is drawn when the iterator reaches its request, because all prompts of a long run would fill the memory.

    vocabulary     token ids that prompts are drawn from
    shared_prefix  first tokens of a prompt that all prompts of the same model share
    """
    rng = Random(seed)
    prefixes = {model: tuple(rng.choices(vocabulary, k=min(shared_prefix, input_tokens))) for model in models}
    times = arrival_times(count, rate, rng)
    chosen = rng.choices(models, weights=zipf_weights(len(models), zipf), k=count)
    for at_s, model in zip(times, chosen, strict=True):
        prefix = prefixes[model]
        yield PlannedRequest(at_s, model, prefix + tuple(rng.choices(vocabulary, k=input_tokens - len(prefix))))


def sample_text(seed: int, words: int = 2000) -> str:
    """Text of random words, whose token ids are the vocabulary of the prompts."""
    rng = Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))) for _ in range(words))
