"""The KV event endpoints of an engine, from its own configuration."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# vLLM binds wildcard endpoints only, and connects to others (0.32, seen running).
_WILDCARD_ENDPOINT = re.compile(r"tcp://(\*|\[?::\]?):(\d+)")
_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class KvEventEndpoints:
    """ZMQ endpoints to connect to, one for each data-parallel rank; empty if none is reachable."""

    events: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    topic: str = ""


def kv_event_endpoints(host: str, ranks: Sequence[Mapping[str, Any]]) -> KvEventEndpoints:
    """The endpoints of an engine on `host`, from each rank's KVEventsConfig with resolved ports.

    All ranks or none, since a part of an engine's blocks is useless.
    """
    events = tuple(_reachable_endpoint(host, rank.get("endpoint")) for rank in ranks if _publishes_kv_events(rank))
    replay = tuple(_reachable_endpoint(host, rank.get("replay_endpoint")) for rank in ranks)
    if not events or len(events) != len(ranks) or not all(events):
        return KvEventEndpoints()
    return KvEventEndpoints(events, replay if all(replay) else (), str(ranks[0].get("topic") or ""))


def _publishes_kv_events(rank: Mapping[str, Any]) -> bool:
    """Whether a rank publishes KV events over ZMQ."""
    # SGLang has no `enable_kv_cache_events`.
    return rank.get("publisher", "zmq") == "zmq" and bool(rank.get("enable_kv_cache_events", True))


def _reachable_endpoint(host: str, endpoint: object) -> str:
    """The address of a socket that the engine has bound; "" if it has bound none that is reachable."""
    text = endpoint if isinstance(endpoint, str) else ""
    bound = _WILDCARD_ENDPOINT.fullmatch(text)
    if bound is None:
        return text if text.startswith("ipc://") and host in _LOCAL_HOSTS else ""
    return f"tcp://[{host}]:{bound[2]}" if ":" in host else f"tcp://{host}:{bound[2]}"
