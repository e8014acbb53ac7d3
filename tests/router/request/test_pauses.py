"""Pauses at one router: which requests they hold, for how long, and how many may wait."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.keys.roles import Caller
from orchestrator.model.pauses import PauseLease
from router.core.errors import DeadlineExceeded, Saturated
from router.core.pauses import holding, merge_listed_pauses
from router.core.queue.admission import QueueLimits, QueueUsage
from router.protocols.aborted import aborted_answer
from router.request.pauses import PauseGate
from tests.patience import within

TENANTS = (None, "acme", "globex")
NAMESPACES = ("", "run-1", "run-2")
CATALOGS = st.lists(
    st.tuples(
        st.floats(0, 20),
        st.dictionaries(st.sampled_from(["a", "b", "c"]), st.tuples(st.integers(0, 3), st.floats(1, 30)), max_size=3),
    )
)
SCOPE_OF = {"a": (None, ""), "b": ("acme", ""), "c": ("acme", "run-1")}


def listed(key: str, call: int = 0, lease_s: float = 60.0) -> PauseLease:
    tenant, namespace = SCOPE_OF[key]
    return pause(lease_s, tenant=tenant, namespace=namespace, renewals=call)


@given(CATALOGS, st.sampled_from(TENANTS), st.sampled_from(NAMESPACES))
def test_a_request_is_held_exactly_by_listed_pauses_of_its_scope_each_for_its_lease_since_it_was_first_read(
    catalogs, tenant, namespace
):
    now, pauses, first_read = 0.0, {}, {}
    for gap_s, contents in catalogs:
        now += gap_s
        entries = [listed(key, call, lease_s) for key, (call, lease_s) in contents.items()]
        pauses, new = merge_listed_pauses(pauses, entries, now)
        assert {held.pause for held in new} == {
            entry for entry in entries if first_read.get(entry.key, (0,))[0] != entry
        }
        first_read = {
            entry.key: first_read[entry.key] if first_read.get(entry.key, (0,))[0] == entry else (entry, now)
            for entry in entries
        }
        ends = [
            at + entry.lease_s
            for entry, at in first_read.values()
            if entry.tenant in (None, tenant) and entry.namespace in ("", namespace) and now < at + entry.lease_s
        ]
        found = holding(pauses, tenant, namespace, now)
        assert (None if found is None else found.until) == (max(ends) if ends else None)


ACME = Caller("acme", frozenset({"infer"}))


def pause(lease_s: float = 60.0, **more) -> PauseLease:
    told = {"tenant": "acme", "mode": "keep", "owner": "trainer", "began_at": 1.0, "expires_at": 61.0}
    return PauseLease(lease_s=lease_s, **told | more)


def gate(**limits) -> PauseGate:
    return PauseGate(QueueUsage(QueueLimits(**limits)), asyncio.get_running_loop().time, lambda: None)


async def test_as_many_requests_as_may_wait_are_held_and_the_next_gets_429_with_the_end_of_the_pause():
    held = gate(requests=2)
    held.adopt((pause(),))
    waiting = [asyncio.create_task(held.wait(ACME, 10, None)) for _ in range(2)]
    while len(held.held) < 2:
        await asyncio.sleep(0)
    with pytest.raises(Saturated, match="paused") as refused:
        await held.wait(ACME, 10, None)
    assert 50 < (refused.value.retry_after_s or 0) <= 60
    held.adopt(())
    async with within(5):
        await asyncio.gather(*waiting)
    assert (len(held.held), held.count) == (0, 0)


async def test_a_held_request_ends_at_its_clients_own_deadline_and_one_that_leaves_frees_its_place():
    held = gate(requests=1)
    held.adopt((pause(),))
    with pytest.raises(DeadlineExceeded):
        await held.wait(ACME, 10, asyncio.get_running_loop().time() + 0.01)
    leaving = asyncio.create_task(held.wait(ACME, 10, None))
    while not len(held.held):
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert len(held.held) == 0


async def test_a_pause_ends_by_itself_where_the_orchestrator_says_nothing_more():
    held = gate()
    assert held.adopt((pause(0.02),))
    assert not held.adopt((pause(0.02),)), "the same call is no news"
    async with within(5):
        await held.wait(ACME, 10, None)
    assert held.holding(ACME) is None
    assert held.adopt((pause(60.0, renewals=1),)), "a renewal is"
    assert held.holding(ACME) is not None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_aborted_answer_has_every_choice_and_only_the_fields_that_were_asked_for(path):
    plain = aborted_answer(path, {}, answer_id="x", model="m", choices=3, prompt_tokens=5)
    assert plain.body.count(b'"finish_reason":"abort"') == plain.events.count(b'"finish_reason":"abort"') == 3
    assert b"token_ids" not in plain.body
    assert plain.events.endswith(b"data: [DONE]\n\n")
    fields = {"logprobs": b"1", "return_token_ids": b"true", "n": b"1"}
    full = aborted_answer(path, fields, answer_id="x", model="m", choices=1, prompt_tokens=5)
    assert b'"token_ids":[]' in full.body
    assert b'"logprobs":{' in full.body
    off = {"logprobs": b"false", "return_token_ids": b"null"}
    assert b"token_ids" not in aborted_answer(path, off, answer_id="x", model="m", choices=1, prompt_tokens=5).body
    tokens = {"sampling_params": b'{"logprobs": 1}'}
    ids = aborted_answer("/inference/v1/generate", tokens, answer_id="x", model="m", choices=1, prompt_tokens=5)
    assert b'"logprobs":{"content":[]},"finish_reason":"abort","token_ids":[]' in ids.body
    assert aborted_answer("/v1/messages", {}, answer_id="x", model="m", choices=1, prompt_tokens=5) is None
