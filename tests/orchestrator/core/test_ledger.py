"""What a router's batch is in the ledger, and what rows cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.ledger import cost_of, costs_by, grouped, new_rows, router_batch
from orchestrator.model.ledger import PriceList, Prices, UsageBatch, UsageKey, UsageSums
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts

AT = 1_800_000_000.0
HOUR = 1_800_000_000


def row(**fields):
    named = {name: fields.pop(name) for name in ("adapter", "version", "tenant", "key", "worker") if name in fields}
    return CountedRow(base_model="qwen", **named, counts=RequestCounts(**fields))


def test_requests_are_told_apart_by_their_outcome():
    codes = {"429 rate_limited": 2, "404 model_not_found": 1, "502 engine": 3, "200 broken": 1, "499": 4, "other": 1}
    batch = router_batch("b0", CountBatch(number=7, rows=(row(requests=20, codes=codes),)), AT)
    (sums,) = batch.rows.values()
    assert (batch.source, batch.number) == ("b0", 7)
    assert (sums.requests, sums.succeeded, sums.refused, sums.failed, sums.cancelled) == (20, 8, 3, 5, 4)


def test_a_batch_counts_in_the_hour_of_its_middle_and_its_workers_are_one_row():
    rows = tuple(
        row(adapter="sql/v1", version="aa", worker=name, requests=1, work_s=3.0, decode_work_s=2.0)
        for name in ("w0", "w1")
    )
    (found,) = router_batch("b0", CountBatch(number=1, age_s=5.0, rows=rows), AT + 4.0).rows.items()
    assert found[0] == UsageKey(HOUR - 3600, "", "", "sql/v1", "aa", "qwen")
    assert (found[1].requests, found[1].prefill_s, found[1].decode_s) == (2, 2.0, 4.0)
    (key,) = router_batch("b0", CountBatch(number=1, age_s=3.0, rows=rows), AT + 4.0).rows
    assert key.hour == HOUR


def test_a_name_that_postgresql_cannot_store_is_stored_without_its_nul():
    (key,) = router_batch("b0", CountBatch(number=1, rows=(row(tenant="a\0b", requests=1),)), AT).rows
    assert "\0" not in key.tenant


@given(st.lists(st.tuples(st.sampled_from("xy"), st.integers(1, 6)), max_size=20), st.integers(0, 6))
def test_each_number_of_a_source_counts_once_however_often_it_comes(numbers, counted):
    ordered = sorted(numbers, key=lambda each: each[1])
    batches = [UsageBatch(source=of, number=number, rows={UsageKey(): UsageSums(requests=1)}) for of, number in ordered]
    found = new_rows(batches, {"x": counted})
    expected = {each for each in numbers if each[0] == "y" or each[1] > counted}
    assert sum(sums.requests for sums in found.rows.values()) == len(expected)
    assert found.numbers["x"] == max([counted, *(number for of, number in numbers if of == "x")])


PRICES = PriceList(
    currency="EUR",
    default=Prices(per_million_prompt_tokens=2.0, per_million_cached_tokens=1.0, per_million_completion_tokens=4.0),
    base_models={"big": Prices(per_engine_second=0.5, per_slot_hour=3.0)},
)


def test_cached_prompt_tokens_have_a_price_of_their_own():
    sums = UsageSums(prompt_tokens=3_000_000, cached_tokens=1_000_000, completion_tokens=500_000)
    assert cost_of(sums, PRICES.default) == pytest.approx(4.0 + 1.0 + 2.0)
    assert cost_of(UsageSums(prefill_s=2.0, decode_s=4.0, slot_s=1800.0), PRICES.of("big")) == pytest.approx(4.5)


def test_groups_cost_what_their_rows_cost_by_each_base_models_prices():
    rows = {
        UsageKey(0, "acme", base_model="small"): UsageSums(completion_tokens=1_000_000),
        UsageKey(0, "acme", base_model="big"): UsageSums(decode_s=2.0),
        UsageKey(0, "globex", base_model="big"): UsageSums(decode_s=4.0),
    }
    assert costs_by(rows, ("tenant",), PRICES) == {UsageKey(tenant="acme"): 5.0, UsageKey(tenant="globex"): 2.0}
    assert grouped(rows, ())[UsageKey()] == UsageSums(completion_tokens=1_000_000, decode_s=6.0)
