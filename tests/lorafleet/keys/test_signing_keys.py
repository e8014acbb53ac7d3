"""An issuer's signing keys: rotated, kept while it is away, dropped after that, and never asked for too often."""

import asyncio
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from structlog.testing import capture_logs

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.issuers import is_safe_url
from lorafleet.keys.metrics import TokenCollector
from lorafleet.keys.signing_keys import IssuerTrouble, read_keys
from tests.lorafleet.keys.test_tokens import TurnedClocks, jwk_of, refusal_of
from tests.oidc_server import QUIET, issuer_file, oidc_server
from tests.patience import until
from tests.serving import serving

pytestmark = QUIET


@pytest.fixture
def oidc():
    with oidc_server() as server:
        yield server


@pytest.fixture
def wall():
    return TurnedClocks()


@pytest.fixture
def keys(oidc, tmp_path, wall):
    path = issuer_file(tmp_path / "keys.yaml", oidc.url, more="  refresh_s: 100\n  outlive_s: 1000\n")
    return ApiKeys([path], clock=wall.monotonic, wall=wall.unix)


def fetches(oidc):
    return sum(path == "/jwks" for _, path, _ in oidc.calls)


async def test_a_token_before_the_first_fetch_is_to_be_sent_again(oidc, keys):
    token = oidc.sign(oidc.claims())
    refused = refusal_of(keys, token)
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "issuer_unreachable", 1.0)
    await keys.signing_keys.fetch_due()
    assert keys.caller(f"Bearer {token}").may("admin")


async def test_a_rotated_key_is_fetched_for_the_first_token_that_it_has_signed(oidc, keys, wall):
    await keys.signing_keys.fetch_due()
    before = oidc.sign(oidc.claims())
    assert keys.caller(f"Bearer {before}").may("admin")
    oidc.rotate()
    wall.ahead_s = 6
    following = asyncio.create_task(keys.signing_keys.follow())
    after = oidc.sign(oidc.claims())
    assert refusal_of(keys, after).status == 503
    assert (await until(lambda: caller_or_none(keys, after))).may("admin")
    refused = refusal_of(keys, before)
    assert (refused.status, refused.reason) == (401, "key"), "verified before, by a key that the issuer has dropped"
    following.cancel()


def caller_or_none(keys, token):
    try:
        return keys.caller(f"Bearer {token}")
    except Exception:  # noqa: BLE001
        return None


async def test_a_rotated_key_is_fetched_for_tokens_that_name_no_key(oidc, keys, wall):
    await keys.signing_keys.fetch_due()
    oidc.rotate()
    token = oidc.log_in("ann", groups=["admins"])  # this server's tokens have no `kid`
    assert refusal_of(keys, token).reason == "signature", "the keys were fetched a moment ago"
    wall.ahead_s = 6
    assert refusal_of(keys, token).status == 503
    await keys.signing_keys.fetch_due()
    assert keys.caller(f"Bearer {token}").may("admin")


async def test_tokens_with_unknown_keys_cause_one_fetch_in_five_seconds(oidc, keys, wall):
    await keys.signing_keys.fetch_due()
    asked = fetches(oidc)
    other = rsa.generate_private_key(65537, 2048)
    for number in range(20):
        assert refusal_of(keys, oidc.sign(oidc.claims(), key=other, kid=f"k{number}")).reason == "key"
        await keys.signing_keys.fetch_due()
    assert fetches(oidc) == asked
    wall.ahead_s = 6
    for number in range(20):
        refusal_of(keys, oidc.sign(oidc.claims(), key=other, kid=f"k{number}"))
        await keys.signing_keys.fetch_due()
    assert fetches(oidc) == asked + 1


async def test_keys_outlive_their_issuer_for_a_set_time_and_return_with_it(oidc, keys, wall):
    await keys.signing_keys.fetch_due()
    old = oidc.sign(oidc.claims(exp=2_000_000_000))
    assert keys.caller(f"Bearer {old}").may("admin")
    oidc.stop()
    with capture_logs() as logs:
        for ahead_s in (101, 200, 1099):
            wall.ahead_s = ahead_s
            await keys.signing_keys.fetch_due()
            assert keys.caller(f"Bearer {old}").may("admin"), ahead_s
            fresh = oidc.sign(oidc.claims(exp=2_000_000_000, jti=str(ahead_s)))
            assert keys.caller(f"Bearer {fresh}").may("admin"), "the last keys check new tokens, too"
        wall.ahead_s = 1200
        await keys.signing_keys.fetch_due()
    assert refusal_of(keys, old).reason == "issuer_away", "verified before, and forgotten with the keys"
    events = [line["event"] for line in logs]
    assert events.count("issuer's keys not fetched, the last ones stay") == 1
    assert events.count("issuer away for too long, its tokens are refused") == 1
    oidc.start()
    wall.ahead_s = 1300
    await keys.signing_keys.fetch_due()
    assert keys.caller(f"Bearer {old}").may("admin")


async def test_an_issuer_that_hangs_delays_no_other(oidc, tmp_path):
    from fastapi import FastAPI

    app, asked = FastAPI(), asyncio.Event()

    @app.get("/.well-known/openid-configuration")
    async def hang() -> None:
        asked.set()
        await asyncio.Event().wait()

    async with serving(app) as url:
        path = issuer_file(tmp_path / "k", url)
        other = path.read_text().replace(url, oidc.url).removeprefix("issuers:\n")
        path.write_text(path.read_text() + other)
        keys = ApiKeys([path])
        following = asyncio.create_task(keys.signing_keys.follow())
        await asked.wait()
        token = oidc.sign(oidc.claims())
        assert (await until(lambda: caller_or_none(keys, token))).issuer == oidc.url
        assert keys.signing_keys.ages_s()[url] == float("inf")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_an_issuer_of_a_changed_key_file_is_followed_and_another_keeps_its_keys(oidc, keys, tmp_path, wall):
    following = asyncio.create_task(keys.signing_keys.follow())
    token = oidc.sign(oidc.claims())
    await until(lambda: caller_or_none(keys, token))
    asked = fetches(oidc)
    with oidc_server() as second:
        text = (tmp_path / "keys.yaml").read_text()
        (tmp_path / "keys.yaml").write_text(text + text.replace(oidc.url, second.url).removeprefix("issuers:\n"))
        wall.ahead_s = 10
        its = second.sign(second.claims())
        assert (await until(lambda: caller_or_none(keys, its))).issuer == second.url
        assert keys.caller(f"Bearer {token}").issuer == oidc.url
        assert refusal_of(keys, oidc.sign(second.claims())).reason == "key", "one issuer signs no other's tokens"
    assert fetches(oidc) == asked
    text = (tmp_path / "keys.yaml").read_text()
    (tmp_path / "keys.yaml").write_text(text.replace("  refresh_s: 100\n", "  console: {client_id: c}\n", 1))
    wall.ahead_s = 20
    keys.issuers  # noqa: B018  (reads the file again)
    await until(lambda: keys.signing_keys.endpoints(keys.issuers[oidc.url]).token)
    following.cancel()


async def test_a_server_follows_the_issuers_of_its_key_files_while_it_runs(oidc, tmp_path):
    from lorafleet.http_server.guard import guard
    from lorafleet.keys.whoami import whoami_routes
    from lorafleet.service.http import add_routes, install_error_handlers
    from lorafleet.service.http.openapi import documented_app
    from lorafleet.telemetry.request_log import RequestLog
    from tests.serving import client_of

    keys = ApiKeys([issuer_file(tmp_path / "keys.yaml", oidc.url)])
    app = documented_app(title="t", version="0", description="")
    add_routes(app, whoami_routes(keys))
    install_error_handlers(app)
    guard(app, keys, allow_open=False, requests=RequestLog("router", "off"))
    async with serving(app) as url, client_of(url) as client:
        headers = {"authorization": f"Bearer {oidc.log_in('ann', groups=['admins'], email='ann@x.example')}"}

        async def whoami():
            answer = await client.get("/v1/whoami", headers=headers)
            return answer if answer.status_code == 200 else None

        found = (await until(whoami)).json()
        assert found["spec"] | {"expires_at": ""} == {
            "tenant": None,
            "scopes": ["admin"],
            "limits": {},
            "expires_at": "",
            "namespace": "",
            "lora_ids": [],
            "may_shadow_base": False,
            "note": "ann@x.example",
            "issuer": oidc.url,
            "tenant_limits": {},
        }
        refused = await client.get("/v1/whoami", headers={"authorization": f"Bearer {oidc.sign(oidc.claims(aud='x'))}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token")
        assert refused.headers["www-authenticate"].startswith("Bearer")
    figures = {sample.name: sample.value for family in TokenCollector(keys).collect() for sample in family.samples}
    assert figures["lorafleet_token_refusals_total"] >= 1
    assert figures["lorafleet_issuer_keys_age_seconds"] < 3600


def test_keys_that_are_not_for_signatures_or_not_safe_are_left_out():
    good = rsa.generate_private_key(65537, 2048)
    curve = ec.generate_private_key(ec.SECP256R1())
    entries = [
        jwk_of(good, "RS256", kid="good"),
        jwk_of(curve, "ES256", kid="curve", use="sig", alg="ES256"),
        jwk_of(good, "RS256", kid="for encryption", use="enc"),
        jwk_of(good, "RS256", kid="to sign", key_ops=["sign"]),
        jwk_of(rsa.generate_private_key(65537, 1024), "RS256", kid="short"),
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"},
        {"kty": "EC", "crv": "secp256k1", "kid": "coin", "x": "AA", "y": "AA"},
        {**jwk_of(good, "RS256"), "kid": "private", "d": "AA"},
        {"kty": "RSA", "kid": "broken", "n": "!", "e": 3},
        {"kty": ["RSA"]},
        {"kty": "OKP", "crv": ["Ed25519"]},
        7,
    ]
    found = read_keys(json.dumps({"keys": entries}).encode())
    assert [key.kid for key in found] == ["good", "curve"]
    assert not found[1].takes("RS256")
    with pytest.raises(IssuerTrouble, match="short"):
        read_keys(json.dumps({"keys": [entries[4]]}).encode())


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"keys": {}}', b'{"keys": []}', b'{"keys": [1]}', b"[" * 9000])
def test_what_is_no_key_set_is_an_issuers_trouble(raw):
    with pytest.raises(IssuerTrouble):
        read_keys(raw)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"issuer": "https://other.example"}, "is of issuer 'https://other.example'"),
        ({"jwks_uri": "http://far.example/jwks"}, "no safe jwks_uri"),
        ({"jwks_uri": "file:///etc/passwd"}, "no safe jwks_uri"),
        ({"jwks_uri": None}, "no safe jwks_uri"),
    ],
)
async def test_a_discovery_document_of_something_else_is_not_followed(oidc, tmp_path, change, says):
    """A server that answers as the issuer, but for one field."""
    from fastapi import FastAPI

    app = FastAPI()
    document = {}

    @app.get("/.well-known/openid-configuration")
    async def discovery() -> dict[str, object]:
        return document

    async with serving(app) as url:
        document |= {"issuer": url, "jwks_uri": f"{oidc.url}/jwks"} | change
        keys = ApiKeys([issuer_file(tmp_path / "k", url)])
        await keys.signing_keys.fetch_due()
        (issuer,) = keys.issuers.values()
        assert says in keys.signing_keys.trouble(issuer)


async def test_a_key_set_named_in_the_key_file_is_read_without_discovery(oidc, tmp_path):
    """As Kubernetes' API server is read, with a token and authorities of its own."""
    token = tmp_path / "token"
    token.write_text("pod-token")
    more = f"  keys_url: {oidc.url}/jwks\n  token_file: {token}\n"
    keys = ApiKeys([issuer_file(tmp_path / "k", "https://kubernetes.default.svc", more=more)])
    await keys.signing_keys.fetch_due()
    claims = oidc.claims(iss="https://kubernetes.default.svc", sub="system:serviceaccount:team-a:trainer")
    assert keys.caller(f"Bearer {oidc.sign(claims)}").issuer == "https://kubernetes.default.svc"
    assert all(path == "/jwks" for _, path, _ in oidc.calls)


@pytest.mark.parametrize(
    ("url", "is_safe"),
    [
        ("https://login.example.com/realms/ml", True),
        ("http://localhost:8080", True),
        ("http://127.0.0.1:1/x", True),
        ("http://[::1]:1", True),
        ("http://login.example.com", False),
        ("http://localhost.example.com", False),
        ("http://localhost@example.com", False),
        ("ftp://localhost", False),
        ("https://a.example;script-src", False),
        ("", False),
    ],
)
def test_only_https_and_loopback_are_safe_from_who_stands_between(url, is_safe):
    assert is_safe_url(url) is is_safe
