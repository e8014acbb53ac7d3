"""Crowds: a stage of all before the next stage of any, in order, a bounded number in one go, and nobody's failure is
another's.
"""

import contextlib

from lorafleet.http_server import batches
from lorafleet.http_server.batches import Batches
from lorafleet.http_server.outbox import Outbox
from tests.router.relay.test_outbox import ManualLoop, Transport


class BatchLoop(ManualLoop):
    def call_soon(self, callback, *args):
        self.soon.append(lambda: callback(*args))


class Request:
    """One of a crowd, that notes what becomes of it. `steps`: how many stages it takes; None: its client has gone."""

    def __init__(self, name, noted, steps=2, *, fails_at=None, body=b""):
        self.name, self.noted, self.steps, self.fails_at, self.body = name, noted, steps, fails_at, body
        self.failure = None

    def begin_answer(self):
        self.noted.append((self.name, "begun"))
        return None if self.steps is None else self.go()

    def go(self, first=0):
        for step in range(first, first + self.steps):
            if step == self.fails_at:
                raise RuntimeError(self.name)
            self.noted.append((self.name, step))
            yield

    def failed(self, exc):
        self.failure = exc


def test_a_stage_of_all_comes_before_the_next_stage_of_any():
    loop, turn, noted = BatchLoop(), Batches(Outbox()), []
    for name, steps in (("a", 2), ("b", 1), ("c", None), ("d", 3)):
        turn.begin(Request(name, noted, steps), loop)
    assert not noted  # more may come in this turn
    assert len(loop.soon) == 1
    loop.turn()
    begun = [(name, "begun") for name in "abcd"]
    assert noted == [*begun, ("a", 0), ("b", 0), ("d", 0), ("a", 1), ("d", 1), ("d", 2)]
    loop.turn()
    assert len(noted) == 10


def test_what_is_answered_goes_on_before_others_are_begun_and_its_answer_is_on_its_way():
    loop, box, noted, client = BatchLoop(), Outbox(), [], Transport()
    turn = Batches(box)
    answered, come = Request("old", noted, 1), Request("new", noted, 1)

    def answers():
        box.write(client, b"answer", loop)
        noted.append(("old", "answered"))
        yield

    turn.begin(come, loop)
    turn.go_on(answered, answers(), loop)
    come.begin_answer = lambda: noted.append(("new", client.written.copy()))
    loop.turn()
    assert noted == [("old", "answered"), ("new", [b"answer"])]
    assert not loop.soon  # nothing is left to be sent


def test_a_crowd_is_begun_a_few_at_a_time_and_the_sockets_are_looked_at_in_between():
    loop, turn, noted = BatchLoop(), Batches(Outbox()), []
    for name in range(2 * batches._MOST + 1):
        turn.begin(Request(name, noted, None), loop)
    for most in (batches._MOST, 2 * batches._MOST, 2 * batches._MOST + 1):
        loop.turn()
        assert [name for name, _ in noted] == list(range(most))
    assert not loop.soon
    turn.begin(Request("later", noted, None), loop)
    loop.turn()
    assert noted[-1] == ("later", "begun")


def test_long_prompts_come_fewer_at_a_time():
    loop, turn, noted = BatchLoop(), Batches(Outbox()), []
    for name in range(4):
        turn.begin(Request(name, noted, None, body=bytes(batches._MOST_BYTES // 2 + 1)), loop)
    loop.turn()
    assert len(noted) == 2
    turn.begin(Request(4, noted, None), loop)
    loop.turn()
    assert len(noted) == 4
    loop.turn()
    assert [name for name, _ in noted] == list(range(5))


def test_one_that_fails_is_told_and_the_others_go_on():
    loop, turn, noted = BatchLoop(), Batches(Outbox()), []
    crowd = [Request("a", noted), Request("b", noted, fails_at=1), Request("c", noted, fails_at=0)]
    for request in crowd:
        turn.begin(request, loop)
    loop.turn()
    assert [str(request.failure) for request in crowd] == ["None", "b", "c"]
    assert ("a", 1) in noted


def test_what_fails_of_all_does_not_end_the_turns():
    loop, turn, noted = BatchLoop(), Batches(Outbox()), []

    def broken():
        raise RuntimeError("not even an error answer")

    worst = Request("worst", noted)
    worst.begin_answer = broken
    turn.begin(worst, loop)
    turn.begin(Request("next", noted, None), loop)
    with contextlib.suppress(RuntimeError):
        loop.turn()
    loop.turn()
    assert noted == [("next", "begun")]


def test_what_a_crowd_has_written_goes_out_though_one_of_it_failed_for_all():
    loop, box, client = BatchLoop(), Outbox(), Transport()
    turn, worst = Batches(box), Request("worst", [])

    def broken(_exc):
        raise RuntimeError("not even an error answer")

    def answers():
        box.write(client, b"answer", loop)
        yield
        raise RuntimeError("a defect")

    worst.failed = broken
    turn.go_on(worst, answers(), loop)
    with contextlib.suppress(RuntimeError):
        loop.turn()
    assert client.written == [b"answer"]
    box.write(client, b"next", loop)
    loop.turn()
    assert client.written == [b"answer", b"next"]


def test_what_comes_while_a_crowd_is_worked_on_has_its_turn():
    loop, turn, noted = BatchLoop(), Batches(Outbox()), []
    first = Request("first", noted, None)
    first.begin_answer = lambda: turn.begin(Request("behind it", noted, None), loop)
    turn.begin(first, loop)
    loop.turn()
    loop.turn()
    assert noted == [("behind it", "begun")]
    assert not loop.soon
