"""Tokens at the router, the orchestrator and an agent: as keys are, at each of their routes that needs one."""

import json
from dataclasses import replace

import httpx
import pytest
from fastapi.routing import APIRoute

from lorafleet.keys.key_files import hash_key
from orchestrator.model.questions import RoutedAsk, RouterQuestion
from router.api.questions import reply_to
from tests.lorafleet.http_server.test_cross_site import agent, orchestrator
from tests.lorafleet.keys.test_auth_scopes_first import scope_checks
from tests.oidc_server import QUIET, issuer_file, oidc_server
from tests.patience import until
from tests.router.doubles import CHAT, EngineDouble, error_of, fleet, sample_value, with_sql

pytestmark = QUIET


@pytest.fixture(scope="module")
def oidc():
    with oidc_server() as server:
        yield server


def bearer(token):
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("service", [orchestrator, agent])
async def test_a_token_opens_the_routes_that_its_grant_names(service, oidc, tmp_path):
    path = issuer_file(tmp_path / "keys.yaml", oidc.url)
    async with service(tmp_path, key_files=(path,)) as app:
        route, check = next(
            (route, scope_checks(route)[0])
            for route in app.routes
            if isinstance(route, APIRoute) and "GET" in route.methods and "{" not in route.path and scope_checks(route)
        )
        await check._keys.signing_keys.fetch_due()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            admin = oidc.log_in("ann", groups=["admins"])
            for headers in (bearer(admin), {"x-api-key": admin}):
                assert (await client.get(route.path, headers=headers)).status_code not in {401, 403}, route.path
            for claims, refusal in (
                ({"groups": ["guests"]}, (403, "no_grant")),
                ({"aud": "billing"}, (401, "invalid_token")),
                ({"exp": 1}, (401, "expired_token")),
            ):
                answer = await client.get(route.path, headers=bearer(oidc.sign(oidc.claims(**claims))))
                assert error_of(answer) == refusal
            assert error_of(await client.get(route.path)) == (401, "invalid_api_key")


async def test_a_router_answers_requests_of_tokens_by_their_tenant_and_limits(oidc, tmp_path):
    path = issuer_file(
        tmp_path / "keys.yaml", oidc.url, more=f"keys:\n- {{sha256: {hash_key('k')}, scopes: [admin]}}\n"
    )
    control = with_sql("w0")
    control.add_adapter("secret/v1", on=["w0"], tenants=("acme",))
    team = {"email_verified": True}
    acme, rival = (oidc.sign(oidc.claims(sub=name, groups=[f"team-{name}"], **team)) for name in ("acme", "rival"))
    secret = {**CHAT, "lora_id": "secret/v1"}
    async with fleet(EngineDouble("w0"), control=control, key_files=(path,)) as (client, _, parts):

        async def ask(token, body=CHAT):
            return await client.post("/v1/chat/completions", json=body, headers=bearer(token))

        async def is_ready():
            return (await ask(acme)).status_code != 503

        await until(is_ready)
        answer = await ask(acme, secret)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "60"
        assert error_of(await ask(rival, secret)) == (404, "model_not_found")
        assert error_of(await ask(acme + "x")) == (401, "invalid_token")
        assert error_of(await ask(oidc.sign(oidc.claims(aud="x")))) == (401, "invalid_token")
        assert error_of(await ask(oidc.sign(oidc.claims(groups=[])))) == (403, "no_grant")
        models = (await client.get("/v1/models", headers=bearer(acme))).json()["data"]
        assert "secret/v1" in {model["id"] for model in models}
        caller = parts.keys.caller(f"Bearer {acme}")
        for issuer, expected in ((oidc.url, 200), ("https://other.example", 403)):
            asked = RoutedAsk(
                model="secret/v1",
                prompt="x",
                max_tokens=1,
                key_id=caller.key_id,
                caller=replace(caller, issuer=issuer, expires_at=None),
            )
            body = json.loads(asked.model_dump_json())
            reply = await reply_to(parts, "r0", RouterQuestion(id="1", kind="ask", body=body))
            assert reply.status == expected, reply
        assert {each.line.key for each in parts.requests.kept if each.line.status == 200} == {caller.key_id}
        page = (await client.get("/metrics", headers=bearer("k"))).text
        assert sample_value(page, "lorafleet_token_refusals_total", reason="audience") == 1
        assert sample_value(page, "lorafleet_issuer_keys_age_seconds", issuer=oidc.url) < 600
