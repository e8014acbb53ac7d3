"""When a body that is refused for lack of room should come again: measured from how long bodies stay."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.http_server.body_room import BodyRoom


class Bodies:
    """Bodies of one byte, which come one after the other and are answered a while later."""

    def __init__(self, room: BodyRoom, tenant: str = "a") -> None:
        self.room, self.tenant, self.now = room, tenant, 0.0
        self.ends: deque[float] = deque()

    def serve(self, seconds: float, every_s: float, stay_s: float) -> None:
        """Let time pass: a body comes every so often, and stays for so long."""
        until = self.now + seconds
        while self.now < until:
            self.now += every_s
            while self.ends and self.ends[0] <= self.now:
                self.ends.popleft()
                self.room.release(self.tenant, 1, is_answered=True)
            assert self.room.hold(self.tenant, 1)
            self.ends.append(self.now + stay_s)
            self.room.advance(self.now)

    def refused_s(self, size_bytes: int) -> float:
        """The seconds that a body is given which came whole and found no room."""
        assert not self.room.hold(self.tenant, size_bytes)
        message, retry_s = self.room.refusal(self.tenant, size_bytes, size_bytes, self.now)
        self.room.release(self.tenant, size_bytes, is_answered=False)
        assert "as many bytes" in message
        return retry_s


@given(
    st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([50, 100]), st.integers(10, 40), st.sampled_from([True, False])
)
def test_the_time_is_when_so_many_bytes_will_have_been_answered(every_s, held, size, of_tenant):
    bounds = (10_000, held) if of_tenant else (held, None)
    bodies = Bodies(BodyRoom(*bounds))
    bodies.serve(200, every_s, stay_s=every_s * (held - 1))
    free_in_s = every_s * size  # one byte is answered each time
    found_s = bodies.refused_s(size)
    assert max(1.0, 0.5 * free_in_s) <= found_s <= max(1.0, 2.0 * free_in_s)


def test_a_stay_that_has_not_ended_yet_is_taken_from_how_long_it_has_lasted():
    bodies = Bodies(BodyRoom(100))
    assert bodies.room.hold("a", 90)
    for _ in range(5):
        bodies.room.advance(bodies.now)
        bodies.now += 1.0
    assert 1.0 < bodies.refused_s(50) < 20.0


def test_refused_clients_are_given_one_time_after_the_other_and_never_more_than_a_minute():
    bodies = Bodies(BodyRoom(50))
    bodies.serve(100, 1.0, stay_s=49.0)
    times = [bodies.refused_s(20) for _ in range(10)]
    assert times == sorted(times)
    assert times[1] - times[0] == pytest.approx(20, rel=0.5)
    assert times[-1] == 60.0
    bodies.serve(100, 1.0, stay_s=49.0)
    assert bodies.refused_s(20) == pytest.approx(times[0], rel=0.5), "what was promised long ago is over"


def test_bodies_that_are_refused_do_not_count_as_answered():
    calm, busy = Bodies(BodyRoom(50)), Bodies(BodyRoom(50))
    for bodies in (calm, busy):
        bodies.serve(100, 1.0, stay_s=49.0)
    for _ in range(1000):
        assert not busy.room.hold("b", 1000)
        busy.room.release("b", 1000, is_answered=False)
    assert busy.refused_s(20) == calm.refused_s(20)


def test_no_line_is_kept_of_tenants_that_are_gone():
    room = BodyRoom(1000, 10)
    for number in range(100):
        room.hold(f"t{number}", 5)
        room.advance(number * 0.1)
        room.release(f"t{number}", 5, is_answered=True)
    room.advance(20.0)
    assert not room.held_of_tenant
    for second in range(21, 600):
        room.advance(float(second))
    assert room.measured_lines <= 1
