"""Which engines agree with our tokenizer: an answer counts for its boot alone, and until it is contradicted."""

from math import inf

import pytest

from router.tokenizing.agreement import TokenizerAgreement

ENGINE, NEXT_BOOT = ("w0", "boot-1"), ("w0", "boot-2")


@pytest.fixture
def agreement():
    made = TokenizerAgreement()
    made.add_engine("m", ENGINE)
    return made


def test_an_answer_counts_for_the_boot_and_the_tokenizer_that_it_is_about(agreement):
    agreement.record_answer(ENGINE, 1, agrees=True)
    assert agreement.agrees(ENGINE, 1, now=0)
    assert agreement.agreeing("m") == [ENGINE]
    assert not agreement.agrees(ENGINE, 2, now=0)
    agreement.add_engine("m", NEXT_BOOT)
    assert not agreement.agrees(ENGINE, 1, now=0)
    assert not agreement.agrees(NEXT_BOOT, 1, now=0)


def test_an_engine_whose_restart_would_not_be_noticed_never_agrees():
    agreement = TokenizerAgreement()
    agreement.add_engine("m", ("w0", ""))
    agreement.record_answer(("w0", ""), 1, agrees=True)
    assert not agreement.agrees(("w0", ""), 1, now=0)


def test_a_doubted_engine_has_no_vote_until_it_answers_a_probe(agreement):
    agreement.record_answer(ENGINE, 1, agrees=True)
    agreement.doubt(ENGINE)
    assert agreement.is_doubted(ENGINE)
    assert not agreement.is_settled(ENGINE, 1)
    assert not agreement.agrees(ENGINE, 1, now=0)
    agreement.record_answer(ENGINE, 1, agrees=None)
    assert agreement.is_doubted(ENGINE)
    agreement.record_answer(ENGINE, 1, agrees=True)
    assert not agreement.is_doubted(ENGINE)


def test_an_engine_agrees_until_its_date_is_due(agreement):
    agreement.record_answer(ENGINE, 1, agrees=True)
    agreement.record_date(ENGINE, "2026-11-28", due_at=50.0)
    assert agreement.dates("m", 1) == {"2026-11-28"}
    assert agreement.agrees(ENGINE, 1, now=49.9)
    assert not agreement.agrees(ENGINE, 1, now=50.0)
    assert agreement.is_date_due(ENGINE, now=50.0)
    assert not agreement.is_date_due(ENGINE, now=49.9)


def test_a_tokenizer_is_outvoted_by_more_than_half_of_its_engines():
    agreement = TokenizerAgreement()
    engines = [(f"w{number}", "boot") for number in range(4)]
    for engine in engines:
        agreement.add_engine("m", engine)
    for engine in engines[:2]:
        agreement.record_answer(engine, 1, agrees=False)
    assert not agreement.is_outvoted("m", 1)
    agreement.record_answer(engines[2], 1, agrees=False)
    assert agreement.is_outvoted("m", 1)
    assert not agreement.is_outvoted("m", 2)
    agreement.reopen("m")
    assert not any(agreement.is_settled(engine, 1) for engine in engines)


def test_a_worker_that_is_gone_is_forgotten(agreement):
    assert agreement.forget("w0") == "m"
    assert agreement.forget("w0") is None
    assert not agreement.is_date_due(ENGINE, now=inf)
