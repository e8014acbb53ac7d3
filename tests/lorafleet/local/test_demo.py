"""The demo of `lorafleet up`, and a start whose services fail, end with a line that says why."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lorafleet.local import demo
from lorafleet.local.fleet import LocalFleet
from lorafleet.service.failure import CommandFailed
from tests.lorafleet.local.test_up import options
from tests.serving import client_of, serving

_NO_TEMPLATE = {"error": {"message": "the model has no chat template", "code": 400}}


async def _refuse(_request: Request) -> Response:
    return JSONResponse(_NO_TEMPLATE, 400)


def _stream(*events: str) -> StreamingResponse:
    async def body() -> AsyncIterator[str]:
        for event in events:
            yield f"data: {event}\n\n"

    headers = {"x-lorafleet-adapter": "base", "x-lorafleet-worker": "w0", "x-lorafleet-cached-tokens": "0"}
    return StreamingResponse(body(), headers=headers)


async def _break(_request: Request) -> Response:
    return _stream('{"choices": []}', '{"error": {"message": "the engine has died"}}')


async def _answer_another_way(_request: Request) -> Response:
    return _stream('{"text": "hello"}')


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (_refuse, "the model has no chat template"),
        (_break, "the engine has died"),
        (_answer_another_way, "choices"),
    ],
)
async def test_a_demo_that_fails_says_what_the_router_said(answer, says: str) -> None:
    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    async with serving(app) as url, client_of() as client:
        with pytest.raises(CommandFailed, match=f"demo: the request to tiny-qwen failed: .*{says}"):
            await demo.run_demo(client, url, "tiny-qwen", [])


async def _fail(*_: object) -> None:
    raise CommandFailed("demo: no")


async def test_a_failed_demo_is_printed_and_ends_only_a_fleet_that_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_demo", _fail)
    for once in (False, True):
        fleet = LocalFleet(options(tmp_path, state_dir=tmp_path, once=once, demo=True))
        try:
            if once:
                with pytest.raises(CommandFailed, match="demo: no"):
                    await fleet._try_demo("tiny-qwen", [])
            else:
                await fleet._try_demo("tiny-qwen", [])
                assert "demo: no" in capsys.readouterr().err
        finally:
            await fleet.stop()


async def test_a_service_that_does_not_answer_ends_the_start_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bring_up(_fleet: LocalFleet) -> None:
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(LocalFleet, "_bring_up", bring_up)
    fleet = LocalFleet(options(tmp_path, state_dir=tmp_path))
    try:
        with pytest.raises(CommandFailed, match=r"does not answer \(ReadTimeout.*its log is in .*logs"):
            await fleet.run_until_cancelled()
    finally:
        await fleet.stop()
