"""The console's login at a real OIDC server, in Chromium: PKCE, state, nonce, an expired token, logging out."""

import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lorafleet.keys.key_files import hash_key
from tests.console.browser import INSTALL, chromium, opened
from tests.console.test_console_in_chromium import axe_source
from tests.oidc_server import CLIENT, QUIET, offering_login, oidc_server

pytestmark = [pytest.mark.thorough, pytest.mark.fleet, pytest.mark.timeout(600), QUIET]
_MORE = f"""  console: {{client_id: {CLIENT}, scope: "openid profile email", token: id_token}}
keys:
- {{sha256: {hash_key("lf-key")}, scopes: [view]}}
"""


@pytest.fixture
def oidc():
    pytest.importorskip("playwright", reason=INSTALL)
    with oidc_server() as server:
        yield server


@asynccontextmanager
async def console(oidc, folder) -> AsyncIterator[str]:
    """The URL of an orchestrator that takes the server's tokens, by the name that browsers hold to be secure."""
    async with offering_login(oidc, folder, more=_MORE) as url:
        yield url.replace("127.0.0.1", "localhost")


async def log_in(page, oidc, subject="ann"):
    """From the console's login page to the console again, by way of the issuer's own page."""
    await page.click("button >> text=Log in at localhost")
    await page.wait_for_url(f"{oidc.url}/**")
    await page.fill("input[name=sub]", subject)
    await page.click("button[type=submit] >> nth=0")


async def test_a_reader_logs_in_and_out_at_the_issuer(oidc, tmp_path):
    oidc.set_user("ann", groups=["admins"], email="ann@example.com")
    async with console(oidc, tmp_path) as url, chromium() as browser, opened(browser, url) as page:
        await page.goto(f"{url}/ui/workers?state=lost")
        await page.wait_for_selector("button >> text=Log in at localhost")
        await page.evaluate(axe_source())
        found = await page.evaluate("axe.run({resultTypes: ['violations']})")
        assert [each["id"] for each in found["violations"]] == []
        await log_in(page, oidc)
        await page.wait_for_selector("h1 >> text=Workers")
        assert page.url == f"{url}/ui/workers?state=lost", "where the reader was, without code and state"
        await page.wait_for_selector(".who >> text=ann@example.com, token")
        assert await page.evaluate("sessionStorage.getItem('lorafleet-login')") is None
        asked = next(form for method, path, form in oidc.calls if path == "/oauth2/authorize" and method == "GET")
        given = next(form for _, path, form in oidc.calls if path == "/oauth2/token")
        digest = hashlib.sha256(given["code_verifier"].encode()).digest()
        assert asked["code_challenge"] == base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        assert (asked["code_challenge_method"], asked["response_type"], asked["client_id"]) == ("S256", "code", CLIENT)
        assert given["redirect_uri"] == asked["redirect_uri"] == f"{url}/ui/login"
        assert "client_secret" not in given
        assert len(asked["state"]) >= 40
        assert len(given["code_verifier"]) >= 43
        await page.reload()
        await page.wait_for_selector("h1 >> text=Workers")
        await page.goto(f"{url}/ui/tenants")
        await page.wait_for_selector("tr:has-text('ann@example.com') .tag >> text=token")
        await page.click("button >> text=Sign out")
        await page.wait_for_url(f"{oidc.url}/**")
        left = next(form for _, path, form in oidc.calls if path == "/oauth2/end_session")
        assert left["post_logout_redirect_uri"] == f"{url}/ui"
        await page.goto(f"{url}/ui")
        await page.wait_for_selector("button >> text=Log in at localhost")
        assert await page.evaluate("sessionStorage.length") == 0


async def test_a_reader_without_a_grant_is_told_so_and_may_give_a_key(oidc, tmp_path):
    oidc.set_user("bob", groups=["guests"])
    async with console(oidc, tmp_path) as url, chromium() as browser, opened(browser, url) as page:
        await page.goto(f"{url}/ui")
        await log_in(page, oidc, "bob")
        await page.wait_for_selector("[role=alert] >> text=no grant is for its claims")
        await page.fill("input[type=password]", "lf-key")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".who >> text=view")


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"state": "another"}, "not begun in this tab"), ({"nonce": "another"}, "not of this login"), ({}, "")],
)
async def test_an_answer_to_another_login_is_refused(oidc, tmp_path, changed, says):
    """As an attacker would have a reader log in under the attacker's name."""
    oidc.set_user("ann", groups=["admins"])
    async with console(oidc, tmp_path) as url, chromium() as browser, opened(browser, url) as page:
        await page.goto(f"{url}/ui")
        await page.click("button >> text=Log in at localhost")
        await page.wait_for_url(f"{oidc.url}/**")
        await page.goto(f"{url}/ui/no-such-page")
        script = "(more) => sessionStorage.setItem('lorafleet-login', JSON.stringify({...JSON.parse(sessionStorage.getItem('lorafleet-login')), ...more}))"  # noqa: E501
        await page.evaluate(script, changed)
        await page.go_back()
        await page.fill("input[name=sub]", "ann")
        await page.click("button[type=submit] >> nth=0")
        if says:
            await page.wait_for_selector(f"[role=alert] >> text={says}")
            assert await page.evaluate("sessionStorage.getItem('lorafleet-key')") is None
        else:
            await page.wait_for_selector("h1 >> text=Fleet")


async def test_an_expired_token_leads_back_to_the_login(oidc, tmp_path):
    token = oidc.sign(oidc.claims(exp=1_000_000_000))
    oidc.set_user("ann", groups=["admins"])
    async with console(oidc, tmp_path) as url, chromium() as browser, opened(browser, url, key=token) as page:
        await page.goto(f"{url}/ui/adapters")
        await page.wait_for_selector("[role=alert] >> text=this token expired at 2001-09-09")
        await log_in(page, oidc)
        await page.wait_for_selector("h1 >> text=Adapters")


async def test_the_page_calls_no_server_but_its_own_and_the_token_endpoint(oidc, tmp_path):
    async with console(oidc, tmp_path) as url, chromium() as browser, opened(browser, url) as page:
        answer = await page.goto(f"{url}/ui")
        assert f"connect-src 'self' {oidc.url};" in answer.headers["content-security-policy"]
        refused = "fetch('http://localhost:9/').then(() => '', (error) => error.message)"
        assert "fetch" in await page.evaluate(refused)
        assert any("Content Security Policy" in fault for fault in page.faults)
