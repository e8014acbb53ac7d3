"""Tokens of a real OIDC server: taken as its grants say, and forged ones refused, each with its reason."""

import base64
import hashlib
import hmac
import json
import secrets
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from structlog.testing import capture_logs

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import hash_key
from lorafleet.keys.signing_keys import read_keys
from lorafleet.keys.tokens import MOST_TOKEN_BYTES, TokenRefused
from lorafleet.service.http import HttpError
from orchestrator.model.limits import AccountLimits
from tests.oidc_server import QUIET, issuer_file, oidc_server

pytestmark = QUIET


class TurnedClocks:
    """Clocks of a server that a test turns."""

    ahead_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead_s

    def unix(self):
        return time.time() + self.ahead_s


@pytest.fixture(scope="module")
def oidc():
    with oidc_server() as server:
        yield server


@pytest.fixture
def wall():
    return TurnedClocks()


@pytest.fixture
async def keys(oidc, tmp_path, wall):
    """A server's keys, which has just read the issuer's."""
    found = ApiKeys([issuer_file(tmp_path / "keys.yaml", oidc.url)], clock=wall.monotonic, wall=wall.unix)
    await found.signing_keys.fetch_due()
    return found


def refusal_of(keys, token):
    with pytest.raises(HttpError) as refused:
        keys.caller(f"Bearer {token}")
    return refused.value


# -- what is granted ------------------------------------------------------------------------------------------


async def test_a_user_who_has_logged_in_is_the_caller_that_the_grants_give(oidc, keys):
    caller = keys.caller(f"Bearer {oidc.log_in('ann', groups=['other', 'admins'], email='ann@example.com')}")
    assert (caller.tenant, set(caller.scopes), caller.issuer, caller.note) == (
        None,
        {"admin"},
        oidc.url,
        "ann@example.com",
    )
    assert keys.caller(oidc.log_in("ann", groups=["admins"]).join(["Bearer ", ""])).key_id == caller.key_id
    assert keys.caller(f"Bearer {oidc.log_in('bob', groups=['admins'])}").key_id != caller.key_id
    assert caller.name == f"operator (token {caller.key_id})"


async def test_what_a_pattern_captures_stands_in_every_field_of_its_grant(oidc, tmp_path, wall):
    tenants = "tenants: {acme: {limits: {tokens_per_minute: 9}}}\n"
    keys = ApiKeys([issuer_file(tmp_path / "keys.yaml", oidc.url, more=tenants)], clock=wall.monotonic, wall=wall.unix)
    await keys.signing_keys.fetch_due()
    token = oidc.sign(oidc.claims(groups=["x", "team-acme"], email_verified=True))
    caller = keys.caller(f"Bearer {token}")
    assert (caller.tenant, caller.namespace, caller.lora_ids) == ("acme", "acme/runs", ("acme/*",))
    assert caller.limits == AccountLimits(requests_per_minute=60)
    assert caller.only_tenant == "acme"
    assert caller.may_name("acme/x")
    assert not caller.may_name("other/x")
    assert caller.tenant_limits == AccountLimits(tokens_per_minute=9)


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({"groups": [], "realm": {"roles": ["reader"]}, "scope": "openid fleet:read"}, {"view"}),
        ({"groups": [], "realm.roles": "reader", "scope": "fleet:"}, {"view"}),
        ({"groups": None, "https://x.example/org": "acme"}, {"infer"}),
        ({"groups": "admins"}, {"admin"}),
    ],
)
async def test_claims_may_be_nested_lists_words_and_texts(oidc, keys, claims, scopes):
    assert keys.caller(f"Bearer {oidc.sign(oidc.claims(**claims))}").scopes == scopes


async def test_key_files_keys_count_beside_tokens_and_in_either_header(oidc, tmp_path):
    path = issuer_file(tmp_path / "k", oidc.url, more=f"keys:\n- {{sha256: {hash_key('one')}, scopes: [infer]}}\n")
    keys = ApiKeys([path])
    await keys.signing_keys.fetch_due()
    assert keys.caller("Bearer one").scopes == {"infer"}
    assert keys.caller(b"Bearer " + oidc.sign(oidc.claims()).encode()).scopes == {"admin"}


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "PS256", "EdDSA"])
async def test_each_algorithm_of_the_allow_list_is_taken_with_a_key_of_its_kind(oidc, tmp_path, algorithm):
    key = {
        "RS256": lambda: rsa.generate_private_key(65537, 2048),
        "PS256": lambda: rsa.generate_private_key(65537, 2048),
        "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate,
    }[algorithm]()
    keys = ApiKeys([issuer_file(tmp_path / "k", oidc.url, more=f"  algorithms: [{algorithm}]\n")])
    await keys.signing_keys.fetch_due()
    set_keys(keys, oidc, [jwk_of(key, algorithm, kid="mine")])
    assert keys.caller(f"Bearer {oidc.sign(oidc.claims(), key=key, algorithm=algorithm, kid='mine')}").may("admin")


def jwk_of(key, algorithm, **more):
    found = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**found, **more}


def set_keys(keys, oidc, entries):
    """Make these the issuer's keys, as if they had been fetched."""
    keys.signing_keys._states[oidc.url].keys = read_keys(json.dumps({"keys": entries}).encode())


# -- forged tokens --------------------------------------------------------------------------------------------


def b64(data):
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def unsigned(oidc, header, claims=None, signature=""):
    return f"{b64(header)}.{b64(oidc.claims() if claims is None else claims)}.{signature}"


def hmac_by_public_key(oidc, encoding, form):
    """The classic confusion: the public key's text is the secret of an HMAC."""
    secret = oidc.key.public_key().public_bytes(encoding, form)
    head = f"{b64({'alg': 'HS256', 'typ': 'JWT', 'kid': oidc.kid})}.{b64(oidc.claims())}"
    return f"{head}.{b64(hmac.new(secret, head.encode(), hashlib.sha256).digest())}"


def with_changed_claims(oidc):
    head, _, signature = oidc.sign(oidc.claims(groups=["team-acme"])).split(".")
    return f"{head}.{b64(oidc.claims())}.{signature}"


def with_own_key_inside(oidc, **headers):
    other = rsa.generate_private_key(65537, 2048)
    return oidc.sign(oidc.claims(), key=other, **(headers or {"jwk": jwk_of(other, "RS256")}))


def unsigned_sub(oidc):
    claims = oidc.claims() | {"sub": 7}
    head = f"{b64({'alg': 'RS256', 'kid': oidc.kid})}.{b64(claims)}"
    return f"{head}.{b64(jwt.get_algorithm_by_name('RS256').sign(head.encode(), oidc.key))}"


OTHER = rsa.generate_private_key(65537, 2048)
CURVE = ec.generate_private_key(ec.SECP256R1())
NOW = time.time
INVALID, EXPIRED, NO_GRANT = (401, "invalid_token"), (401, "expired_token"), (403, "no_grant")

FORGED = {
    # no signature, or none of the issuer's
    "alg none": (lambda o: unsigned(o, {"alg": "none"}), INVALID, "algorithm"),
    "alg None": (lambda o: unsigned(o, {"alg": "None", "kid": o.kid}), INVALID, "algorithm"),
    "alg nOnE with a signature": (lambda o: unsigned(o, {"alg": "nOnE"}, signature=b64(b"x")), INVALID, "algorithm"),
    "no alg": (lambda o: unsigned(o, {"typ": "JWT"}), INVALID, "algorithm"),
    "alg a list": (lambda o: unsigned(o, {"alg": ["RS256"]}), INVALID, "algorithm"),
    "alg null": (lambda o: unsigned(o, {"alg": None}), INVALID, "algorithm"),
    "HS256 by the public key in PEM": (
        lambda o: hmac_by_public_key(o, Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        INVALID,
        "algorithm",
    ),
    "HS256 by the public key in DER": (
        lambda o: hmac_by_public_key(o, Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        INVALID,
        "algorithm",
    ),
    "HS512 by a guessed secret": (lambda o: o.sign(o.claims(), key="s" * 64, algorithm="HS512"), INVALID, "algorithm"),
    "RS512, not on the list": (lambda o: o.sign(o.claims(), algorithm="RS512"), INVALID, "algorithm"),
    "PS256, not on the list": (lambda o: o.sign(o.claims(), algorithm="PS256"), INVALID, "algorithm"),
    "ES256 with the RSA key's kid": (lambda o: o.sign(o.claims(), key=CURVE, algorithm="ES256"), INVALID, "key"),
    "another's key under the issuer's kid": (lambda o: o.sign(o.claims(), key=OTHER), INVALID, "signature"),
    "a kid that the issuer does not have": (lambda o: o.sign(o.claims(), key=OTHER, kid="mine"), INVALID, "key"),
    "a kid that is a path": (lambda o: o.sign(o.claims(), key=OTHER, kid="../../dev/null"), INVALID, "key"),
    "a kid of SQL": (lambda o: o.sign(o.claims(), key=OTHER, kid="' UNION SELECT 'x"), INVALID, "key"),
    "a kid of kilobytes": (lambda o: o.sign(o.claims(), kid="k" * 4000), INVALID, "header"),
    "a kid that is a number": (lambda o: unsigned(o, {"alg": "RS256", "kid": 1}, signature="AA"), INVALID, "header"),
    "no signature": (lambda o: o.sign(o.claims()).rpartition(".")[0] + ".", INVALID, "signature"),
    "half a signature": (lambda o: o.sign(o.claims())[:-102], INVALID, "signature"),
    "the claims of another token": (with_changed_claims, INVALID, "signature"),
    # keys and meanings that the token brings itself
    "its own key in jwk": (with_own_key_inside, INVALID, "header"),
    "its own key at jku": (lambda o: with_own_key_inside(o, jku="http://attacker.example/jwks"), INVALID, "header"),
    "its own certificate at x5u": (lambda o: with_own_key_inside(o, x5u="http://a.example/c"), INVALID, "header"),
    "its own certificate in x5c": (lambda o: with_own_key_inside(o, x5c=["MIIB"]), INVALID, "header"),
    "an unknown critical header": (
        lambda o: o.sign(o.claims(), crit=["exp"], exp=1),
        INVALID,
        "header",
    ),
    "crit b64": (lambda o: unsigned(o, {"alg": "RS256", "b64": False, "crit": ["b64"]}), INVALID, "malformed"),
    "of a logout": (lambda o: o.sign(o.claims(), typ="logout+jwt"), INVALID, "header"),
    "of another service's proof": (lambda o: o.sign(o.claims(), typ="dpop+jwt"), INVALID, "header"),
    # claims
    "another issuer": (lambda o: o.sign(o.claims(iss="https://attacker.example")), INVALID, "issuer"),
    "the issuer with a slash": (lambda o: o.sign(o.claims(iss=o.url + "/")), INVALID, "issuer"),
    "the issuer in a list": (lambda o: unsigned(o, {"alg": "RS256"}, o.claims() | {"iss": [o.url]}), INVALID, "issuer"),
    "no issuer": (lambda o: o.sign(o.claims(iss=None)), INVALID, "issuer"),
    "another audience": (lambda o: o.sign(o.claims(aud="billing")), INVALID, "audience"),
    "other audiences": (lambda o: o.sign(o.claims(aud=["billing", "lorafleet2"])), INVALID, "audience"),
    "no audience": (lambda o: o.sign(o.claims(aud=None)), INVALID, "audience"),
    "an audience that is a number": (lambda o: o.sign(o.claims(aud=7)), INVALID, "audience"),
    "no subject": (lambda o: o.sign(o.claims(sub=None)), INVALID, "claims"),
    "a subject that is a number": (unsigned_sub, INVALID, "claims"),
    "no expiry": (lambda o: o.sign(o.claims(exp=None)), INVALID, "claims"),
    "an expiry that is a text": (lambda o: o.sign(o.claims(exp="2099-01-01")), INVALID, "claims"),
    "an expiry that is true": (lambda o: o.sign(o.claims(exp=True)), INVALID, "claims"),
    "an expiry beyond the calendar": (lambda o: o.sign(o.claims(exp=10**18)), INVALID, "claims"),
    "an expiry of NaN": (lambda o: o.sign(o.claims(exp=float("nan"))), INVALID, "claims"),
    "expired": (lambda o: o.sign(o.claims(exp=NOW() - 31)), EXPIRED, "expired"),
    "expired in 1970": (lambda o: o.sign(o.claims(exp=0)), EXPIRED, "expired"),
    "valid tomorrow": (lambda o: o.sign(o.claims(nbf=NOW() + 86_400, exp=NOW() + 90_000)), INVALID, "not_yet_valid"),
    "issued tomorrow": (lambda o: o.sign(o.claims(iat=NOW() + 86_400, exp=NOW() + 90_000)), INVALID, "not_yet_valid"),
    # what is granted
    "nobody's group": (lambda o: o.sign(o.claims(groups=["guests"])), NO_GRANT, "no_grant"),
    "a group that only begins so": (lambda o: o.sign(o.claims(groups=["admins2"])), NO_GRANT, "no_grant"),
    "two teams": (
        lambda o: o.sign(o.claims(groups=["team-a", "team-b"], email_verified=True)),
        NO_GRANT,
        "ambiguous_grant",
    ),
    "a team that is a pattern": (
        lambda o: o.sign(o.claims(groups=["team-*"], email_verified=True)),
        NO_GRANT,
        "no_grant",
    ),
    "a team that is a path": (
        lambda o: o.sign(o.claims(groups=["team-a/../b"], email_verified=True)),
        NO_GRANT,
        "no_grant",
    ),
    "a team of two dots": (lambda o: o.sign(o.claims(groups=["team-.."], email_verified=True)), NO_GRANT, "no_grant"),
    "an address that is not verified": (
        lambda o: o.sign(o.claims(groups=["team-a"], email_verified=False)),
        NO_GRANT,
        "no_grant",
    ),
    # form
    "encrypted": (
        lambda o: ".".join([b64({"alg": "RSA-OAEP", "enc": "A256GCM"}), "a", "b", "c", "d"]),
        INVALID,
        "malformed",
    ),
    "huge": (lambda o: o.sign(o.claims(pad="x" * MOST_TOKEN_BYTES)), INVALID, "too_large"),
    "no JSON": (lambda o: b64(b'{"no') + f".{b64(b'{}')}.x", INVALID, "malformed"),
    "claims that are a list": (lambda o: f"{b64({'alg': 'RS256'})}.{b64(b'[1]')}.AA", INVALID, "malformed"),
    "nested without end": (lambda o: f"{b64({'alg': 'RS256'})}.{b64(b'[' * 8000)}.AA", INVALID, "malformed"),
    "no base64": (lambda o: f"{b64({'alg': 'RS256'})}.!!!.AA", INVALID, "malformed"),
    "a byte above ASCII": (lambda o: o.sign(o.claims()) + "\xe9", INVALID, "malformed"),
}


@pytest.mark.parametrize("name", FORGED)
async def test_a_forged_token_is_refused_with_its_reason(oidc, keys, name):
    make, (status, code), reason = FORGED[name]
    token = make(oidc)
    with capture_logs() as logs:
        refused = refusal_of(keys, token)
    assert isinstance(refused, TokenRefused)
    assert (refused.status, refused.code, refused.reason) == (status, code, reason), str(refused)
    assert keys.refused_tokens == {reason: 1}
    (line,) = (line for line in logs if line["event"] == "token refused")
    assert line["reason"] == reason
    signature = token.rpartition(".")[2]
    assert len(signature) < 20 or signature not in str(logs) + str(refused), "a token is a secret"


async def test_a_token_is_no_key_without_an_issuer_in_the_key_files(oidc, tmp_path):
    path = tmp_path / "k"
    path.write_text("keys: []\n")
    refused = refusal_of(ApiKeys([path]), oidc.sign(oidc.claims()))
    assert (refused.status, refused.code) == (401, "invalid_api_key")
    assert "no issuer" in str(refused)


async def test_a_refused_token_is_logged_once_in_ten_seconds_for_each_reason(oidc, keys, wall):
    with capture_logs() as logs:
        for _ in range(5):
            refusal_of(keys, oidc.sign(oidc.claims(aud="x")))
        wall.ahead_s = 11
        refusal_of(keys, oidc.sign(oidc.claims(aud="x")))
    assert [line["count"] for line in logs if line["event"] == "token refused"] == [1, 5]


# -- time -----------------------------------------------------------------------------------------------------


async def test_clocks_may_differ_by_the_skew(oidc, keys):
    for times in ({"exp": NOW() - 20}, {"nbf": NOW() + 20}, {"iat": NOW() + 20}):
        assert keys.caller(f"Bearer {oidc.sign(oidc.claims(**times))}").may("admin"), times


async def test_a_verified_token_is_refused_when_it_expires(oidc, keys, wall):
    token = oidc.sign(oidc.claims())
    caller = keys.caller(f"Bearer {token}")
    assert caller in keys.callers()
    wall.ahead_s = 631
    refused = refusal_of(keys, token)
    assert (refused.status, refused.code) == (401, "expired_token")
    assert caller not in keys.callers()


async def test_verified_tokens_are_bounded_and_verified_once(oidc, keys, monkeypatch):
    monkeypatch.setattr("lorafleet.keys.auth._MAX_CACHED_CALLERS", 3)
    tokens = [oidc.sign(oidc.claims(jti=secrets.token_hex(4))) for _ in range(5)]
    for token in tokens:
        keys.caller(f"Bearer {token}")
    assert 0 < len(keys._verified) <= 3
    decoded = []
    monkeypatch.setattr(jwt, "decode", lambda *args, **more: decoded.append(args))
    assert keys.caller(f"Bearer {tokens[-1]}").may("admin")
    assert decoded == []


# -- hot reload -----------------------------------------------------------------------------------------------


async def test_a_changed_grant_counts_for_tokens_that_were_verified_before(oidc, keys, tmp_path, wall):
    token = oidc.sign(oidc.claims(groups=["admins"]))
    assert keys.caller(f"Bearer {token}").may("admin")
    issuer_file(tmp_path / "keys.yaml", oidc.url, grants="\n  - claims: {groups: admins}\n    scopes: [view]\n")
    wall.ahead_s = 10  # the file has stood still
    assert keys.caller(f"Bearer {token}").scopes == {"view"}
    issuer_file(tmp_path / "keys.yaml", oidc.url, grants="\n  - claims: {groups: nobody}\n    scopes: [view]\n")
    wall.ahead_s = 20
    assert refusal_of(keys, token).code == "no_grant"
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    wall.ahead_s = 30
    assert refusal_of(keys, token).code == "invalid_api_key"


async def test_a_broken_mapping_leaves_the_last_good_one_in_force(oidc, keys, tmp_path, wall):
    token = oidc.sign(oidc.claims())
    issuer_file(tmp_path / "keys.yaml", oidc.url, grants="\n  - claims: {groups: admins}\n    scopes: [everything]\n")
    wall.ahead_s = 10
    with capture_logs() as logs:
        assert keys.caller(f"Bearer {token}").may("admin")
    assert any("scopes must be some of" in line.get("error", "") for line in logs)
