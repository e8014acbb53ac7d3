"""Source URLs: no secret in them, and no bytes of others by their digest."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.source_rules import digest_problem, secret_part, without_secrets

DIGEST = "ab" * 32
words = st.text("abcdefghij0123456789", min_size=1, max_size=8)
SECRETS = {
    "a user or password": "{0}://{3}:{3}@{1}/{2}",
    "a query": "{0}://{1}/{2}?k={3}",
    "a fragment": "{0}://{1}/{2}#{3}",
}


@given(st.sampled_from(["s3", "https", "hf"]), words, words, words, st.sampled_from(sorted(SECRETS)))
def test_each_part_that_may_be_a_secret_is_named_and_never_shown(scheme, host, path, secret, part):
    source = SECRETS[part].format(scheme, host, path, f"SECRET{secret}")
    assert secret_part(source) == part
    assert without_secrets(source) == f"'{scheme}://{host}/{path}'"


@pytest.mark.parametrize(
    "source", ["/data/a?b#c@d", "file:///data/a@b?c#d", "FILE:///a#b", "hf://org/name@main", "s3://bucket/a@b"]
)
def test_a_path_may_hold_any_character(source):
    assert secret_part(source) is None


def test_a_tenant_names_bytes_only_of_an_adapter_that_it_may_use():
    source = f"fleet:{DIGEST}"
    assert digest_problem(source, [SimpleNamespace(digest=DIGEST)]) is None
    assert DIGEST in digest_problem(source, [SimpleNamespace(digest="cd" * 32), SimpleNamespace(digest=None)])
    assert digest_problem("s3://bucket/sql", []) is None
    assert "lorafleet sync" in digest_problem(" Fleet+https://other/sql", [])
