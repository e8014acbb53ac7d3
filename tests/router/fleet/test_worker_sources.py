"""Engines whose address is no name for a worker: what to write is said, and it works."""

import socket

import pytest
from pydantic import ValidationError

from lorafleet.engine.agentless import engines_by_id
from orchestrator.config import OrchestratorSettings
from router.config import RouterSettings
from tests.router.fleet.test_discovery import BASE, GuardedEngine, ask, routing
from tests.serving import serving


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("settings", [RouterSettings, OrchestratorSettings])
@pytest.mark.parametrize(
    ("named", "advice"),
    [
        ("http://[::1]:8000", "v6=http://[::1]:8000"),
        ("https://[fe80::1]", "v6=https://[fe80::1]"),
        ("http://b\u00fccher:8000", "w0=http://b\u00fccher:8000"),
        ("http://" + "a" * 101, "w0=http://" + "a" * 101),
    ],
)
def test_an_address_that_is_no_id_is_refused_with_one_that_works(settings, named, advice):
    with pytest.raises(ValidationError) as refused:
        settings(engines=(named,))
    assert f"needs an id, because {named.partition('//')[2]!r} cannot be one" in str(refused.value)
    assert f"give it as {advice}" in str(refused.value)
    id_, _, url = advice.partition("=")
    assert engines_by_id([advice]) == {id_: url}


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on loopback")
async def test_an_engine_at_an_ipv6_address_is_served_under_its_id():
    async with serving(GuardedEngine().app, host="::1") as url:
        named = "v6=" + url.replace("::1:", "[::1]:")
        async with routing(named, tokenizer="remote") as (client, _):
            answer = await ask(client, BASE)
            assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, "v6")
