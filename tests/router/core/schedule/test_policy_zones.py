"""Replicas in the router's own zone come first, where the others are not much better."""

import json
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import ReplicaLoad
from router.core.schedule.policies.kv_lora import KvLoraPolicy
from router.core.schedule.policy import decide
from router.core.schedule.record import record_of, replay_decision
from router.core.schedule.request import RoutingRequest
from tests.router.core.schedule.test_policy import a_replica, choose, queued
from tests.router.doubles import CHAT, AgentDouble, EngineDouble, fleet

ASK = RoutingRequest("m", "", 1000)


def far_and_near(**near):
    return [a_replica("far", is_far=True), a_replica("near", **near)]


def test_equal_replicas_in_the_same_zone_are_preferred():
    assert {choose(ASK, far_and_near(), seed=s).replica.id for s in range(40)} == {"near"}


def test_a_zone_yields_to_a_cached_prompt_and_to_a_queue():
    assert choose(ASK, far_and_near(), {"far": 60}).replica.id == "far"
    assert choose(ASK, far_and_near(), {}, {"near": queued(1.0)}).replica.id == "far"
    assert choose(ASK, far_and_near(), {}, {"near": ReplicaLoad(busy_until=0.02)}).replica.id == "near"


def test_the_value_of_a_zone_is_a_setting():
    anywhere = {choose(ASK, far_and_near(), seed=s, costs=CostSettings(other_zone_s=0.0)).replica.id for s in range(40)}
    assert anywhere == {"far", "near"}
    strict = choose(ASK, far_and_near(), {"far": 60}, costs=CostSettings(other_zone_s=10.0))
    assert strict.replica.id == "near"


def test_a_replica_in_another_zone_is_used_if_it_is_the_only_one():
    assert choose(ASK, far_and_near(state="draining")).replica.id == "far"


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.floats(0, 0.2)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_explained_and_replayed_decisions_have_the_zone_in_them(drawn, other_zone_s, seed):
    replicas = [a_replica(f"w{i}", is_far=is_far) for i, (is_far, _, _) in enumerate(drawn)]
    depths = {f"w{i}": depth for i, (_, depth, _) in enumerate(drawn) if depth}
    own = {f"w{i}": ReplicaLoad(busy_until=busy) for i, (_, _, busy) in enumerate(drawn)}
    made = choose(ASK, replicas, depths, own, seed=seed, costs=CostSettings(other_zone_s=other_zone_s))
    assert [score.zone_s for score in made.scores] == [other_zone_s * is_far for is_far, _, _ in drawn]
    again = replay_decision(json.loads(json.dumps(record_of(made))))
    assert (again.replica.id, again.score) == (made.replica.id, made.score)
    assert decide(KvLoraPolicy(), ASK, made.snapshot).replica.id == made.replica.id


class ZonedControl(AgentDouble):
    """Workers in zones of these names."""

    zones: ClassVar = {"a0": "a", "b0": "b", "u0": ""}

    def metadata(self, worker):
        return super().metadata(worker).model_copy(update={"zone": self.zones[worker]})


@pytest.mark.parametrize(("zone", "far"), [("a", {"b0"}), ("b", {"a0"}), ("c", {"a0", "b0"}), ("", set())])
async def test_a_replicas_zone_comes_from_its_agent(zone, far):
    engines = [EngineDouble(name) for name in ZonedControl.zones]
    async with fleet(*engines, control=ZonedControl(), zone=zone) as (client, _, parts):
        assert {replica.id for replica in parts.discovery.fleet.replicas.values() if replica.is_far} == far
        told = (await client.post("/v1/route", json=CHAT)).json()
        assert {score["worker_id"] for score in told["scores"] if score["zone_s"] > 0} == far
        if len(far) < 2:
            assert told["worker_id"] not in far
