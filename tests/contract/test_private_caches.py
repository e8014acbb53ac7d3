"""An attacker with guesses at another tenant's prompt, on real vLLM: what `cached_tokens` tells it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.isolation.attack import area_under_curve
from lorafleet.keys.key_files import hash_key
from tests.contract.conftest import FRESH
from tests.contract.surface import LORA_ID, DirectEngine, control_of, engine_with_adapter, routed
from tests.engines import Kind, RunningEngine
from tests.router.doubles import BASE, with_worker_key

pytestmark = pytest.mark.vllm

GUESSES = 20


@pytest.fixture(scope="module")
def direct(engine_of: Callable[[Kind], RunningEngine], adapters: dict[str, Path]) -> Iterator[DirectEngine]:
    with engine_with_adapter(engine_of("vllm"), adapters["sql"]) as direct:
        yield direct


async def cached_tokens(client: httpx.AsyncClient, key: str, model: str, prompt: str, **more: str) -> tuple[int, int]:
    """Cached tokens of a completion for this key: as predicted, and as the engine reports them."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, **more}
    answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(answer.headers["x-lorafleet-cached-tokens"]), details.get("cached_tokens") or 0


@pytest.mark.parametrize(("cache", "model"), [("tenant", LORA_ID), ("tenant", BASE), ("shared", BASE)])
async def test_guess_at_another_tenants_prompt_is_told_apart_in_a_shared_cache_alone(
    direct: DirectEngine, model_dir: Path, tmp_path: Path, cache: str, model: str
) -> None:
    keys = tmp_path / "keys.yaml"
    rows = [f"- {{sha256: {hash_key(name)}, tenant: {name}, scopes: [infer]}}\n" for name in ("acme", "mallory")]
    keys.write_text("keys:\n" + "".join(rows) + f"- {{sha256: {hash_key('nobodys')}, scopes: [infer]}}\n")
    control = control_of(direct)
    control.cache = cache  # type: ignore[assignment]
    async with routed(direct, model_dir, control=control, **with_worker_key({"key_files": (keys,)})) as (client, _):
        hits, misses = [], []
        for number in range(GUESSES):
            secret = f"Patient {next(FRESH)} of ward {number}: " + "the result of the test is positive. " * 6
            wrong = secret.replace("Patient", "Visitor")
            assert (await cached_tokens(client, "acme", model, secret))[1] == 0
            misses.append((await cached_tokens(client, "mallory", model, wrong))[1])
            hits.append((await cached_tokens(client, "mallory", model, secret))[1])
            predicted, reported = await cached_tokens(client, "acme", model, secret)
            assert predicted == reported > 0, "whose prompt it is finds it, as predicted"
            # The salt that a tenant's requests have at the engine leads nobody there, not even by the same route.
            assert (await cached_tokens(client, "mallory", model, secret, cache_salt=str(number)))[1] == 0
        assert area_under_curve(hits, misses) == (0.5 if cache == "tenant" else 1.0)
