"""Which replicas a request that they failed may go to again, and from when on."""

import re
from math import inf
from pathlib import Path

import pytest

from router.core.failover.circuit_breaker import COUNTED
from router.core.failover.exclusions import AttemptFailure, excluded_incarnations
from router.core.failover.verdict import VERDICTS, reasons_blaming
from router.core.fleet import EngineReport
from router.request import engine_attempt
from tests.router.core.schedule.test_policy import SQL, a_replica

W0 = ("w0", "one")
DOCS = Path(__file__).parents[4] / "docs" / "operations.md"


def is_excluded(reason, *, tells_start=True, served_at=-inf, **more):
    replica = a_replica("w0", residents=[SQL], engine_boot_id="one", **more)
    failures = {W0: AttemptFailure(reason, 10.0, tells_start)}
    found = excluded_incarnations(failures, {replica.id: replica}, lambda _: served_at)
    assert found in (frozenset(), {W0})
    return bool(found)


@pytest.mark.parametrize("reason", VERDICTS)
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
        assert is_excluded(reason, **shown) == (sign != VERDICTS[reason].back_after or sign == "restarted")
        assert is_excluded(reason, **shown, state="starting")
    failures = {W0: AttemptFailure(reason, 10.0)}
    again = a_replica("w0", engine_boot_id="two")
    assert again.incarnation not in excluded_incarnations(failures, {"w0": again}, lambda _: inf)


def test_an_engine_that_is_said_to_hang_has_not_answered():
    assert is_excluded("hung", report=EngineReport(at=11.0), is_suspect=True)
    assert not is_excluded("hung", report=EngineReport(at=11.0))


def test_where_no_boot_id_tells_a_restart_an_answer_ends_the_exclusion():
    assert is_excluded("engine_dead", report=EngineReport(at=10.0), tells_start=False)
    assert not is_excluded("engine_dead", report=EngineReport(at=11.0), tells_start=False)


# Reason -> (tried again, may wait for a replica, in the retry budget; against replica, adapter, request).
EXPECTED = {
    "connection": ("elsewhere", True, True, {"replica"}),
    "no_descriptors": ("elsewhere", True, True, set()),
    "no_answer": ("alone", True, True, {"replica", "adapter", "request"}),
    "begun_only": ("alone", True, True, {"adapter"}),
    "hung": ("alone", True, True, {"replica", "adapter", "request"}),
    "no_answer_in_time": ("never", True, True, {"replica", "adapter"}),
    "engine_unavailable": ("elsewhere", False, True, {"replica"}),
    "engine_unauthorized": ("elsewhere", False, True, {"replica"}),
    "engine_draining": ("elsewhere", True, True, {"replica"}),
    "engine_dead": ("alone", True, True, {"replica", "adapter", "request"}),
    "first_event_error": ("alone", False, True, {"replica", "adapter"}),
    "adapter_missing": ("elsewhere", True, False, set()),
    "answer_too_large": ("never", True, True, set()),
    "unknown_dialect": ("elsewhere", True, True, set()),
}


@pytest.mark.parametrize("reason", EXPECTED)
def test_a_failed_attempt_is_tried_again_and_blamed_by_its_reason(reason):
    verdict = VERDICTS[reason]
    assert (verdict.retry, verdict.may_wait, verdict.costs_budget, set(verdict.blames)) == EXPECTED[reason]


def test_every_reason_of_a_failed_attempt_has_a_verdict():
    assert EXPECTED.keys() == VERDICTS.keys()
    assert set(engine_attempt.LOSS_MESSAGES) <= set(VERDICTS)
    assert reasons_blaming("replica") <= COUNTED
    assert COUNTED - reasons_blaming("replica") == {"engine_error", "silent"}


def test_the_docs_say_of_every_reason_what_its_verdict_says():
    text = DOCS.read_text()
    table = text[text.index("| `retries{reason}` |") :].partition("\n\n")[0]
    documented, back_after = {}, {}
    for line in table.splitlines()[2:]:
        names, _, tried_again, against, not_before = line.strip("|").split(" | ")
        for name in re.findall(r"`(\w+)`", names):
            documented[name] = tried_again.split(",")[0].split(":")[0].strip(), set(re.findall(r"\w+", against))
            back_after[name] = not_before.strip()
    words = {"elsewhere": "elsewhere", "alone": "once", "never": "no"}
    said = {reason: (words[v.retry], set(v.blames) or {"nobody"}) for reason, v in VERDICTS.items()}
    assert documented == said
    for name, text in back_after.items():
        same_as = re.fullmatch(r"as `(\w+)`", text)
        assert SIGNS[VERDICTS[name].back_after] in back_after[same_as[1] if same_as else name], name


# The event after which an engine gets a request again -> its words in the docs.
SIGNS = {
    "answered": "the engine has answered",
    "listed": "the engine's own list was read again",
    "served": "the engine has answered another request of this router",
    "restarted": "a restart",
}
