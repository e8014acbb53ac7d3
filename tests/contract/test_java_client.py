"""Java's HTTP client through a router to an engine: chats, whole and streamed."""

import pytest

from router.app import build
from router.config import RouterSettings
from tests.patience import patience
from tests.router.test_java_client import NEEDS_JAVA, said
from tests.serving import serving

pytestmark = [pytest.mark.fleet, NEEDS_JAVA]


@pytest.mark.parametrize("kind", ["sim", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_javas_client_chats_with_an_engine_through_a_router(kind, engine_of, tmp_path):
    engine = engine_of(kind)
    app, parts = build(RouterSettings(engines=(f"w0={engine.url}",), metadata_poll_s=0.2))
    async with serving(app, http=app.state.http) as url:
        assert await parts.discovery.changes.until(lambda: parts.discovery.fleet.replicas, timeout_s=patience(20))
        lines = await said(tmp_path, f"{url}/v1/chat/completions", length=100)
    assert [line.partition(" ")[0] for line in lines] == ["200"] * 3, lines
    assert all('"chat.completion"' in line for line in lines[:2]), lines
    assert lines[2] == "200 data: [DONE]"
