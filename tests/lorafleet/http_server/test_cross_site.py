"""What a page of another origin may have a browser send to a service without keys: nothing that changes anything."""

import contextlib
import math

import httpx
import pytest

from lorafleet.http_server.cross_site import site_check
from lorafleet.keys.key_files import hash_key
from lorafleet.service.http import HttpError
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from tests.router.doubles import CHAT, EngineDouble, error_of, fleet
from workers.app import build as build_worker
from workers.config import WorkerSettings

EVIL = b"https://evil.example"
# Headers of a browser's page of another site; the last is of an old browser, or of a plain HTTP address.
FOREIGN = [
    {b"sec-fetch-site": b"cross-site", b"origin": EVIL},
    {b"sec-fetch-site": b"same-site", b"origin": b"http://localhost:3000"},
    {b"sec-fetch-site": b"cross-site"},
    {b"sec-fetch-site": b"cross-site", b"origin": b"null"},
    {b"origin": b"null"},
    {b"origin": EVIL},
    {b"origin": b"http://here:8081"},
]
OWN = [
    {},
    {b"sec-fetch-site": b"same-origin", b"origin": b"http://here:8080"},
    {b"sec-fetch-site": b"same-origin", b"origin": b"http://changed.by.a.proxy"},
    {b"sec-fetch-site": b"none"},
    {b"origin": b"http://HERE:8080"},
]
# Those that a page may send without a body, and with one that needs no asking before.
CHANGES = {
    "orchestrator": [
        "/v1/workers/w0/cordon",
        "/v1/workers/w0/uncordon",
        "/v1/workers/w0/drain",
        "/v1/rebalance",
        "/v1/adapters/sql/v1/ensure",
        "/v1/adapters/sql/v1/retry",
        "/v1/orphans/adopt",
        "/v1/adapters",
        "/v1/usage",
    ],
    "agent": ["/v1/admin/drain", "/v1/admin/undrain", "/v1/admin/load_lora", "/v1/admin/unload_lora"],
}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("sent_headers", FOREIGN)
def test_a_change_from_a_page_of_another_origin_is_refused(method, sent_headers):
    with pytest.raises(HttpError, match=r"a page of .* may change nothing here: send this from a program") as refused:
        site_check()(method, {b"host": b"here:8080", **sent_headers})
    assert (refused.value.status, refused.value.code) == (403, "cross_site")


@pytest.mark.parametrize("sent_headers", OWN)
def test_programs_and_the_services_own_page_may_send_changes(sent_headers):
    site_check()("POST", {b"host": b"here:8080", **sent_headers})


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("sent_headers", FOREIGN)
def test_reads_are_not_checked(method, sent_headers):
    site_check()(method, {b"host": b"here:8080", **sent_headers})


@pytest.mark.parametrize("sent_headers", FOREIGN)
def test_pages_of_allowed_origins_may_send_changes(sent_headers):
    site_check({"*"})("POST", {b"host": b"here:8080", **sent_headers})
    origin = sent_headers.get(b"origin")
    if origin is not None:
        site_check({origin.decode()})("POST", {b"host": b"here:8080", **sent_headers})


@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ({b"origin": EVIL, b"content-type": b"application/json"}, True),
        ({b"origin": EVIL, b"content-type": b"Application/JSON; charset=utf-8"}, True),
        ({b"origin": EVIL, b"content-type": b"text/plain"}, False),
        ({b"origin": EVIL, b"content-type": b"text/plain;application/json"}, False),
        ({b"origin": EVIL}, False),
        ({b"sec-fetch-site": b"cross-site", b"content-type": b"application/json"}, False),
        ({b"sec-fetch-site": b"cross-site", b"origin": EVIL, b"authorization": b"Bearer a"}, True),
        ({b"sec-fetch-site": b"cross-site", b"origin": EVIL, b"x-api-key": b"a"}, True),
    ],
)
def test_preflighted_requests_are_trusted_if_configured(more, passes):
    check = site_check(trusts_preflight=True)
    if passes:
        check("POST", {b"host": b"here:8080", **more})
    else:
        with pytest.raises(HttpError, match="--allowed-origins"):
            check("POST", {b"host": b"here:8080", **more})
    with pytest.raises(HttpError):
        site_check()("POST", {b"host": b"here:8080", **more})


@contextlib.asynccontextmanager
async def orchestrator(tmp_path, **more):
    whole = build(OrchestratorSettings(store=tmp_path / "store.db", **more))
    whole.leadership.lead_until(math.inf)
    try:
        yield whole.app
    finally:
        await whole.client.aclose()
        whole.store.close()


@contextlib.asynccontextmanager
async def agent(tmp_path, **more):
    folders = {"state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache"}
    yield build_worker(WorkerSettings(engine_url="http://127.0.0.1:1", **folders, **more), port=0).app


@pytest.mark.parametrize("service", [orchestrator, agent])
async def test_no_page_changes_anything_at_a_keyless_service(service, tmp_path):
    async with service(tmp_path) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for sent_headers in FOREIGN:
                headers = {name.decode(): value.decode() for name, value in sent_headers.items()}
                for path in CHANGES[service.__name__]:
                    answer = await client.post(path, headers=headers)
                    assert error_of(answer) == (403, "cross_site"), path
                    answer = await client.post(path, headers=headers | {"content-type": "text/plain"}, content="{}")
                    assert error_of(answer) == (403, "cross_site"), path
                assert (await client.get("/health", headers=headers)).status_code == 200
            for path in CHANGES[service.__name__]:
                answer = await client.post(path, headers={"sec-fetch-site": "same-origin"})
                assert "cross_site" not in answer.text, path


async def test_no_page_can_use_a_router_without_keys():
    engine = EngineDouble("w0")
    foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    async with fleet(engine) as (client, _, _):
        for path in ("/v1/chat/completions", "/v1/responses/resp_a/cancel", "/v1/route", "/generate", "/nowhere"):
            for headers in (foreign, {"origin": "null"}):
                answer = await client.post(path, headers=headers, content=b"{}")
                assert error_of(answer) == (403, "cross_site"), path
        assert error_of(await client.post("/v1/chat/completions", json=CHAT, headers=foreign)) == (403, "cross_site")
        assert engine.bodies == []
        assert (await client.get("/v1/models", headers=foreign)).status_code == 200
        own = {"origin": str(client.base_url).rstrip("/")}
        for headers in (own, {"sec-fetch-site": "none"}, {}):
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_an_allowed_page_and_a_program_with_a_key_are_served_by_a_router(tmp_path):
    page = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    async with fleet(EngineDouble("w0"), allowed_origins=("https://app.example",)) as (client, _, _):
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=page)).status_code == 200
        refused = await client.post(
            "/v1/chat/completions", json=CHAT, headers=page | {"origin": "https://evil.example"}
        )
        assert error_of(refused) == (403, "cross_site")
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys:\n- {{sha256: {hash_key('mine')}, scopes: [infer]}}\n")
    async with fleet(EngineDouble("w0"), key_files=(keys,)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=page | {"authorization": "Bearer mine"})
        assert answer.status_code == 200
