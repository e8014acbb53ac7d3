"""The model of the engine's adapter memory, compared with vLLM's algorithm."""

from collections import OrderedDict
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.core.restarts import RestartBackoff
from workers.core.slots import AdapterSlots

NAMES = st.sampled_from("abcdef")
MAX_LORAS, MAX_CPU_LORAS = 2, 4


class VllmLoraCaches:
    """vLLM 0.32's adapter caches: a host LRU and a device LRU that are used together; an unload removes the name."""

    def __init__(self):
        self.ids, self.counter = {}, 0
        self.host, self.device = OrderedDict(), OrderedDict()

    def load(self, name):
        self.counter += 1
        self.ids[name] = self.counter
        self.run(name)

    def offer(self, name):
        self.counter += 1
        self.ids[name] = self.counter

    def unload(self, name):
        del self.ids[name]

    def run(self, name):
        number = self.ids[name]
        if number not in self.host:
            if len(self.host) + 1 > MAX_CPU_LORAS:
                oldest, _ = self.host.popitem(last=False)
                self.device.pop(oldest, None)
            self.host[number] = name
        self.host.move_to_end(number)
        if number not in self.device and len(self.device) >= MAX_LORAS:
            self.device.popitem(last=False)
        self.device[number] = name
        self.device.move_to_end(number)

    def location(self, name):
        number = self.ids[name]
        return "device" if number in self.device else "host" if number in self.host else "disk"


class SlotsAgainstVllm(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.slots, self.engine = AdapterSlots(MAX_LORAS, MAX_CPU_LORAS), VllmLoraCaches()

    @rule(name=NAMES)
    def load(self, name):
        if not self.slots.has(name) and self.slots.free:
            self.slots = self.slots.after_load(name)
            self.engine.load(name)

    @rule(name=NAMES)
    def offer(self, name):
        if not self.slots.has(name) and self.slots.free:
            self.slots = self.slots.after_offer(name)
            self.engine.offer(name)

    @precondition(lambda self: self.slots.registered)
    @rule(data=st.data())
    def unload(self, data):
        name = data.draw(st.sampled_from(sorted(self.slots.registered)))
        self.slots = self.slots.after_unload(name)
        self.engine.unload(name)

    @precondition(lambda self: self.slots.registered)
    @rule(data=st.data())
    def use(self, data):
        name = data.draw(st.sampled_from(sorted(self.slots.registered)))
        self.slots = self.slots.after_use(name)
        self.engine.run(name)

    @invariant()
    def names_and_places_are_the_engines(self):
        assert self.slots.registered == set(self.engine.ids)
        for name in self.slots.registered:
            assert self.slots.location(name) == self.engine.location(name)

    @invariant()
    def ghosts_and_displaced_are_the_engines(self):
        live = set(self.engine.ids.values())
        assert self.slots.ghosts == sum(number not in live for number in self.engine.host)
        gone = {name for name, number in self.engine.ids.items() if number not in self.engine.host}
        assert set(self.slots.displaced()) == gone

    @invariant()
    def never_more_than_fits(self):
        assert len(self.slots.host_lru) <= MAX_CPU_LORAS
        assert self.slots.free == MAX_CPU_LORAS - len(self.slots.registered)


TestSlotsAgainstVllm = SlotsAgainstVllm.TestCase


@given(st.lists(st.floats(0, 500), max_size=40), st.integers(0, 9))
def test_failing_engine_is_restarted_with_growing_delays(ups, seed):
    rng, restarts, in_a_row = Random(seed), RestartBackoff(), 0
    for up_s in ups:
        restarts = restarts.after_failure(up_s)
        in_a_row = 1 if up_s >= restarts.stable_s else in_a_row + 1
        assert restarts.failures == in_a_row
        assert restarts.is_loop == (in_a_row >= restarts.loop_after)
        assert 0.25 <= restarts.delay_s(rng) <= restarts.loop_retry_s


def test_engine_without_ghosts_frees_the_slot_at_once():
    slots = AdapterSlots(2, 4, keeps_ghosts=False).after_load("a").after_load("b").after_unload("a")
    assert (slots.ghosts, [host_lru.name for host_lru in slots.host_lru]) == (0, ["b"])
    assert AdapterSlots(2, 4).after_load("a").after_unload("a").ghosts == 1
