"""Where a worker looks for an adapter's files, and in which order."""

from hypothesis import given
from hypothesis import strategies as st

from workers.core.fetch_ways import fetch_ways

FLAGS = ("has_digest", "has_neighbours", "may_use_digest", "has_fleet")
flags = st.fixed_dictionaries(dict.fromkeys(FLAGS, st.booleans()))
schemes = st.sampled_from(["file", "fleet", "hf", "s3"])


@given(schemes, flags)
def test_each_way_is_tried_once_at_most(scheme, flags):
    ways = fetch_ways(scheme, **flags)
    assert len(set(ways)) == len(ways)


@given(schemes, flags)
def test_only_the_source_gives_bytes_whose_digest_is_unknown_or_not_allowed(scheme, flags):
    ways = fetch_ways(scheme, **flags)
    if not flags["has_digest"] or not (flags["may_use_digest"] or scheme == "fleet"):
        assert set(ways) == (set() if scheme == "fleet" else {"source"})


@given(schemes, flags)
def test_a_source_is_asked_unless_the_fleet_is_the_source(scheme, flags):
    assert ("source" in fetch_ways(scheme, **flags)) == (scheme != "fleet")


@given(schemes, flags)
def test_without_an_orchestrator_no_other_worker_is_asked(scheme, flags):
    assert not {"neighbours", "fleet"} & set(fetch_ways(scheme, **flags | {"has_fleet": False}))


def test_neighbours_come_before_a_remote_source_and_after_a_local_one():
    every = dict.fromkeys(FLAGS, True)
    assert fetch_ways("hf", **every) == ("disk", "neighbours", "source", "fleet")
    assert fetch_ways("file", **every) == ("disk", "source", "neighbours", "fleet")
    assert fetch_ways("fleet", **every) == ("disk", "neighbours", "fleet")
