"""A fleet, its adapters and prompts, and a decision about them: what several benchmarks have in common."""

from array import array
from random import Random
from types import MappingProxyType

from lorafleet import identity
from lorafleet.identity import block_hashes, root_hash
from orchestrator.model.catalog import CatalogAdapter
from router.core.fleet import EngineReport, Replica, ResidentAdapter, RouterFleet
from router.core.kv.index import WorkerId
from router.core.resolve import resolve
from router.core.schedule.policy import Decision
from router.core.schedule.request import HashedRequest, RoutingRequest
from router.core.scheduler import Scheduler, first_blocks

BASE, PROMPT_TOKENS, BLOCK_SIZE, EVENT_BLOCKS = "m", 8192, 16, 16
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
NOW = 1000.0
_RNG = Random(1)


def decide(fleet: RouterFleet, scheduler: Scheduler, model: str, tokens: "array[int]") -> Decision:
    """The router's stages from resolve to decide."""
    return scheduler.decide(hashed(fleet, model, tokens), NOW)


def hashed(fleet: RouterFleet, model: str, tokens: "array[int]") -> HashedRequest:
    """The router's stages from resolve to hash."""
    target = resolve(fleet, model=model, lora_id=None, visible=lambda _: True, rng=_RNG)
    name = target.adapter.engine_name or "" if target.adapter else ""
    root = root_hash(target.base_model, name)
    chains = {BLOCK_SIZE: block_hashes(tokens, block_size=BLOCK_SIZE, root=root)}
    request = RoutingRequest(target.base_model, name, len(tokens), first_blocks=first_blocks(chains))
    return HashedRequest(request, chains)


def a_fleet(replicas: int, adapters: int) -> RouterFleet:
    """All adapters on all replicas: the most choices that a decision can have."""
    residents = MappingProxyType(
        {engine_name(n): ResidentAdapter(lora_id(n), digest(n), engine_name(n)) for n in range(adapters)}
    )
    report = EngineReport(running=2, waiting=1, kv_usage=0.3, prefill_tokens_per_s=9000.0, token_s=0.025, at=NOW)
    fleet = [
        Replica(
            id=worker_id(i),
            base_model=BASE,
            engine_url="",
            agent_url="",
            dialect="vllm",
            state="ready",
            block_size=BLOCK_SIZE,
            max_loras=8,
            max_num_seqs=64,
            max_model_len=32768,
            total_kv_blocks=50_000,
            residents=residents,
            report=report,
        )
        for i in range(replicas)
    ]
    known = {lora_id(n): CatalogAdapter(lora_id=lora_id(n), base_model=BASE, digest=digest(n)) for n in range(adapters)}
    return RouterFleet(1, MappingProxyType({replica.id: replica for replica in fleet}), MappingProxyType(known))


def some_tokens(rng: Random, count: int) -> "array[int]":
    """Token ids of a vocabulary of 65,536."""
    return array("I", array("H", rng.randbytes(2 * count)))


def worker_id(number: int) -> WorkerId:
    return WorkerId(f"w{number}")


def lora_id(number: int) -> str:
    return f"adapter-{number}/v1"


def digest(number: int) -> str:
    return f"{number:064x}"[::-1]


def engine_name(number: int) -> str:
    return identity.engine_name(lora_id(number), digest(number))
