"""The CLI's REST client: other servers, unreachable ones and wrong addresses are one line each."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorafleet.cli.client import NoAnswer, RestClient
from lorafleet.local.authority import Authority
from lorafleet.service.network.tls import Tls, TlsFiles
from tests.lorafleet.cli.conftest import Run
from tests.serving import serving, serving_in_thread


@contextmanager
def always_answering(status: int, body: str) -> Iterator[str]:
    """The URL of a server that gives this one answer to every request."""

    async def answer(_request: Request) -> Response:
        return Response(body, status, headers={"location": "/elsewhere"})

    routes = [Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]
    with serving_in_thread(lambda: Starlette(routes=routes)) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, "<html>"),
        (200, '{"foo": 1}'),
        (200, "[1]"),
        (200, '{"data": 1}'),
        (200, '{"data": [1]}'),
        (200, '{"data": [{"object": "model"}]}'),
        (200, "[" * 100_000),
        (200, ""),
        (404, '{"error": {"message": "Not Found", "code": "not_found"}}'),
        (307, ""),
    ],
    ids=["html", "no data", "list", "number", "numbers", "other objects", "nested", "empty", "404", "redirect"],
)
def test_another_server_gives_one_line_that_names_the_flag(run: Run, status: int, answer: str) -> None:
    with always_answering(status, answer) as url:
        result = run("--orchestrator-url", url, "adapters", "list")
    assert result.status == 1
    assert "/v1/adapters" in result.err
    assert result.err.endswith("? (lorafleet --orchestrator-url names another address)\n")
    assert "is it the right server" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["adapters", "show", "a/v1"],
        ["adapters", "set", "a/v1", "priority=1"],
        ["aliases", "list"],
        ["aliases", "set", "name", "a/v1"],
        ["workers", "list"],
        ["workers", "drain", "w"],
        ["placements"],
        ["policy", "show"],
        ["published", "list"],
        ["published", "show", "name"],
        ["pauses", "list"],
        ["pauses", "end", "--tenant", "acme"],
        ["orphans", "list"],
        ["plan"],
        ["history"],
        ["rollout", "show", "name"],
        ["rollout", "start", "name", "a/v1"],
        ["decisions"],
        ["explain", "--model", "tiny", "hello"],
        ["export"],
        ["sync", "--from", "URL"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("answer", ['{"data": [{"object": "model"}]}', ""], ids=["list", "empty"])
def test_no_command_fails_with_a_traceback_at_another_server(run: Run, words: list[str], answer: str) -> None:
    with always_answering(200, answer) as url:
        result = run("--orchestrator-url", url, "--router-url", url, *(url if w == "URL" else w for w in words))
    assert result.status in {0, 1}
    assert result.status == 0 or result.err.splitlines()[-1].startswith(f"lorafleet: {url}")


@pytest.mark.parametrize("args", [["adapters", "list"], ["explain", "hello"], ["decisions"], ["top"]])
def test_an_unreachable_server_gives_one_line_that_names_the_flag(run: Run, args: list[str]) -> None:
    away = "http://127.0.0.1:9"
    result = run("--orchestrator-url", away, "--router-url", away, *args)
    assert result.status == 1
    assert "-url" in result.err
    assert len(result.err.splitlines()) == 1


async def test_a_certificate_of_an_unknown_authority_gives_the_flag_that_names_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("orchestrator", "127.0.0.1")
    async with serving(Starlette(), tls=Tls(TlsFiles(cert=files.cert, key=files.key))) as url:
        with RestClient(url) as stranger, pytest.raises(NoAnswer, match="give --tls-ca, or LORAFLEET_TLS_CA"):
            await asyncio.to_thread(stranger.call, "GET", "/v1/workers")


@pytest.mark.parametrize(
    ("flag", "words"), [("--orchestrator-url", ["adapters", "list"]), ("--router-url", ["decisions"])]
)
def test_an_invalid_address_gives_one_line_that_names_the_flag(run: Run, flag: str, words: list[str]) -> None:
    result = run(flag, "localhost:8080", *words)
    assert result.status == 2
    assert result.err == f"lorafleet: {flag} 'localhost:8080': must be an address, such as http://127.0.0.1:8080\n"
    result = run(flag, "http://me:hidden@localhost:8080", *words)
    assert result.status == 2
    assert (
        result.err
        == f"lorafleet: {flag} 'http://***@localhost:8080': must be an address, such as http://127.0.0.1:8080\n"
    )


def test_the_address_comes_from_the_environment(run: Run, orchestrator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAFLEET_URL_ORCHESTRATOR", orchestrator)
    assert run("workers", "list").status == 0
