"""The ledger's cached blocks equal the engine's cache hits, on the sim and on vLLM."""

import random

import httpx
import pytest

from lorafleet.identity import block_hashes, root_hash
from lorafleet.kv.events import KvEventDecoder
from lorafleet.kv.ledger import BlockLedger
from lorafleet.kv.subscribe import RankEndpoint, SubscriberHub
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.engines import start_engine
from tests.patience import patience, until

pytestmark = pytest.mark.fleet

BLOCK = 32
MOST_BLOCKS = 64  # small, so that there are evictions all the time


class DeviceBlocks(set):
    """A ledger's blocks on the device."""

    def __init__(self):
        super().__init__()
        self.ledger = BlockLedger("tiny-qwen", BLOCK, self)
        self.decode = KvEventDecoder().decode
        self.is_open = False
        self.losses = 0

    def add(self, tier, hashes):
        assert tier == "device"
        self.update(hashes)

    def drop(self, tier, hashes):
        assert tier == "device"
        self.difference_update(hashes)

    def on_batch(self, payload):
        self.ledger.apply(self.decode(payload))

    def on_opened(self):
        self.is_open = True

    def on_drained(self):
        pass

    def on_bridged(self):
        pass

    def on_restarted(self):
        raise AssertionError("an engine's numbers began anew")

    def on_malformed(self):
        raise AssertionError("an engine sent something that is no batch")

    def on_lost(self, _first, _last):
        self.losses += 1


async def settled(held, client, number):
    """Wait until all events of earlier requests were applied, by the events of a later request.

    Blocks evicted by a partial block come with no store event to wait for.
    """
    prompt = [9, *([number] * BLOCK)]
    body = {"model": "tiny-qwen", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    [block] = block_hashes(prompt, block_size=BLOCK, root=root_hash("tiny-qwen", ""))
    await until(lambda: block in held)


@pytest.fixture(scope="module", params=["sim", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.thorough])])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv-engine")
    flags = ("--num-gpu-blocks-override", str(MOST_BLOCKS), "--max-model-len", "1024")
    running = start_engine(request.param, make_model(folder / "model"), flags=flags)
    for name in ("one@1", "two@2"):
        body = {"lora_name": name, "lora_path": str(make_adapter(folder, name.replace("@", "-"), rank=8))}
        httpx.post(f"{running.url}/v1/load_lora_adapter", json=body, timeout=patience(20)).raise_for_status()
    yield running
    running.stop()


async def test_every_hit_of_the_engine_is_predicted_to_the_block(engine):
    rng = random.Random(5)
    heads = [[rng.randrange(10, 3000) for _ in range(BLOCK * rng.randrange(4, 16))] for _ in range(4)]
    hub, held = SubscriberHub(tail_poll_s=0.1), DeviceBlocks()
    evicted = hits = 0
    try:
        hub.follow(RankEndpoint(engine.kv_endpoint, engine.replay_endpoint, "kv"), held)
        await until(lambda: held.is_open)
        async with httpx.AsyncClient(base_url=engine.url, timeout=patience(60)) as client:
            for number in range(60):
                head = rng.choice(heads)
                tail = [rng.randrange(10, 3000) for _ in range(rng.randrange(1, 3 * BLOCK))]
                prompt = head[: BLOCK * rng.randrange(1, 16)] + tail
                name, salt = rng.choice(["tiny-qwen", "one@1", "two@2"]), rng.choice(["", "", "", "pepper"])
                root = root_hash("tiny-qwen", "" if name == "tiny-qwen" else name, salt)
                hashes = block_hashes(prompt, block_size=BLOCK, root=root)
                depth = next((i for i, block in enumerate(hashes) if block not in held), len(hashes))
                predicted = BLOCK * min(depth, (len(prompt) - 1) // BLOCK)
                body = {"model": name, "prompt": prompt, "max_tokens": rng.choice([1, 40]), "temperature": 0}
                answer = await client.post("/v1/completions", json=body | ({"cache_salt": salt} if salt else {}))
                assert answer.status_code == 200, answer.text
                details = answer.json()["usage"]["prompt_tokens_details"] or {}
                assert (number, predicted) == (number, details.get("cached_tokens") or 0)
                hits += predicted
                # The whole prompt is cached now, and the ledger will soon have it.
                await until(lambda hashes=hashes: held.issuperset(hashes))
                await settled(held, client, number + 10)
                evicted = held.ledger.accepted["BlockRemoved"]
        assert hits > 0
        assert evicted > MOST_BLOCKS
        assert len(held) < MOST_BLOCKS
        assert not held.ledger.rejected
        assert held.losses == 0
    finally:
        await hub.close()
