"""Writes of one turn: in order, together, and none lost but those to what has been closed."""

import asyncio

from lorafleet.http_server import outbox
from lorafleet.http_server.outbox import Outbox
from tests.patience import patience
from tests.wires import HOT, listening, post


class ManualLoop:
    def __init__(self):
        self.soon = []

    def call_soon(self, callback):
        self.soon.append(callback)

    def run_tick(self):
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


class RecordingTransport:
    def __init__(self, *, raises=False):
        self.written = []
        self.raises = raises
        self.closed = False

    def is_closing(self):
        return self.closed

    def write(self, data):
        if self.raises:
            raise RuntimeError("closed")
        self.written.append(data)

    def abort(self):
        self.closed = True


def test_what_a_turn_writes_goes_out_at_its_end_in_order():
    loop, box, one, other = ManualLoop(), Outbox(), RecordingTransport(), RecordingTransport()
    box.write(one, b"1", loop)
    box.write(other, b"a", loop)
    box.write(one, b"2", loop)
    assert not one.written
    assert len(loop.soon) == 1
    loop.run_tick()
    assert (one.written, other.written) == ([b"1", b"2"], [b"a"])
    loop.run_tick()
    assert one.written == [b"1", b"2"]


def test_a_long_turn_does_not_hold_back_what_came_first():
    loop, box, transport = ManualLoop(), Outbox(), RecordingTransport()
    for _ in range(outbox.MAX_WRITES):
        box.write(transport, b"x", loop)
    assert len(transport.written) == outbox.MAX_WRITES
    box.write(transport, b"y", loop)
    loop.run_tick()
    assert transport.written[-1:] == [b"y"]


def test_one_that_cannot_be_written_takes_no_other_with_it():
    loop, box, transport = ManualLoop(), Outbox(), RecordingTransport()
    closed = RecordingTransport()
    box.write(RecordingTransport(raises=True), b"lost", loop)
    box.write(closed, b"lost", loop)
    box.write(transport, b"x", loop)
    closed.closed = True
    loop.run_tick()
    assert (closed.written, transport.written) == ([], [b"x"])


def test_behind_what_cannot_be_written_nothing_is_written_to_the_same():
    loop, box, transport = ManualLoop(), Outbox(), RecordingTransport(raises=True)
    box.write(transport, b"lost", loop)
    loop.run_tick()
    transport.raises = False
    box.write(transport, b"what follows", loop)
    loop.run_tick()
    assert transport.closed
    assert not transport.written


async def test_answer_of_the_tick_that_closes_its_connection_is_sent():
    async with listening() as served, await served.client() as client:
        client.send(post(HOT, b"abc") + post(HOT, b"abcd", b"Connection: close"))
        assert [(await client.answer())[2] for _ in range(2)] == [b"3", b"4"]
        assert await asyncio.wait_for(client.rest(), patience(5)) == b""


def test_who_will_flush_it_is_not_called_for_that_besides():
    loop, box, transport = ManualLoop(), Outbox(), RecordingTransport()
    box.is_due = True
    box.write(transport, b"1", loop)
    assert not loop.soon
    box.flush()
    box.write(transport, b"2", loop)
    loop.run_tick()
    assert transport.written == [b"1", b"2"]
