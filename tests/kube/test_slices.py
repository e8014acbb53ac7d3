"""From raw EndpointSlices to the workers they list."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.kube.slices import DiscoveredWorker, SliceTable, workers_in_slice

PORTS = [
    {"name": "agent", "port": 8090, "protocol": "TCP"},
    {"name": "engine", "port": 8100},
    {"name": "kv-events", "port": 5557, "protocol": "TCP"},
    {"name": "kv-replay", "port": 5558, "protocol": "TCP"},
]


def endpoint(name, address, *, conditions=None, **more):
    found = {"addresses": [address], "targetRef": {"kind": "Pod", "name": name}, **more}
    return found if conditions is None else found | {"conditions": conditions}


def slice_of(name, *endpoints, namespace="fleet", family="IPv4", ports=PORTS, labels=None):
    metadata = {"name": name, "namespace": namespace, "labels": labels or {}}
    return {"metadata": metadata, "addressType": family, "endpoints": list(endpoints) or None, "ports": ports}


def test_a_worker_has_urls_by_port_name_with_zone_and_node():
    found = workers_in_slice(
        slice_of(
            "s",
            endpoint("w0", "10.0.0.7", zone="eu-1a", nodeName="n3", conditions={"ready": True, "serving": True}),
            labels={"lorafleet.io/pool": "rank-64"},
        )
    )
    assert found == (
        DiscoveredWorker(
            id="w0",
            namespace="fleet",
            agent_url="http://10.0.0.7:8090",
            engine_url="http://10.0.0.7:8100",
            kv_events="tcp://10.0.0.7:5557",
            kv_replay="tcp://10.0.0.7:5558",
            zone="eu-1a",
            node="n3",
            pool="rank-64",
        ),
    )


def test_a_service_without_pods_lists_no_worker():
    assert workers_in_slice({"metadata": {"name": "s"}, "endpoints": None, "ports": None}) == ()


def test_a_stock_engine_has_no_agent_url():
    (found,) = workers_in_slice(slice_of("s", endpoint("w0", "10.0.0.7"), ports=[{"name": "engine", "port": 8000}]))
    assert (found.agent_url, found.engine_url, found.kv_events) == (None, "http://10.0.0.7:8000", None)


def test_without_a_pod_its_address_is_its_name():
    by_hand = {"addresses": ["10.0.0.9"]}
    of_another_kind = {"addresses": ["10.0.0.8"], "targetRef": {"kind": "VirtualMachine", "name": "w0"}}
    assert [found.id for found in workers_in_slice(slice_of("s", by_hand, of_another_kind))] == ["10.0.0.9", "10.0.0.8"]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (None, (True, True, False)),
        ({}, (True, True, False)),
        ({"ready": None, "serving": None, "terminating": None}, (True, True, False)),
        ({"ready": False}, (False, False, False)),
        ({"ready": False, "serving": False, "terminating": False}, (False, False, False)),
        ({"ready": False, "serving": True, "terminating": True}, (False, True, True)),
        ({"ready": False, "serving": False, "terminating": True}, (False, False, True)),
        ({"ready": True, "serving": True, "terminating": True}, (False, True, True)),
        ({"ready": True, "serving": False}, (True, False, False)),
    ],
)
def test_conditions_mean_what_the_api_says_also_when_they_are_absent(conditions, expected):
    (found,) = workers_in_slice(slice_of("s", endpoint("w0", "10.0.0.7", conditions=conditions)))
    assert (found.is_ready, found.is_serving, found.is_terminating) == expected


def test_ipv4_is_preferred_in_dual_stack_slices_in_any_order():
    four = slice_of("z", endpoint("w0", "10.0.0.7", zone="a"))
    six = slice_of("a", endpoint("w0", "fd00::7", zone="a", nodeName="n1"), family="IPv6")
    for order in ([four, six], [six, four]):
        book = SliceTable()
        book.replace("fleet", order)
        (worker,) = book.workers().values()
        assert (worker.agent_url, worker.zone, worker.node) == ("http://10.0.0.7:8090", "a", "n1")
    book.remove(four)
    assert book.workers()["w0"].agent_url == "http://[fd00::7]:8090"


def test_a_pod_terminating_in_any_slice_is_terminating():
    book = SliceTable()
    book.put(slice_of("a", endpoint("w0", "10.0.0.7", conditions={"ready": True})))
    book.put(slice_of("b", endpoint("w0", "10.0.0.7", conditions={"serving": True, "terminating": True})))
    worker = book.workers()["w0"]
    assert (worker.is_ready, worker.is_serving, worker.is_terminating) == (False, True, True)


def test_two_pods_of_one_name_in_two_namespaces_are_never_mixed():
    book = SliceTable()
    book.put(slice_of("s", endpoint("w0", "10.0.0.8"), namespace="b"))
    six = slice_of("s", endpoint("w0", "fd00::7", conditions={"terminating": True}), namespace="a", family="IPv6")
    book.put(six)
    assert (book.workers()["w0"].namespace, book.workers()["w0"].agent_url) == ("a", "http://[fd00::7]:8090")
    book.replace("a", [])
    assert (book.workers()["w0"].namespace, book.workers()["w0"].is_terminating) == ("b", False)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 70000) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_ODD_ENDPOINT = st.fixed_dictionaries(
    {}, optional={"addresses": _JSON, "conditions": _JSON, "targetRef": _JSON, "zone": _JSON, "nodeName": _JSON}
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "metadata": _JSON,
            "addressType": _JSON,
            "endpoints": _JSON | st.lists(_JSON | _ODD_ENDPOINT, max_size=3),
            "ports": _JSON | st.lists(st.fixed_dictionaries({"name": _JSON, "port": _JSON}), max_size=2),
        },
    )
)
def test_a_malformed_slice_never_raises(odd):
    book = SliceTable()
    book.put(odd)
    assert all(worker.id for worker in book.workers().values())
    book.remove(odd)
    assert book.workers() == {}


@given(
    pods=st.dictionaries(
        st.integers(0, 30).map("w{}".format),
        st.tuples(st.sampled_from(["4", "6", "46"]), st.booleans(), st.booleans()),
        max_size=12,
    ),
    seed=st.integers(0, 1000),
)
def test_pods_spread_over_slices_are_each_found_once(pods, seed):
    rng, slices = random.Random(seed), {}
    for number, (name, (families, ready, terminating)) in enumerate(pods.items()):
        conditions = {"ready": ready and not terminating, "serving": ready, "terminating": terminating}
        for family in families:
            address = f"10.0.0.{number}" if family == "4" else f"fd00::{number:x}"
            # Moved from slice to slice, an endpoint is in two of them for a moment.
            for slot in {rng.randrange(3), rng.randrange(3)}:
                slices.setdefault((family, slot), []).append(endpoint(name, address, conditions=conditions))
    book = SliceTable()
    named = [slice_of(f"s{slot}-{family}", *found, family=f"IPv{family}") for (family, slot), found in slices.items()]
    rng.shuffle(named)
    book.replace("fleet", named)
    found = book.workers()
    assert found.keys() == pods.keys()
    for number, (name, (families, ready, terminating)) in enumerate(pods.items()):
        host = f"10.0.0.{number}" if "4" in families else f"[fd00::{number:x}]"
        assert found[name].agent_url == f"http://{host}:8090"
        assert (found[name].is_ready, found[name].is_serving) == (ready and not terminating, ready)
        assert found[name].is_terminating is terminating


@given(
    st.lists(st.tuples(st.sampled_from(["put", "remove"]), st.integers(0, 3), st.sets(st.integers(0, 9), max_size=4)))
)
def test_after_events_in_any_order_each_slice_has_its_last_state(events):
    book, model = SliceTable(), {}
    for kind, number, pods in events:
        changed = slice_of(f"s{number}", *(endpoint(f"w{pod}", f"10.0.0.{pod}") for pod in sorted(pods)))
        if kind == "put":
            book.put(changed)
            model[number] = pods
        else:
            book.remove(changed)
            model.pop(number, None)
        assert book.workers().keys() == {f"w{pod}" for there in model.values() for pod in there}
