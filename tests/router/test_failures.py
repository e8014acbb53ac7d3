"""Which replicas a request that they failed may go to again, and from when on."""

import re
from math import inf
from pathlib import Path

import pytest

from router.core.failover.exclusions import ENDS, FailedAttempt, excluded
from router.core.fleet import EngineReport
from router.request import engine_attempt
from tests.router.test_policy import SQL, a_replica

W0 = ("w0", "one")
DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


def is_excluded(reason, *, tells_start=True, served_at=-inf, **more):
    replica = a_replica("w0", residents=[SQL], engine_boot_id="one", **more)
    failures = {W0: FailedAttempt(reason, 10.0, tells_start)}
    found = excluded(failures, {replica.id: replica}, lambda _: served_at)
    assert found in (frozenset(), {W0})
    return bool(found)


@pytest.mark.parametrize("reason", ENDS)
def test_a_replica_is_excluded_until_its_own_sign_and_by_no_other(reason):
    signs = {
        "answered": {"report": EngineReport(at=10.1)},
        "listed": {"report": EngineReport(listed_at=10.1)},
        "served": {"served_at": 10.1},
        "restarted": {},
    }
    early = {"report": EngineReport(at=10.0, listed_at=10.0), "served_at": 10.0}
    assert is_excluded(reason, **early)
    for sign, shown in signs.items():
        assert is_excluded(reason, **shown) == (sign != ENDS[reason] or sign == "restarted")
        assert is_excluded(reason, **shown, state="starting")
    failures = {W0: FailedAttempt(reason, 10.0)}
    again = a_replica("w0", engine_boot_id="two")
    assert again.incarnation not in excluded(failures, {"w0": again}, lambda _: inf)


def test_an_engine_that_is_said_to_hang_has_not_answered():
    assert is_excluded("hung", report=EngineReport(at=11.0), is_suspect=True)
    assert not is_excluded("hung", report=EngineReport(at=11.0))


def test_where_no_boot_id_tells_a_restart_an_answer_ends_the_exclusion():
    assert is_excluded("engine_dead", report=EngineReport(at=10.0), tells_start=False)
    assert not is_excluded("engine_dead", report=EngineReport(at=11.0), tells_start=False)


def test_every_reason_of_a_failed_attempt_has_its_end_and_its_line_in_the_docs():
    text = DOCS.read_text()
    table = text[text.index("| `retries{reason}` |") :].partition("\n\n")[0]
    documented = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert documented == set(ENDS)
    assert set(engine_attempt._LOST) <= set(ENDS)
