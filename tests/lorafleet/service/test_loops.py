import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from lorafleet.service.loops import ChangeSignal, DelayedCalls, backoff_s, forever
from tests.patience import patience, until, within
from tests.serving import client_of


def test_pauses_after_failures_double_with_jitter_up_to_a_limit():
    waits = [[backoff_s(failures, 0.2, 5.0, random.Random(seed)) for seed in range(50)] for failures in range(1, 8)]
    for full, drawn in zip([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], waits, strict=True):
        assert full / 2 <= min(drawn) < max(drawn) <= full
        assert len(set(drawn)) == 50
    assert 2.5 <= backoff_s(10**6, 0.2, 5.0) <= 5.0


async def test_a_loop_survives_and_counts_errors():
    rounds, failures, done = [], [], asyncio.Event()

    async def step():
        rounds.append(1)
        if len(rounds) < 3:
            raise RuntimeError("no")
        done.set()

    loop = asyncio.create_task(
        forever(
            step,
            name="x",
            every_s=60,
            on_failure=lambda: failures.append(1),
            most_backoff_s=0.001,
            rng=random.Random(0),
        )
    )
    await asyncio.wait_for(done.wait(), patience(5))
    assert len(failures) == 2
    loop.cancel()


@pytest.mark.parametrize(("exc", "ours"), [(ConnectionRefusedError(), 0), (httpx.ReadTimeout(""), 0), (KeyError(), 1)])
async def test_own_failures_are_counted_and_all_failures_logged(exc, ours):
    failures, again = [], asyncio.Event()

    async def step():
        if again.is_set():
            return
        again.set()
        raise exc

    with capture_logs() as logs:
        loop = asyncio.create_task(
            forever(
                step,
                name="x",
                every_s=60,
                on_failure=lambda: failures.append(1),
                about={"worker": "w0"},
                most_backoff_s=0.001,
            )
        )
        async with within(5):
            while len(logs) < 2:
                await asyncio.sleep(0.001)
    loop.cancel()
    assert len(failures) == ours
    assert [(line["event"], line["worker"]) for line in logs] == [
        ("loop step failed", "w0"),
        ("loop step works again", "w0"),
    ]
    assert logs[0]["exc_info"] == bool(ours)
    assert ("report this" in logs[0]["then"], "bring the other service back" in logs[0]["then"]) == (ours, not ours)


@pytest.mark.parametrize(
    ("fail", "then"),
    [
        (httpx.Response(403, request=httpx.Request("GET", "http://o/v1/catalog")).raise_for_status, "token_file"),
        (Path("/nowhere/at/all").read_bytes, "the file or the disk"),
    ],
)
async def test_the_line_of_a_failed_step_says_to_mend_a_refused_key_or_a_file(fail, then):
    async def step():
        fail()

    assert then in (await first_line(step))["then"]


async def first_line(step) -> dict[str, Any]:
    """The first log line of a loop with this step."""
    with capture_logs() as logs:
        loop = asyncio.create_task(forever(step, name="x", every_s=60))
        async with within(5):
            while not logs:
                await asyncio.sleep(0.001)
    loop.cancel()
    return logs[0]


async def test_an_unreachable_peers_address_is_logged_without_its_path():
    async def step():
        async with client_of() as client:
            await client.get("http://user:secret@127.0.0.1:9/v1/catalog?key=hush")

    assert (await first_line(step))["error"].endswith(" at http://127.0.0.1:9")


async def test_a_poke_starts_the_next_round_at_once():
    poke, rounds = asyncio.Event(), asyncio.Queue()

    async def step():
        rounds.put_nowait(1)

    loop = asyncio.create_task(forever(step, name="x", every_s=600, poke=poke))
    for _ in range(3):
        await asyncio.wait_for(rounds.get(), patience(5))
        poke.set()
    loop.cancel()


async def test_every_waiter_sees_a_change_until_its_deadline():
    changes, value = ChangeSignal(), []
    waiting = [asyncio.create_task(changes.until(lambda: len(value) > 1, timeout_s=5)) for _ in range(3)]
    await asyncio.sleep(0)
    value.append(1)
    changes.notify()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    value.append(2)
    changes.notify()
    assert await asyncio.gather(*waiting) == [True] * 3
    assert await changes.until(lambda: False, timeout_s=0.01) is False


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_together_with_the_change_is_not_lost(turns):
    changes, poke, told = ChangeSignal(), asyncio.Event(), []

    async def step():
        told.append(1)

    tasks = [
        asyncio.create_task(changes.until(lambda: False, timeout_s=60)),
        asyncio.create_task(forever(step, name="x", every_s=60, poke=poke)),
    ]
    await until(lambda: told)  # and both wait
    changes.notify()
    poke.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=patience(5))
    assert all(task.cancelled() for task in tasks)


async def test_delayed_calls_are_made_in_order_after_their_delay():
    loop, later, made, all_made = asyncio.get_running_loop(), DelayedCalls(0.05), [], asyncio.Event()

    def fails():
        raise RuntimeError("no")

    def put_off(number):
        due = loop.time() + 0.05

        def call():
            made.append((number, loop.time() >= due))
            if number == 5:
                all_made.set()

        later.add(call)

    put_off(1)
    later.add(fails)
    put_off(2)
    await asyncio.sleep(0.03)
    put_off(3)
    await asyncio.wait_for(later_is_idle(made, 3), patience(5))
    put_off(5)
    await asyncio.wait_for(all_made.wait(), patience(5))
    assert made == [(1, True), (2, True), (3, True), (5, True)]


async def test_delayed_calls_yield_to_the_event_loop():
    loop, later, made, over = asyncio.get_running_loop(), DelayedCalls(0.0), [], asyncio.Event()

    def call(number):
        began = time.perf_counter()
        while time.perf_counter() - began < 0.001:
            pass
        if number == 0:
            loop.call_soon(made.append, "another")
        made.append(number)
        if number == 2:
            over.set()

    for number in range(3):
        later.add(call, number)
    await asyncio.wait_for(over.wait(), patience(5))
    assert made == [0, "another", 1, 2]


async def later_is_idle(made, count):
    while len(made) < count:
        await asyncio.sleep(0)


async def test_a_cancellation_that_a_step_swallows_ends_the_loop():
    began = asyncio.Event()

    async def step():
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    loop = asyncio.create_task(forever(step, name="x", every_s=600))
    await began.wait()
    loop.cancel()
    await asyncio.wait([loop], timeout=patience(10))
    assert loop.cancelled()
