"""A run's own base URL, `/runs/NAME`: its path, and the caller that it makes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.keys.roles import ANYONE, Caller
from lorafleet.keys.runs import caller_in_run, path_behind_run, path_in_run, split_run
from lorafleet.service.http import HttpError

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True).filter(lambda name: name not in {".", ".."})
PATHS = st.from_regex(r"(/[a-z0-9%._-]{1,8}){1,4}", fullmatch=True)


@given(NAMES, PATHS)
def test_a_path_below_a_runs_base_url_is_split_and_joined_again(run, path):
    assert split_run(path_in_run(run, path)) == (run, path)
    assert split_run(path) == ("", path) or path.startswith("/runs/")
    assert path_in_run("", path) == path


@pytest.mark.parametrize(
    "path",
    ["/runs/", "/runs//v1/models", "/runs/../v1", "/runs/./v1", "/runs/a%2fb/v1", "/runs/a b/v1", "/runs/%00/v1"],
)
def test_a_name_that_is_no_part_of_a_name_is_no_runs(path):
    with pytest.raises(HttpError, match="the name of a run") as refused:
        split_run(path)
    assert (refused.value.status, refused.value.code) == (400, "invalid_run")
    assert path_behind_run(path) == ""


def test_a_run_without_a_path_behind_it_has_the_root():
    assert [split_run(path) for path in ("/runs/a", "/runs/a/", "/runs", "/running/a")] == [
        ("a", "/"),
        ("a", "/"),
        ("", "/runs"),
        ("", "/running/a"),
    ]


@pytest.mark.parametrize(
    ("caller", "whole"),
    [
        (ANYONE, "r1/policy"),
        (Caller("acme", frozenset({"register"})), "acme/r1/policy"),
        (Caller("acme", frozenset({"register"}), namespace="team-a"), "team-a/r1/policy"),
        (Caller(None, frozenset({"admin"}), namespace="ops/x"), "ops/x/r1/policy"),
    ],
)
def test_a_runs_names_are_below_its_keys_own(caller, whole):
    inside = caller_in_run(caller, "r1")
    assert inside.whole_name("policy") == inside.whole_name(whole) == whole
    assert inside.short_name(whole) == "policy"
    assert (inside.may_shadow_base, inside.may_name(whole), inside.may_name("other/policy")) == (
        True,
        True,
        False,
    )
    assert (inside.scopes, inside.tenant, inside.key_id) == (caller.scopes, caller.tenant, caller.key_id)
    assert caller_in_run(caller, "") is caller


def test_a_run_gives_a_key_no_names_beyond_its_own():
    caller = Caller("acme", frozenset({"register"}), lora_ids=("acme/x-*",)).in_run("r1")
    assert [caller.may_name(name) for name in ("acme/r1/policy", "acme/x-1")] == [False, True]
