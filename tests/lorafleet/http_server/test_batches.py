"""Batches: one stage of all requests before the next stage of any, in order, a bounded number in one tick."""

import asyncio

import pytest
from structlog.testing import capture_logs

from lorafleet.http_server.batches import MAX_BATCH, MAX_BATCH_BYTES, Batches, Signal, Stepper, leave_batch, next_stage
from lorafleet.http_server.outbox import Outbox
from tests.lorafleet.http_server.test_outbox import ManualLoop, RecordingTransport
from tests.patience import within


class BatchLoop(ManualLoop):
    def call_soon(self, callback, *args):
        self.soon.append(lambda: callback(*args))


class BatchBench:
    """Batches in a loop that runs by hand, and what their requests note."""

    def __init__(self):
        self.loop, self.box, self.noted = BatchLoop(), Outbox(), []
        self.batches = Batches(self.box)

    def begin(self, work, size_bytes=0):
        stepper = Stepper(work, self.batches, self.loop, set(), size_bytes)
        self.batches.begin(stepper, self.loop)
        return stepper

    async def stages(self, name, count=1, *, fails_at=None):
        """A request of so many stages, each of which notes itself."""
        for stage in range(count):
            if stage:
                await next_stage()
            if stage == fails_at:
                raise RuntimeError(name)
            self.noted.append((name, stage))


@pytest.fixture
def bench():
    return BatchBench()


def test_a_stage_of_all_comes_before_the_next_stage_of_any(bench):
    for name, count in (("a", 2), ("b", 1), ("d", 3)):
        bench.begin(bench.stages(name, count))
    assert not bench.noted  # more may come in this tick
    assert len(bench.loop.soon) == 1
    bench.loop.run_tick()
    assert bench.noted == [("a", 0), ("b", 0), ("d", 0), ("a", 1), ("d", 1), ("d", 2)]
    bench.loop.run_tick()
    assert len(bench.noted) == 6


def test_resumed_request_runs_before_new_ones_begin(bench):
    answered, client = Signal(), RecordingTransport()

    async def answers():
        await answered
        bench.box.write(client, b"answer", bench.loop)
        bench.noted.append("answered")

    async def begins():
        bench.noted.append(client.written.copy())

    bench.begin(answers())
    bench.loop.run_tick()
    bench.begin(begins())
    answered.set()
    bench.loop.run_tick()
    assert bench.noted == ["answered", [b"answer"]]
    assert not bench.loop.soon  # nothing is left to be sent


def test_a_signal_that_is_set_already_is_not_waited_for(bench):
    answered = Signal()
    answered.set()

    async def answers():
        await answered
        bench.noted.append("answered")

    bench.begin(answers())
    bench.loop.run_tick()
    assert bench.noted == ["answered"]


def test_a_batch_is_bounded_and_sockets_are_read_between_batches(bench):
    for name in range(2 * MAX_BATCH + 1):
        bench.begin(bench.stages(name))
    for most in (MAX_BATCH, 2 * MAX_BATCH, 2 * MAX_BATCH + 1):
        bench.loop.run_tick()
        assert [name for name, _ in bench.noted] == list(range(most))
    assert not bench.loop.soon
    bench.begin(bench.stages("later"))
    bench.loop.run_tick()
    assert bench.noted[-1] == ("later", 0)


def test_requests_with_long_prompts_begin_fewer_at_a_time(bench):
    for name in range(4):
        bench.begin(bench.stages(name), MAX_BATCH_BYTES // 2 + 1)
    bench.loop.run_tick()
    assert len(bench.noted) == 2
    bench.begin(bench.stages(4))
    bench.loop.run_tick()
    assert len(bench.noted) == 4
    bench.loop.run_tick()
    assert [name for name, _ in bench.noted] == list(range(5))


def test_a_request_that_fails_is_logged_and_the_others_go_on(bench):
    bench.begin(bench.stages("a", 2))
    bench.begin(bench.stages("b", 2, fails_at=1))
    bench.begin(bench.stages("c", 2, fails_at=0))
    with capture_logs() as logs:
        bench.loop.run_tick()
    assert len(logs) == 2
    assert ("a", 1) in bench.noted


def test_a_request_that_awaits_without_leaving_its_batch_fails_and_the_others_go_on(bench):
    async def work():
        try:
            await asyncio.Event().wait()
        except RuntimeError as exc:
            bench.noted.append(type(exc).__name__)

    async def start():
        bench.begin(work())
        bench.begin(bench.stages("b", 2))
        bench.loop.run_tick()

    asyncio.run(start())
    assert bench.noted == ["RuntimeError", ("b", 0), ("b", 1)]


def test_answers_of_a_batch_are_sent_though_one_of_it_failed(bench):
    client = RecordingTransport()

    async def answers():
        bench.box.write(client, b"answer", bench.loop)
        await next_stage()
        raise RuntimeError("a defect")

    bench.begin(answers())
    with capture_logs():
        bench.loop.run_tick()
    assert client.written == [b"answer"]
    bench.box.write(client, b"next", bench.loop)
    bench.loop.run_tick()
    assert client.written == [b"answer", b"next"]


def test_request_arriving_during_a_batch_is_in_the_next_one(bench):
    async def first():
        bench.begin(bench.stages("behind it"))

    bench.begin(first())
    bench.loop.run_tick()
    bench.loop.run_tick()
    assert bench.noted == [("behind it", 0)]
    assert not bench.loop.soon


@pytest.mark.parametrize("stages", [1, 2])
def test_a_closed_request_runs_its_finally_and_no_further_stage(bench, stages):
    answered = Signal()

    async def work():
        try:
            await bench.stages("closed", stages)
            await answered
            bench.noted.append("answered")
        finally:
            bench.noted.append("ended")

    stepper = bench.begin(work())
    bench.loop.run_tick()
    stepper.close()
    assert bench.noted[-1] == "ended"
    answered.set()  # too late
    assert not bench.loop.soon
    stepper.close()
    assert bench.noted.count("ended") == 1
    assert "answered" not in bench.noted


def test_request_closed_by_its_own_work_ends_with_that_stage(bench):
    async def work():
        stepper.close()
        bench.noted.append("this stage")
        try:
            await next_stage()
            bench.noted.append("another")
        finally:
            bench.noted.append("ended")

    stepper = bench.begin(work())
    bench.loop.run_tick()
    assert bench.noted == ["this stage", "ended"]


def test_request_alone_in_its_batch_does_not_stop_between_its_stages(bench):
    async def work():
        stops = [*next_stage()]
        bench.noted.append(len(stops))

    bench.begin(work())
    bench.loop.run_tick()
    bench.begin(work())
    bench.begin(work())
    bench.loop.run_tick()
    assert bench.noted == [0, 1, 1]


async def test_a_coroutine_that_leaves_its_batch_goes_on_in_a_task():
    batches, answered, noted, tasks = Batches(Outbox()), Signal(), [], set()
    loop = asyncio.get_running_loop()

    async def work():
        noted.append(asyncio.current_task())
        await leave_batch()
        noted.append(asyncio.current_task())
        await next_stage()
        await leave_batch()
        await answered
        async with within(5):
            await asyncio.sleep(0)
            noted.append(asyncio.current_task())

    batches.begin(Stepper(work(), batches, loop, tasks), loop)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (task,) = tasks
    assert noted == [None, task]
    answered.set()
    await task
    assert noted == [None, task, task]
    await asyncio.sleep(0)
    assert not tasks


async def test_a_closed_request_in_a_task_is_cancelled():
    batches, tasks, noted = Batches(Outbox()), set(), []
    loop = asyncio.get_running_loop()

    async def work():
        try:
            await leave_batch()
            await Signal()
        except asyncio.CancelledError:
            noted.append("cancelled")
            raise

    stepper = Stepper(work(), batches, loop, tasks)
    batches.begin(stepper, loop)
    await asyncio.sleep(0)
    stepper.close()
    (task,) = tasks
    await asyncio.gather(task, return_exceptions=True)
    assert noted == ["cancelled"]
