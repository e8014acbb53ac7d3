"""Where an engine that somebody else started publishes its KV events, as it says itself."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# vLLM binds only these, and connects to others (0.32, seen running).
_EVERYWHERE = re.compile(r"tcp://(\*|\[?::\]?):(\d+)")
_HERE = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class KvEventEndpoints:
    """ZMQ endpoints to connect to, one a data-parallel rank; empty where nothing is published that we reach."""

    events: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    topic: str = ""


def sources_of(host: str, ranks: Sequence[Mapping[str, Any]]) -> KvEventEndpoints:
    """From each rank's KVEventsConfig, its ports resolved (vLLM's and SGLang's words), of an engine on `host`.

    All ranks or none: a part of an engine's blocks is no index of it.
    """
    events = tuple(_at(host, rank.get("endpoint")) for rank in ranks if _publishes(rank))
    replay = tuple(_at(host, rank.get("replay_endpoint")) for rank in ranks)
    if not events or len(events) != len(ranks) or not all(events):
        return KvEventEndpoints()
    return KvEventEndpoints(events, replay if all(replay) else (), str(ranks[0].get("topic") or ""))


def _publishes(rank: Mapping[str, Any]) -> bool:
    # SGLang has no switch beside the publisher.
    return rank.get("publisher", "zmq") == "zmq" and bool(rank.get("enable_kv_cache_events", True))


def _at(host: str, endpoint: object) -> str:
    """Where to connect to a socket that the engine has bound; "" where it has bound none that we reach."""
    text = endpoint if isinstance(endpoint, str) else ""
    bound = _EVERYWHERE.fullmatch(text)
    if bound is None:
        return text if text.startswith("ipc://") and host in _HERE else ""
    return f"tcp://[{host}]:{bound[2]}" if ":" in host else f"tcp://{host}:{bound[2]}"
