"""An attacker of one tenant that guesses prompts of another, through a real router at a real engine."""

import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from random import Random

import httpx

from benchmarks.local_fleets import local_fleet
from lorafleet.keys.key_files import hash_key

VICTIM, ATTACKER, OPERATOR = "acme", "mallory", "operator"
_WORDS = [
    "the",
    "patient",
    "account",
    "of",
    "ward",
    "result",
    "order",
    "is",
    "was",
    "not",
    "paid",
    "late",
    "positive",
    "negative",
    "due",
    "before",
    "after",
    "with",
    "from",
    "in",
    "may",
    "june",
    "july",
    "total",
    "amount",
    "refused",
    "granted",
    "transfer",
    "balance",
    "loan",
    "claim",
    "test",
    "second",
    "third",
    "doctor",
    "report",
    "letter",
]
# About as long as the demo's base model takes: a prefill that the first-token time shows.
_PROMPT_WORDS = 1600


@dataclass(frozen=True, slots=True)
class SeenAnswer:
    """One streamed completion, as its client sees it. `predicted`: cached tokens by the router's header."""

    first_token_s: float
    cached_tokens: int
    predicted: int


@dataclass(slots=True)
class Guesses:
    """Answers to the attacker's right and wrong guesses, and how many predictions for the victim were exact."""

    right: list[SeenAnswer] = field(default_factory=list)
    wrong: list[SeenAnswer] = field(default_factory=list)
    compared: int = 0
    exact: int = 0

    @property
    def by_cached_tokens(self) -> float:
        """The area under the attacker's curve by `cached_tokens`."""
        return area_under_curve([one.cached_tokens for one in self.right], [one.cached_tokens for one in self.wrong])

    @property
    def by_first_token(self) -> float:
        """The same by the time to the first token: a hit is quicker."""
        return area_under_curve([-one.first_token_s for one in self.right], [-one.first_token_s for one in self.wrong])

    @property
    def standard_error(self) -> float:
        """Standard error of the area under the curve where guesses tell nothing (Mann-Whitney)."""
        right, wrong = len(self.right), len(self.wrong)
        return sqrt((right + wrong + 1) / (12 * right * wrong))


def area_under_curve(right: Sequence[float], wrong: Sequence[float]) -> float:
    """The chance that a right guess shows more than a wrong one, ties counted half: 0.5 tells nothing, 1.0 all."""
    ordered = sorted(wrong)
    above = sum(bisect_left(ordered, one) + bisect_right(ordered, one) for one in right)
    return above / (2 * len(right) * len(wrong))


@contextmanager
def attacked_fleet(engine: str, folder: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of the router and the orchestrator of a fleet of one worker, with a key for each of the three parts."""
    keys = folder / "keys.yaml"
    rows = [f"- {{sha256: {hash_key(name)}, tenant: {name}, scopes: [infer]}}\n" for name in (VICTIM, ATTACKER)]
    keys.write_text(f"keys:\n{''.join(rows)}- {{sha256: {hash_key(OPERATOR)}, scopes: [admin]}}\n")
    options = ["--key-file", str(keys)]
    with ExitStack() as stack:
        urls, _ = stack.enter_context(local_fleet(folder / "state", engine, workers=1, options=options))
        router, orchestrator = (
            stack.enter_context(httpx.Client(base_url=urls[name], timeout=120, trust_env=False))
            for name in ("router", "orchestrator")
        )
        yield router, orchestrator


def set_cache(orchestrator: httpx.Client, cache: str) -> None:
    """Set who shares cached prompts; in force at the router when this returns."""
    orchestrator.patch("/v1/policy", json={"cache": cache}, headers=_bearer(OPERATOR)).raise_for_status()


def guess(router: httpx.Client, count: int, *, predictions: int, seed: int) -> Guesses:
    """Let the victim ask `count` prompts, and the attacker guess each of them, and as many that nobody has asked.

    predictions  of the victim's prompts, so many are asked again and their predictions compared
    """
    rng, found = Random(seed), Guesses()
    model = router.get("/v1/models", headers=_bearer(ATTACKER)).raise_for_status().json()["data"][0]["id"]
    for key in (VICTIM, ATTACKER) * 4:
        ask(router, key, model, prompt(rng))
    for number in range(count):
        secret, other = prompt(rng), prompt(rng)
        ask(router, VICTIM, model, secret)
        guesses = [(secret, found.right), (other, found.wrong)]
        rng.shuffle(guesses)
        for text, into in guesses:
            into.append(ask(router, ATTACKER, model, text))
        if number < predictions:
            again = ask(router, VICTIM, model, secret)
            found.compared += 1
            found.exact += again.predicted == again.cached_tokens > 0
    return found


def prompt(rng: Random) -> str:
    """A prompt of random words."""
    return " ".join(rng.choices(_WORDS, k=_PROMPT_WORDS))


def ask(router: httpx.Client, key: str, model: str, text: str) -> SeenAnswer:
    """Stream one token of a completion with this key."""
    body = {"model": model, "prompt": text, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    began, first_token_s, cached_tokens = time.perf_counter(), 0.0, 0
    with router.stream("POST", "/v1/completions", json=body, headers=_bearer(key)) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            first_token_s = first_token_s or time.perf_counter() - began
            usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
            cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or cached_tokens
        return SeenAnswer(first_token_s, cached_tokens, int(answer.headers["x-lorafleet-cached-tokens"]))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
