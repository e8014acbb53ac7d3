"""Who fetches an adapter's files from where: one from the source, all others from those that have them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.identity import fleet_source
from orchestrator.core.copies import (
    NEIGHBOURS_NAMED,
    READERS_PER_HOLDER,
    STALLED_S,
    FetchChoice,
    FilesSnapshot,
    OngoingFetch,
    fetch_choice,
)

DIGEST, SOURCE = "d" * 64, "https://bucket.example/a.tar.gz"
NAMES = [f"w{number}" for number in range(8)]


def snapshot(holders: Sequence[str] = (), fetches: Sequence[OngoingFetch] = (), *, is_whole: bool = True):
    return FilesSnapshot(is_known=True, is_whole=is_whole, holders={DIGEST: set(holders)}, fetches={DIGEST: fetches})


def choose(files: FilesSnapshot, worker_id: str, *, source: str = SOURCE, reachable=NAMES, begun=(), now=100.0):
    return fetch_choice(source, DIGEST, worker_id, files, reachable=reachable, begun=begun, now=now)


@given(st.randoms(use_true_random=False), st.integers(1, 8), st.booleans())
def test_source_is_asked_once_and_every_worker_gets_the_files_whoever_dies(rng, count: int, may_die: bool):
    """A simulation: in each turn fetches end, and some workers die while they fetch."""
    names, holders, fetches = NAMES[:count], set(), {}
    alive, asked, deaths, now = set(names), 0, 0, 0.0
    for _ in range(60):
        now += 1.0
        for name in [name for name in fetches if rng.random() < 0.5]:
            is_dead = may_die and deaths < count - 1 and rng.random() < 0.3
            del fetches[name]
            if is_dead:
                alive.discard(name)
                deaths += 1
            else:
                holders.add(name)
        begun = []
        for name in names:
            if name in holders or name in fetches or name not in alive:
                continue
            files = snapshot(holders & alive, [fetch for fetch in fetches.values() if fetch not in begun])
            choice = choose(files, name, reachable=alive, begun=begun, now=now)
            if choice.is_held:
                continue
            asked += not choice.neighbours
            assert name not in choice.neighbours
            assert len(choice.neighbours) <= NEIGHBOURS_NAMED
            fetches[name] = OngoingFetch(worker_id=name, moved_at=now)
            begun.append(fetches[name])
        live = [fetch for fetch in fetches.values() if fetch.worker_id in alive]
        assert len(live) <= max(1, READERS_PER_HOLDER * len(holders & alive))
    assert holders >= alive, "no worker waits for ever"
    assert asked <= 1 + deaths, "only a death may cost the source one more fetch"


def test_a_fetch_that_stalls_or_whose_worker_is_gone_lets_one_more_ask_the_source():
    moving, stalled = (OngoingFetch(worker_id="w0", moved_at=100.0 - age) for age in (1.0, STALLED_S))
    assert choose(snapshot(fetches=[moving]), "w1") == FetchChoice(is_held=True)
    assert choose(snapshot(fetches=[moving]), "w1", reachable=["w1"]) == FetchChoice()
    assert choose(snapshot(fetches=[stalled]), "w1") == FetchChoice()
    taken_over = OngoingFetch(worker_id="w1", moved_at=100.0)
    assert choose(snapshot(fetches=[stalled]), "w2", begun=[taken_over]) == FetchChoice(is_held=True), "no herd"


def test_a_worker_that_has_the_files_and_one_that_reads_a_path_wait_for_nobody():
    moving = OngoingFetch(worker_id="w0", moved_at=100.0)
    assert choose(snapshot(["w1"], [moving]), "w1") == FetchChoice()
    for path in ("/srv/a", "file:///srv/a"):
        assert choose(snapshot(["w2"], [moving]), "w1", source=path) == FetchChoice()


def test_files_that_only_the_fleet_has_are_not_looked_for_where_they_cannot_be():
    source = fleet_source(DIGEST)
    assert choose(snapshot(), "w1", source=source) == FetchChoice(is_held=True)
    assert choose(snapshot(is_whole=False), "w1", source=source) == FetchChoice(), "a silent worker may have them"
    assert choose(snapshot(["w2"]), "w1", source=source) == FetchChoice(neighbours=("w2",))


def test_readers_are_spread_over_those_that_have_the_files():
    holders = NAMES[:4]
    first = {choose(snapshot(holders), f"reader-{number}").neighbours[0] for number in range(40)}
    assert first == set(holders)
