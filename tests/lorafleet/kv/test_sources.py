"""KV event endpoints from an engine's own configuration."""

import pytest

from lorafleet.kv.sources import KvEventEndpoints, kv_event_endpoints

BOUND = {"publisher": "zmq", "enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "topic": "kv"}


@pytest.mark.parametrize(
    ("host", "changes", "found"),
    [
        (
            "10.0.0.7",
            {"replay_endpoint": "tcp://*:1"},
            KvEventEndpoints(("tcp://10.0.0.7:5557",), ("tcp://10.0.0.7:1",), "kv"),
        ),
        ("fd00::7", {"endpoint": "tcp://[::]:5557"}, KvEventEndpoints(("tcp://[fd00::7]:5557",), (), "kv")),
        ("10.0.0.7", {"endpoint": "ipc:///tmp/kv"}, KvEventEndpoints()),
        ("127.0.0.1", {"endpoint": "ipc:///tmp/kv", "topic": ""}, KvEventEndpoints(("ipc:///tmp/kv",), (), "")),
        ("10.0.0.7", {"endpoint": "tcp://10.0.0.9:5557"}, KvEventEndpoints()),  # it connects instead of binding
        ("10.0.0.7", {"endpoint": None}, KvEventEndpoints()),
        ("10.0.0.7", {"enable_kv_cache_events": False}, KvEventEndpoints()),
        ("10.0.0.7", {"publisher": "null"}, KvEventEndpoints()),
    ],
)
def test_only_reachable_bound_sockets_are_followed(host, changes, found):
    assert kv_event_endpoints(host, [BOUND | changes]) == found


def test_all_ranks_are_followed_or_none():
    second = BOUND | {"endpoint": "tcp://*:5558"}
    assert kv_event_endpoints("h", [BOUND, second]).events == ("tcp://h:5557", "tcp://h:5558")
    assert (
        kv_event_endpoints("h", [BOUND, second | {"publisher": "null"}])
        == kv_event_endpoints("h", [])
        == KvEventEndpoints()
    )
