"""No page of a service may be shown in another page's frame."""

import pytest

from tests.lorafleet.http_server.test_cross_site import agent, orchestrator
from tests.lorafleet.service.http.test_known_fields import asking, router


@pytest.mark.parametrize("service", [orchestrator, agent, router])
async def test_every_page_refuses_frames(service, tmp_path):
    async with asking(service, tmp_path) as (_, client):
        paths = ("/docs", "/redoc", *(("/ui", "/ui/adapters") if service is orchestrator else ()))
        for path in paths:
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-type"].startswith("text/html"), path
            assert answer.headers["x-frame-options"] == "DENY", path
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"], path
        assert "x-frame-options" not in (await client.get("/openapi.json")).headers
