"""`lorafleet login` prints a token of a real OIDC server, which the fleet then takes."""

import asyncio
import ssl
import sys
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx
import pytest

from lorafleet.local.authority import Authority
from tests.oidc_server import CLIENT, QUIET, offering_login, oidc_server
from tests.patience import patience, within
from tests.serving import client_of

pytestmark = [pytest.mark.fleet, QUIET]
CONSOLE = f"  console: {{client_id: {CLIENT}, token: id_token}}\n"


@pytest.fixture(scope="module")
def oidc():
    with oidc_server() as server:
        server.set_user("ann", groups=["admins"])
        yield server


@pytest.fixture
async def orchestrator(oidc, tmp_path):
    """A client of an orchestrator that offers the server's login."""
    async with offering_login(oidc, tmp_path, more=CONSOLE) as url, client_of(url) as client:
        yield client


@asynccontextmanager
async def login(url, *flags):
    """The running command, and the address that it asks to open."""
    command = [sys.executable, "-P", "-m", "lorafleet", "--orchestrator-url", str(url), "login", *flags]
    pipe = asyncio.subprocess.PIPE
    running = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env={"CI": "1", "PATH": ""})
    try:
        async with within(60):
            line = (await running.stderr.readline()).decode()
        yield running, line.rpartition("open ")[2].strip()
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def at_issuer(address, *, change=lambda query: query, verify=True):
    """What a browser does: the form of the issuer, and the way back, with a changed query."""
    async with httpx.AsyncClient(trust_env=False, timeout=patience(20), verify=verify) as browser:
        answer = await browser.post(address, data={"sub": "ann"})
        back, _, query = answer.headers["location"].partition("?")
        return await browser.get(f"{back}?{urlencode(change(dict(parse_qsl(query))))}")


async def ended(running):
    async with within(60):
        out, err = await running.communicate()
    return running.returncode, out.decode().strip(), err.decode()


async def test_the_token_of_a_login_is_printed_and_opens_the_fleet(oidc, orchestrator):
    async with login(orchestrator.base_url) as (running, address):
        query = parse_qs(urlsplit(address).query)
        assert query["code_challenge_method"] == ["S256"]
        assert query["redirect_uri"][0].startswith("http://127.0.0.1:")
        assert (await at_issuer(address)).text.startswith("lorafleet: back to the terminal")
        status, token, _ = await ended(running)
    assert status == 0
    found = await orchestrator.get("/v1/whoami", headers={"authorization": f"Bearer {token}"})
    assert found.json()["spec"]["scopes"] == ["admin"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda query: query | {"state": "another"}, "its `state` differs"),
        (lambda query: {"state": query["state"], "error": "access_denied"}, "refused the login: access_denied"),
        (lambda query: query | {"code": "guessed"}, "gave no id_token"),
    ],
)
async def test_an_answer_that_is_not_the_issuers_to_this_login_gives_no_token(oidc, orchestrator, change, says):
    async with login(orchestrator.base_url) as (running, address):
        await at_issuer(address, change=change)
        status, out, err = await ended(running)
    assert (status, out) == (1, "")
    assert says in err


async def test_nobody_who_logs_in_and_an_issuer_that_is_none_end_the_command(oidc, orchestrator):
    async with login(orchestrator.base_url, "--within-s", "1") as (running, _):
        status, _, err = await ended(running)
        assert (status, "nobody has logged in" in err) == (1, True)
    async with login(orchestrator.base_url, "--issuer", "https://other.example") as (running, address):
        assert (await ended(running))[0] == 2
        assert f"name one of {oidc.url}" in address


async def test_an_issuer_with_a_private_authority_is_believed_where_that_is_named(tmp_path):
    tls = Authority(tmp_path).issue("issuer", "localhost")
    trusted = ssl.create_default_context(cafile=tls.ca)
    with oidc_server(tls) as server:
        server.set_user("ann", groups=["admins"])
        async with offering_login(server, tmp_path, more=f"  ca_file: {tls.ca}\n{CONSOLE}") as url:
            async with login(url, "--issuer-ca", str(tls.ca)) as (running, address):
                await at_issuer(address, verify=trusted)
                assert (await ended(running))[0] == 0
            async with login(url) as (running, address):
                await at_issuer(address, verify=trusted)
                status, _, err = await ended(running)
    assert (status, "give --issuer-ca" in err) == (1, True)


async def test_a_file_of_authorities_that_is_none_is_named(orchestrator, tmp_path):
    (tmp_path / "ca.pem").write_text("none")
    async with login(orchestrator.base_url, "--issuer-ca", str(tmp_path / "ca.pem")) as (running, line):
        status, _, _ = await ended(running)
    assert (status, "--issuer-ca" in line) == (2, True)
