"""Predictions for models with sliding windows (Gemma 3, gpt-oss), compared with vLLM's own cache manager."""

from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lorafleet.identity import block_hashes, root_hash
from lorafleet.kv.ledger import BlockLedger

BLOCK = 16
WINDOW = 50
SHARED = 6
pytestmark = [pytest.mark.thorough, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class CachedBlocks:
    """The blocks on the device."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def add(self, _tier: str, hashes: list[int]) -> None:
        self.blocks.update(hashes)

    def drop(self, _tier: str, hashes: list[int]) -> None:
        self.blocks.difference_update(hashes)

    def clear(self) -> None:
        self.blocks.clear()


def cache_manager(groups: str, blocks: int, retention: int | None) -> Any:
    """vLLM's cache manager with a KV group for each letter: `w` keeps a window, `f` everything.

    retention  vLLM's `--prefix-cache-retention-interval`; None keeps every window, 0 (its default) those it foresees
    """
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    kinds = {"f": FullAttentionSpec(**shape), "w": SlidingWindowSpec(**shape, sliding_window=WINDOW)}
    specs = [KVCacheGroupSpec([f"layer{at}"], kinds[letter]) for at, letter in enumerate(groups)]
    config = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=specs, prefix_cache_retention_interval=retention
    )
    return KVCacheManager(
        config, max_model_len=8192, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_kv_cache_events=True
    )


def blocks_of_a_run(groups: str, blocks: int, *, retention: int | None = None) -> SimpleNamespace:
    """Predicted and actual cached blocks of conversations and shared prompts, summed over a run."""
    from vllm import SamplingParams
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    manager, device, rng = cache_manager(groups, blocks, retention), CachedBlocks(), Random(1)
    ledger = BlockLedger("m", BLOCK, device)
    encode = msgspec.msgpack.Encoder().encode
    shared = [[rng.randrange(1000) for _ in range(rng.randrange(WINDOW, 400))] for _ in range(SHARED)]
    talks: list[list[int]] = []
    running: list[Any] = []
    found = SimpleNamespace(predicted=0, actual=0, too_high=0, too_low=0, ledger=ledger)
    for number in range(150):
        begin = rng.choice(talks) if talks and rng.random() < 0.5 else rng.choice(shared)
        prompt = begin[:3000] + [rng.randrange(1000) for _ in range(rng.randrange(10, 300))]
        request = Request(
            str(number), prompt, SamplingParams(max_tokens=9), None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )  # fmt: skip
        ledger.read(encode(KVEventBatch(ts=0.0, events=manager.take_events())))
        ours = block_hashes(prompt, block_size=BLOCK, root=root_hash("m", "", ""))[: (len(prompt) - 1) // BLOCK]
        predicted = next((at for at, block in enumerate(ours) if block not in device.blocks), len(ours))
        cached, hit, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        actual = hit // BLOCK
        found.predicted, found.actual = found.predicted + predicted, found.actual + actual
        found.too_high, found.too_low = found.too_high + (predicted > actual), found.too_low + (predicted < actual)
        while len(running) > 2:
            manager.free(running.pop(0))
        done, more = hit, {"num_new_computed_tokens": hit, "new_computed_blocks": cached}
        while done < len(prompt):
            step = min(512, len(prompt) - done)
            assert manager.allocate_slots(request, step, **more) is not None
            done, more = done + step, {}
            request.num_computed_tokens = done
        talks = [*talks[-7:], prompt]
        running.append(request)
    return found


@pytest.mark.parametrize("groups", ["wwf", "fww", "f", "wff"])
def test_cached_blocks_are_those_that_lead_to_a_resume_point(groups: str) -> None:
    roomy = blocks_of_a_run(groups, 100_000)
    assert roomy.predicted == roomy.actual > 1000
    assert (roomy.too_high, roomy.too_low) == (0, 0)


@pytest.mark.parametrize("groups", ["wwf", "fww"])
def test_where_windows_are_kept_at_ends_only_each_shared_prompt_is_predicted_too_early_once(groups: str) -> None:
    found = blocks_of_a_run(groups, 100_000, retention=0)
    assert found.actual > 1000
    assert 0 < found.too_high <= SHARED
    assert found.too_low == 0


def test_a_cache_that_turns_over_makes_few_predictions_wrong() -> None:
    tight = blocks_of_a_run("wwf", 1000, retention=0)
    assert tight.ledger.accepted["BlockRemoved"] > 100
    assert tight.too_high + tight.too_low <= SHARED + 15
