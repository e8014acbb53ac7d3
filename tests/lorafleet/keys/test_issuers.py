"""Issuers and grants in key files: what is refused at the start, and what patterns of claims match."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.issuers import Grant, NoGrant
from lorafleet.keys.key_files import KeyFileError, read_key_file
from lorafleet.keys.roles import Caller, namespace_trouble

ENTRY = "issuers:\n- {issuer: https://login.example, audiences: [fleet], grants: [{claims: {g: a}, scopes: [view]}]}\n"


def grant(gives=None, **claims):
    return Grant(claims=tuple(claims.items()), gives=gives or Caller(None, frozenset({"view"})))


def test_an_issuer_needs_no_keys_beside_it(tmp_path):
    path = tmp_path / "k"
    path.write_text(ENTRY)
    found = read_key_file(path)
    assert found.callers == {}
    (issuer,) = found.issuers.values()
    assert (issuer.algorithms, issuer.skew_s, issuer.console) == (("RS256", "ES256"), 30.0, None)
    assert not ApiKeys([path]).is_open


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("https://login.example", "http://login.example", "issuer must be an https:// URL"),
        ("https://login.example", "login", "issuer must be an https:// URL"),
        ("audiences: [fleet]", "audiences: []", "audiences: "),
        ("audiences: [fleet], ", "", "audiences: "),
        ("audiences: [fleet]", "audiences: [fleet], algorithms: [HS256]", "algorithms.0"),
        ("audiences: [fleet]", "audiences: [fleet], algorithms: [none]", "algorithms.0"),
        ("audiences: [fleet]", "audiences: [fleet], skew_s: 86400", "skew_s: "),
        ("audiences: [fleet]", "audiences: [fleet], keys_url: http://a.example", "keys_url must be"),
        ("audiences: [fleet]", "audiences: [fleet], leeway: 3", "leeway: there is no such field"),
        ("audiences: [fleet]", "audiences: [fleet], console: {scope: x}", "console.client_id"),
        ("grants: [{claims: {g: a}, scopes: [view]}]", "grants: []", "grants: "),
        ("claims: {g: a}", "claims: {}", "grant 0: expected `claims:"),
        ("claims: {g: a}, ", "", "grant 0: expected `claims:"),
        ("claims: {g: a}", "claims: {g: [a]}", "claims must be names with patterns"),
        ("claims: {g: a}", "claims: {g: '{t}', h: '{t}'}", "stands in the claims twice"),
        ("scopes: [view]", "scopes: [view], tenant: '{team}'", "{team} stands in no pattern"),
        ("scopes: [view]", "scopes: [view], namespace: '{team}/x'", "{team} stands in no pattern"),
        ("scopes: [view]", "scopes: [view], namespace: 'a b'", "namespace must be"),
        ("scopes: [view]", "scopes: [everything]", "scopes must be some of"),
        ("scopes: [view]", "scopes: [operate], tenant: acme", "holds for the whole fleet"),
        ("scopes: [view]", "scopes: [view], sha256: aa", "expected `claims:"),
        ("scopes: [view]", "scopes: [view], limits: {requests: 3}", "limits must be some of"),
    ],
)
def test_an_issuer_with_a_mistake_is_refused_and_the_mistake_named(tmp_path, old, new, says):
    path = tmp_path / "k"
    assert old in ENTRY
    path.write_text(ENTRY.replace(old, new))
    with pytest.raises(KeyFileError, match="issuer 0") as refused:
        ApiKeys([path])
    assert says in str(refused.value)


def test_an_issuer_that_stands_twice_in_a_file_is_refused(tmp_path):
    path = tmp_path / "k"
    path.write_text(ENTRY + ENTRY.removeprefix("issuers:\n"))
    with pytest.raises(KeyFileError, match="twice"):
        ApiKeys([path])


@pytest.mark.parametrize(
    ("pattern", "value", "matches"),
    [
        ("admins", "admins", True),
        ("admins", "Admins", False),
        ("team-*", "team-", True),
        ("team-*", "team-a/b", True),
        ("team-*", "x-team-a", False),
        ("a.c", "abc", False),
        ("a|b", "a", False),
        ("[ab]", "a", False),
        ("*", "", True),
        ("/teams/{t}", "/teams/ml", True),
        ("/teams/{t}", "/teams/ml/sub", False),
        ("/teams/{t}", "/teams/", False),
        ("/teams/{t}", "/teams/ml\n", False),
        ("system:serviceaccount:{ns}:{name}", "system:serviceaccount:team-a:trainer", True),
        ("{t}", "*", False),
        ("{t}", ".", False),
        ("{t}", "..", False),
        ("{t}", "a" * 101, False),
        ("true", True, True),
        ("7", 7, True),
        ("x", {"x": 1}, False),
        ("x", None, False),
        ("x", [["x"]], False),
    ],
)
def test_a_pattern_matches_a_whole_value(pattern, value, matches):
    assert (grant(c=pattern).found_in({"c": value}) is not None) is matches


def test_all_patterns_of_a_grant_must_match():
    both = grant(a="1", b="2")
    assert both.found_in({"a": "1", "b": ["2", "3"]}) is not None
    assert both.found_in({"a": "1", "b": "3"}) is None
    assert both.found_in({"a": "1"}) is None


def test_one_value_twice_is_one_and_two_are_refused():
    teams = grant(Caller("{t}", frozenset({"infer"})), g="team-{t}")
    assert teams.found_in({"g": ["team-a", "team-a", "x"]}).tenant == "a"
    with pytest.raises(NoGrant, match="team-a, team-b"):
        teams.found_in({"g": ["team-a", "team-b"]})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(claims=st.dictionaries(st.sampled_from(["g", "a.b", "a", "scope"]) | st.text(max_size=5), _JSON, max_size=4))
def test_no_claim_makes_a_name_that_reaches_beyond_one_folder(claims):
    """A captured value becomes a tenant, and part of patterns of names: it is one plain word, whatever claims hold."""
    gives = Caller("{t}", frozenset({"tenant-admin"}), namespace="x/{t}", lora_ids=("{t}/*",))
    for claim in ("g", "a.b", "scope"):
        try:
            found = grant(gives, **{claim: "*{t}"}).found_in(claims) or grant(gives, **{claim: "{t}"}).found_in(claims)
        except NoGrant:
            continue
        if found is not None:
            assert not set("*?[]/{} \n") & set(found.tenant)
            assert found.tenant not in {".", ".."}
            assert namespace_trouble(found.namespace) is None
            assert not found.may_name(f"other/{found.tenant}")


def test_a_dotted_name_is_a_claim_or_a_claim_within_claims():
    claims = {"a": {"b": {"c": "1"}, "b.c": "2"}, "a.b": {"c": "3"}, "kubernetes.io": {"namespace": "n"}}
    assert grant(**{"kubernetes.io.namespace": "n"}).found_in(claims)
    assert grant(**{"a.b.c": "1"}).found_in({"a": {"b": {"c": "1"}}})
    assert grant(**{"a.b.d": "1"}).found_in(claims) is None
