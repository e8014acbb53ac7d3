"""Which adapters have metric series of their own, and how several processes agree on them."""

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.telemetry.adapter_labels import OTHER, AdapterFigures, RecentUse, agree, choose_labels

NAMES = st.sampled_from([*"abcdefgh", OTHER])
REQUESTS = st.dictionaries(NAMES, st.floats(0, 100), max_size=9)


def recent(labels, **requests):
    adapters = {name: AdapterFigures(count) for name, count in requests.items()}
    return RecentUse(labels, adapters, AdapterFigures(sum(requests.values())))


@given(st.sets(st.sampled_from("abcdefgh"), max_size=4), REQUESTS, st.integers(0, 4))
def test_labels_are_bounded_and_given_to_the_busiest(current, requests, most):
    current = set(sorted(current)[:most])
    chosen = choose_labels(current, requests, most)
    assert len(chosen) == min(most, len(current | requests.keys() - {OTHER}))
    assert OTHER not in chosen, "else its series would end with that adapter's traffic"
    left_out = requests.keys() - chosen - {OTHER}
    for newcomer in chosen - current:
        assert all(requests[newcomer] >= requests[name] for name in left_out)
    assert len(current - chosen) <= len(chosen - current), "a series ends only where another begins"
    # An adapter that is among the first twice as many keeps its series.
    first = sorted(requests.keys() - {OTHER}, key=lambda name: (requests[name], name), reverse=True)[: 2 * most]
    assert all(name in chosen for name in current & set(first))


def test_processes_agree_by_the_use_in_all_of_them():
    agreed = agree([recent((), a=5, b=4, c=3), recent((), c=3, d=1)], 2)
    assert (agreed.adapters, agreed.from_zero) == (["a", "c"], ())


def test_a_newcomer_begins_at_zero_once_labels_change_hands():
    free = agree([recent(["a"], a=5, b=4)], 2)
    assert (free.adapters, free.from_zero) == (["a", "b"], ())
    full = agree([recent(["a", "b"], a=5, b=0.1, c=4, d=3, e=2)], 2)
    assert (full.adapters, full.from_zero) == (["a", "c"], ["c"])


def test_hit_rates_are_of_all_processes_and_the_rest_is_other():
    uses = [
        RecentUse(
            ["a"], {"a": AdapterFigures(9, 100, 100), "b": AdapterFigures(1, 50, 0)}, AdapterFigures(10, 150, 100)
        ),
        RecentUse(["a"], {"a": AdapterFigures(9, 300, 0)}, AdapterFigures(9, 300, 0)),
    ]
    assert agree(uses, 1).hit_rates == {"a": 0.25, OTHER: 0.0}
    assert agree([recent((), a=1)], 1).hit_rates == {}, "no engine has reported cached tokens"
