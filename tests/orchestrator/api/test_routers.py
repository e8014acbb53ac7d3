"""Every field of a usage report reaches the demand book."""

import msgspec

from orchestrator.model.usage import RequestCounts

COUNTS = {
    "requests": 12,
    "sent": 10,
    "codes": {"429 saturated": 2, "502 engine": 3},
    "prompt_tokens": 100,
    "prompt_cached_tokens": 35,
    "output_tokens": 50,
    "predicted_tokens": 40,
    "cached_tokens": 30,
    "compared_tokens": 90,
    "lost_tokens": 20,
    "sampled_tokens": 60,
    "waited_s": 4.0,
    "cold_starts": 1,
    "cold_s": 2.0,
    "first_token": {"20": 7},
    "first_token_sum_s": 2.5,
    "whole": {"30": 8},
    "decode_s": 9.0,
    "decode_tokens": 43,
    "work_s": 2.5,
    "decode_work_s": 1.5,
    "engine_errors": 3,
    "engine_first_token_s": 1.5,
}


async def report(service, seq, *rows, number=1):
    body = {"router_id": "r0", "boot_id": "b0", "revision_seen": 1, "seq": seq}
    body["batches"] = [{"number": number, "rows": rows}]
    answer = await service.http.post("/v1/usage", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["accepted"]


async def test_every_count_of_a_report_is_added_up_once(service):
    assert await report(service, 1, number=0)
    row = {"adapter": "sql/v1", "worker": "w0", "counts": COUNTS}
    assert await report(service, 2, row)
    assert not await report(service, 2, row, number=2)
    assert await report(service, 3, row), "a batch that was counted comes again"
    assert COUNTS.keys() == RequestCounts.__dataclass_fields__.keys()
    assert msgspec.to_builtins(service.reconciler.demand.totals("sql/v1"), str_keys=True) == COUNTS


async def test_requests_for_a_base_model_are_no_demand(service):
    assert await report(service, 1, number=0)
    assert await report(service, 2, {"base_model": "base", "worker": "w0", "counts": {"sent": 4}})
    assert service.reconciler.demand.snapshot(service.clock()).rates == {}
