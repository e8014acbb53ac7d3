"""The status page is self-contained."""

import re

from orchestrator.api.ui import PAGE, content_security_policy


async def test_the_page_needs_no_key_and_forbids_foreign_content(service):
    answer = await service.http.get("/ui")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    rule = answer.headers["content-security-policy"]
    assert rule.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in rule
    assert content_security_policy(PAGE.replace("look()", "evil()")) != rule


def test_the_page_has_no_foreign_url_and_writes_no_markup():
    assert re.findall(r"https?://|//[a-z]|src=|@import|url\(", PAGE) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE) == []
    assert re.findall(r"localStorage|sessionStorage|cookie", PAGE) == []
    assert len(PAGE) < 20_000


async def test_every_call_of_the_page_is_a_route(service):
    paths = (await service.http.get("/openapi.json")).json()["paths"]
    called = set(re.findall(r'"(/[a-z0-9/]+)', PAGE))
    assert called == {"/health", "/v1/workers", "/v1/adapters", "/v1/placements", "/v1/events"}
    assert called <= set(paths)


async def test_requested_adapters_are_shown_as_demand(service):
    agent = await service.worker()
    await service.register()
    await service.ensure()
    await service.settle()
    name = next(iter(agent.loaded.values()))["engine_name"]
    for seq, requests in ((1, 0), (2, 600)):
        use = {"worker_id": "w0", "engine_name": name, "requests": requests, "in_flight": 0}
        await service.usage(10**15, use, seq=seq)
    assert (await service.adapter())["requests_per_s"] > 1
