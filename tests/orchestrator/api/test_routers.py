"""Every field of a usage report reaches the demand book."""

from orchestrator.model.snapshot import TrafficFigures

USE = {
    "worker_id": "w0",
    "engine_name": "sql/v1@abababababab",
    "requests": 10,
    "prompt_tokens": 100,
    "output_tokens": 50,
    "work_s": 2.5,
    "errors": 3,
    "first_tokens": 7,
    "first_token_s": 1.5,
}


async def report(service, seq, **more):
    body = {"router_id": "r0", "boot_id": "b0", "revision_seen": 1, "seq": seq} | more
    answer = await service.http.post("/v1/usage", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["accepted"]


async def test_every_count_of_a_report_is_added_up_once(service):
    assert await report(service, 1)
    hold = {"lora_id": "sql/v1", "held": 2, "hold_s": 4.0, "sheds": 1}
    assert await report(service, 2, uses=[USE], holds=[hold])
    assert not await report(service, 2, uses=[USE | {"requests": 99}])
    flow = TrafficFigures(10, 100, 50, 2.5, 3, 7, 1.5, 2, 4.0, 1)
    assert service.reconciler.demand.traffic_totals("sql/v1") == flow


async def test_an_older_router_reports_requests_only(service):
    assert await report(service, 1)
    uses = [
        {"worker_id": "w0", "engine_name": "sql/v1@abababababab", "requests": 4},
        {"worker_id": "w0", "engine_name": "base"},
    ]
    assert await report(service, 2, uses=uses)
    assert service.reconciler.demand.traffic_totals("sql/v1") == TrafficFigures(requests=4)
