"""The canary: whether an engine's answers change with an adapter, by the log-probabilities of one token.

An engine without our plugin does not say which modules of an adapter it has. So the same short prompt is sent with and
without the adapter. Log-probabilities that are equal to the last bit are the base model's: the softmax sums over the
whole vocabulary, so any change of any logit shows in each of them.

A busy engine computes a request together with others, and then two answers to one request may differ in their last
bits. So a difference counts only if it is larger than the differences among answers of one model, and an equality
counts however the other answers differ.
"""

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Literal, TypeAlias, TypeVar

from lorafleet.engine.lora_weights import ZERO_NOTE, WeightsEffect

T = TypeVar("T")
Fingerprint: TypeAlias = tuple[float, ...]
"""Numbers of one answer that depend on the whole model: log-probabilities, scores of classes, or an embedding."""
Outcome: TypeAlias = Literal["seen", "none", "unknown"]
"""seen: the adapter changes the answers; none: it does not; unknown: neither is proved."""
Verdict: TypeAlias = Literal["equal", "different", "unclear"]
"""What the answers to one prompt show."""
CanaryMode: TypeAlias = Literal["refuse", "warn", "off"]
"""What to do with an adapter that changes no answer; off: no canary is run."""
AskEngine: TypeAlias = Callable[[str | None, Sequence[int]], Awaitable[Fingerprint | None]]
"""Sends a prompt to an adapter by its engine name, or to the base model (None).

Answers None if the engine gives no such numbers. Raises EngineSilent.
"""

ReadNumbers: TypeAlias = Callable[[Any], Fingerprint | None]
"""Reads the numbers in an answer's JSON; None for an answer without them."""
PostQuestion: TypeAlias = Callable[[str, Mapping[str, Any], ReadNumbers], Awaitable[Fingerprint | None]]
"""Posts a body to a route, and reads the numbers in the answer; None without numbers. Raises EngineSilent."""

PROMPTS: Sequence[Sequence[int]] = (
    (72, 214, 33, 167, 95, 240, 51, 188, 126, 19, 203, 84),
    (231, 45, 109, 176, 62, 150, 97, 28, 219, 134, 77, 191),
    (17, 142, 205, 68, 233, 111, 39, 180, 56, 161, 248, 90),
)
"""Token ids that every vocabulary has. Each prompt is shorter than any engine's block, so it leaves none in a cache."""
MOST_READINGS = 4
"""Answers of each of the two models to one prompt, at most."""
LOGPROBS = 5
_SHOWN = 64
_BUSY = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_NOISE_FACTOR = 4.0
"""A difference must be so many times that among answers of one model. A guess; nothing is refused by it."""
_BEYOND_NOISE = 0.25
"""A log-probability differs by less between batches in bfloat16: the numbers there are 2**-5 to 2**-3 apart."""
_SURE_READINGS = 3
"""Answers of each model that must lie apart before a smaller difference counts."""


class EngineSilent(Exception):
    """The engine did not answer, or failed."""


def answered_numbers(where: str, status: int, content: bytes, read: Callable[[Any], T]) -> T | None:
    """The numbers in an engine's answer; None for another 4xx, and for an answer without numbers.

    where   the request's URL, for errors
    raises  EngineSilent if the engine failed (5xx), or was too busy (408, 429)
    """
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _BUSY:
        raise EngineSilent(f"{where}: HTTP {status}")
    if status >= HTTPStatus.MULTIPLE_CHOICES:
        return None
    try:
        return read(json.loads(content))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The canary's outcome for one adapter, and in words what was found; `requests`: how many the engine got."""

    outcome: Outcome
    found: str
    requests: int = 0


@dataclass(frozen=True, slots=True)
class ShownEffect:
    """What an engine's answers show of an adapter: its effect, a note for operators, and why it must not be served."""

    effect: Literal["", "seen", "zero", "unknown"] = ""
    note: str = ""
    refusal: str = ""


@dataclass(slots=True)
class BaseReadings:
    """Answers of an engine's base model by prompt, newest last. Those of an earlier start are of another engine."""

    boot_id: str = ""
    by_prompt: dict[int, list[Fingerprint]] = field(default_factory=lambda: defaultdict(list))

    def of_boot(self, boot_id: str) -> "BaseReadings":
        """These readings if they are of this start of the engine, else none."""
        return self if boot_id == self.boot_id else BaseReadings(boot_id)

    def add(self, prompt: int, reading: Fingerprint) -> None:
        """Add an answer; the oldest of more than `MOST_READINGS` is dropped."""
        self.by_prompt[prompt] = [*self.by_prompt[prompt], reading][-MOST_READINGS:]


def compare_readings(base: Sequence[Fingerprint], adapter: Sequence[Fingerprint]) -> Verdict:
    """Whether the answers to one prompt show the adapter.

    equal      one of the adapter's answers is one of the base model's, bit by bit
    different  the answers of the one lie apart from those of the other: further than answers of one model from each
               other, and either so far as no noise reaches, or in three answers of each
    unclear    more answers are needed
    """
    if any(all(map(math.isfinite, answer)) for answer in set(base) & set(adapter)):
        return "equal"
    if len(base) < 2 or not adapter:
        return "unclear"
    noise = max(_largest_distance(base), _largest_distance(adapter))
    nearest = min(_fingerprint_distance(one, other) for one in base for other in adapter)
    has_enough = nearest >= _BEYOND_NOISE or min(len(base), len(adapter)) >= _SURE_READINGS
    return "different" if has_enough and nearest > _NOISE_FACTOR * noise else "unclear"


def outcome_of(verdicts: Sequence[Verdict]) -> Outcome | None:
    """The outcome after these verdicts on the first prompts; None if the next prompt must be sent."""
    if "different" in verdicts:
        return "seen"
    if len(verdicts) < len(PROMPTS):
        return None
    return "none" if all(verdict == "equal" for verdict in verdicts) else "unknown"


async def run_canary(ask: AskEngine, adapter: str, *, readings: BaseReadings, timeout_s: float) -> CanaryResult:
    """Send the canary's prompts and return its outcome; adds the base model's answers to `readings`.

    Never raises: an engine that is silent, too busy, or gives no numbers is `unknown`.
    """
    verdicts: list[Verdict] = []
    requests = 0

    async def read(adapter_or_base: str | None, prompt: int) -> Fingerprint:
        """One answer of the engine. Raises EngineSilent, also for an answer without numbers."""
        nonlocal requests
        requests += 1
        answer = await ask(adapter_or_base, PROMPTS[prompt])
        if answer is None:
            raise EngineSilent("the engine gives no log-probabilities, scores or embeddings")
        return answer

    try:
        async with asyncio.timeout(timeout_s):
            while (outcome := outcome_of(verdicts)) is None:
                verdicts.append(await _verdict_on(len(verdicts), read, adapter, readings))
    except TimeoutError:
        return CanaryResult("unknown", f"the engine did not answer within {timeout_s:g} s", requests)
    except EngineSilent as exc:
        return CanaryResult("unknown", str(exc), requests)
    return CanaryResult(outcome, _outcome_text(outcome), requests)


async def _verdict_on(
    prompt: int, read: Callable[[str | None, int], Awaitable[Fingerprint]], adapter: str, readings: BaseReadings
) -> Verdict:
    """Read answers to one prompt until they show something, at most `MOST_READINGS` of each model."""
    answers: list[Fingerprint] = []
    verdict: Verdict = "unclear"
    for _ in range(2 * MOST_READINGS):
        base = readings.by_prompt[prompt]
        if answers and (len(base) < 2 or len(base) <= len(answers)):
            readings.add(prompt, await read(None, prompt))
        else:
            answers.append(await read(adapter, prompt))
        verdict = compare_readings(readings.by_prompt[prompt], answers)
        if verdict != "unclear":
            break
    return verdict


def shown_effect(result: CanaryResult, weights: WeightsEffect | None, mode: CanaryMode) -> ShownEffect:
    """What follows from a canary's result. Only answers without any effect, of weights that must have one, refuse.

    weights  what the adapter's weights can change; None: its files cannot be read here
    """
    if result.outcome == "seen":
        return ShownEffect("seen")
    if weights == "none":
        return ShownEffect("zero", ZERO_NOTE)
    unproved = f"its effect is not proved: {result.found}"
    if result.outcome == "unknown":
        return ShownEffect("unknown", unproved)
    if weights == "small":
        return ShownEffect("unknown", f"{unproved}, but its weights are too small to change them for sure")
    if mode == "warn":
        return ShownEffect("unknown", unproved)
    of_weights = "its weights are not zero" if weights else "its files cannot be read here: its weights may be zero"
    return ShownEffect(refusal=f"the engine answers by the base model: {result.found}, and {of_weights}")


def _outcome_text(outcome: Outcome) -> str:
    """An outcome in words."""
    return {
        "seen": "the engine's answers change with the adapter",
        "none": f"the answers to {len(PROMPTS)} prompts are the base model's to the last bit",
        "unknown": "the engine's answers to one request differ among themselves as much as with the adapter",
    }[outcome]


def _largest_distance(readings: Sequence[Fingerprint]) -> float:
    """The largest distance between two of the readings; 0.0 for one."""
    return max((_fingerprint_distance(one, other) for one in readings for other in readings), default=0.0)


def _fingerprint_distance(one: Fingerprint, other: Fingerprint) -> float:
    """The largest difference between two numbers in the same place; infinite for readings of different lengths."""
    if len(one) != len(other) or not all(map(math.isfinite, (*one, *other))):
        return 0.0 if one == other else math.inf
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# --- vLLM's routes, which the sim has, too -------------------------------------------------------------------------

VLLM_ROUTES = ("/v1/completions", "/classify", "/v1/embeddings", "/pooling")
"""In this order: a model that generates answers the first one, pooling models one of the others."""


def vllm_body(route: str, model: str, prompt: Sequence[int]) -> dict[str, Any]:
    """The request's body for one of `VLLM_ROUTES`."""
    if route == "/v1/completions":
        shape = {"max_tokens": 1, "temperature": 0, "logprobs": LOGPROBS, "return_tokens_as_token_ids": True}
        return {"model": model, "prompt": list(prompt), **shape}
    return {"model": model, "input": list(prompt)}


class VllmQuestions:
    """Asks a vLLM for numbers by the first of `VLLM_ROUTES` that gives some, and from then on by that one alone."""

    def __init__(self) -> None:
        self._routes: Sequence[str] = VLLM_ROUTES

    async def ask(self, post: PostQuestion, model: str, prompt: Sequence[int]) -> Fingerprint | None:
        """The model's numbers for a prompt; None if it gives none. Raises EngineSilent."""
        for route in self._routes:
            numbers = await post(route, vllm_body(route, model, prompt), partial(vllm_fingerprint, route))
            if numbers is not None:
                self._routes = (route,)
                return numbers
        return None


def vllm_fingerprint(route: str, answer: Any) -> Fingerprint | None:
    """The numbers in an answer of one of `VLLM_ROUTES`; None for an answer without them."""
    try:
        if route == "/v1/completions":
            top: Mapping[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
            return tuple(sorted(map(float, top.values()), reverse=True)) or None
        entry = answer["data"][0]
        numbers = next(entry[name] for name in ("probs", "embedding", "data") if name in entry)
        return tuple(_flattened_numbers(numbers))[:_SHOWN] or None
    except (KeyError, IndexError, TypeError, ValueError, StopIteration):
        return None


def _flattened_numbers(numbers: Any) -> list[float]:
    """The numbers in lists of lists, in order. Raises TypeError and ValueError for anything else."""
    if isinstance(numbers, list):
        return [number for part in numbers for number in _flattened_numbers(part)]
    return [float(numbers)]


# --- SGLang's route ----------------------------------------------------------------------------------------------

SGLANG_ROUTE = "/generate"


def sglang_body(adapter: str | None, prompt: Sequence[int]) -> dict[str, Any]:
    """The request's body for SGLang's own route; `adapter` None: the base model."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    options = {"return_logprob": True, "top_logprobs_num": LOGPROBS, "logprob_start_len": -1}
    return {"input_ids": list(prompt), "sampling_params": sampling, **options, "lora_path": adapter}


def sglang_fingerprint(answer: Any) -> Fingerprint | None:
    """The log-probabilities in SGLang's answer; None for an answer without them.

    source  0.5.23 managers/tokenizer_manager.py: [log-probability, token id, text] for each token
    """
    try:
        top = answer["meta_info"]["output_top_logprobs"][0]
        return tuple(sorted((float(entry[0]) for entry in top), reverse=True)) or None
    except (KeyError, IndexError, TypeError, ValueError):
        return None


PROBE_REQUESTS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/pooling", {"input": "a"}),
)
"""Path and fields: one request for models that generate, one for models that pool, which answer the first with 404."""
