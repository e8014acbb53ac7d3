"""Whole decisions, and a catalog's adapters."""

from array import array
from collections.abc import Callable
from functools import partial
from itertools import islice
from random import Random
from statistics import median

from benchmarks.decision.size import DecisionBenchSize
from benchmarks.report import ReportRow, quantiles_us
from benchmarks.scenes import (
    BASE,
    BLOCK_SIZE,
    NOW,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    a_fleet,
    decide,
    digest,
    engine_name,
    hashed,
    lora_id,
    some_tokens,
    worker_id,
)
from lorafleet.identity import block_hashes, root_hash
from orchestrator.model.catalog import Catalog, CatalogAdapter
from orchestrator.model.changes import reader_of
from router.core.fleet import RouterFleet
from router.core.kv.index import KvIndex
from router.core.resolve import resolve
from router.core.schedule.policy import Decision
from router.core.schedule.request import HashedRequest, PrefixMatch
from router.core.scheduler import Scheduler
from router.fleet.catalog import RouterCatalog, router_catalog, with_changes


def deciding(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of whole decisions: resolve, hash, match, cost, pick. Each has another prompt and adapter."""
    few, some, many = (a_router(adapters, size) for adapters in (10, 1_000, 10_000))
    p50, p99 = quantiles_us([ask for ask, _ in some], rounds=size.rounds)
    matched_us, _ = quantiles_us([matched for _, matched in some], rounds=size.rounds)
    # Alternating, so that drift affects both alike.
    turns = [
        (quantiles_us([ask for ask, _ in few], rounds=1)[0], quantiles_us([ask for ask, _ in many], rounds=1)[0])
        for _ in range(size.rounds)
    ]
    few_us, many_us = (median(times) for times in zip(*turns, strict=True))
    where = f"{PROMPT_TOKENS} tokens, 64 replicas"
    what = f"whole decision, {where}, 1,000 adapters"
    return [
        ReportRow(f"{what}, p50", p50, "us", None, "its hash and match alone, us", matched_us, 3.0),
        ReportRow(f"{what}, p99", p99, "us", None, "p50, us", p50, 2.0),
        ReportRow("whole decision, 10,000 adapters known", many_us, "us", None, "10 adapters, us", few_us, 1.2),
    ]


def a_router(adapters: int, size: DecisionBenchSize) -> list[tuple[Callable[[], Decision], Callable[[], PrefixMatch]]]:
    """(decision, its hash and match alone) of each prompt, all by one scheduler over 64 able replicas."""
    rng = Random(7)
    fleet, index = a_fleet(64, adapters), KvIndex(BLOCK_SIZE)

    def matched(prompt: HashedRequest) -> PrefixMatch:
        chain = prompt.chains[BLOCK_SIZE]
        depths = index.match(chain)
        return PrefixMatch(depths, index.lower_tiers(chain, depths))

    def hash_and_match(adapter: int, tokens: "array[int]") -> PrefixMatch:
        return matched(hashed(fleet, lora_id(adapter), tokens))

    scheduler = Scheduler(roster=fleet.roster, match=matched, rng=rng)
    for replica in fleet.replicas.values():
        scheduler.load.apply_report(replica)
    asks: list[tuple[Callable[[], Decision], Callable[[], PrefixMatch]]] = []
    for number in range(size.prompts):
        adapter = number % adapters
        tokens = some_tokens(rng, PROMPT_TOKENS)
        hashes = block_hashes(tokens, block_size=BLOCK_SIZE, root=root_hash(BASE, engine_name(adapter)))
        for i in range(64):
            index.add(worker_id(i), hashes[: PROMPT_BLOCKS * ((i + number) % 64) // 64], is_chain=True)
        asks.append(
            (partial(decide, fleet, scheduler, lora_id(adapter), tokens), partial(hash_and_match, adapter, tokens))
        )
    # Requests in flight at every replica, so that no cost term is zero.
    for ask, _ in islice(asks * 64, 64):
        scheduler.record_dispatch(ask(), NOW)
    return asks


def adopting(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of a catalog of 10,000 adapters: parsed whole, or a change of it, and its last adapter resolved."""

    def item(n: int) -> CatalogAdapter:
        return CatalogAdapter(lora_id=lora_id(n), digest=digest(n), base_model=BASE, source="file:///a")

    whole = Catalog(revision=1, adapters=tuple(map(item, range(10_000))))
    body = reader_of(Catalog).dump_json(whole)
    known = router_catalog(whole)
    change = reader_of(Catalog).dump_json(Catalog(revision=2, since=1, adapters=(item(9_999),)))
    a_few = a_fleet(64, 8).replicas

    def first_resolved(catalog: RouterCatalog) -> object:
        fleet = RouterFleet(1, a_few, catalog.adapters, catalog.aliases)
        return resolve(fleet, model=lora_id(9_999), lora_id=None, visible=lambda _: True, rng=Random(1))

    def adopt() -> object:
        return first_resolved(router_catalog(reader_of(Catalog).validate_json(body)))

    def change_one() -> object:
        changed = with_changes(known, reader_of(Catalog).validate_json(change))
        assert changed is not None, "the change follows from what is known"
        return first_resolved(changed)

    whole_us, _ = quantiles_us([adopt], rounds=size.rounds)
    one_us, _ = quantiles_us([change_one], rounds=size.rounds)
    what = "a catalog of 10,000 adapters, from its bytes to the first one resolved"
    return [
        ReportRow(what, whole_us / 1e6, "s", 2.0),
        ReportRow("one adapter registered among 10,000, the same way", one_us / 1e6, "s", 0.02),
    ]
