"""Converts raw EndpointSlices to workers. Pure.

One Service may have several slices: because of their size, for each address family of a dual stack, and for a moment
one endpoint in two slices, while the controller moves it.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

AGENT, ENGINE, KV_EVENTS, KV_REPLAY = "agent", "engine", "kv-events", "kv-replay"
"""Names of a worker Service's ports."""
POOL_LABEL = "lorafleet.io/pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredWorker:
    """A worker as the slices describe it.

    id          its pod's name, else its address
    agent_url   None if the Service has no port `agent`, as for a stock engine
    is_ready    whether it may get new requests; never while terminating
    is_serving  whether its readiness probe passes, also while terminating
    """

    id: str
    namespace: str
    agent_url: str | None
    engine_url: str | None
    kv_events: str | None = None
    kv_replay: str | None = None
    zone: str = ""
    node: str = ""
    pool: str = ""
    is_ready: bool = True
    is_serving: bool = True
    is_terminating: bool = False


@dataclass(slots=True)
class SliceTable:
    """The last state of the slices of one or more namespaces, and the workers in all of them."""

    _slices: dict[tuple[str, str], tuple[DiscoveredWorker, ...]] = field(default_factory=dict)
    _families: dict[tuple[str, str], str] = field(default_factory=dict)

    def put(self, slice_: Mapping[str, Any]) -> None:
        """Add or replace a slice."""
        key = _slice_key(slice_)
        self._slices[key] = workers_in_slice(slice_)
        self._families[key] = str(slice_.get("addressType") or "")

    def remove(self, slice_: Mapping[str, Any]) -> None:
        """Remove a slice, if the table has it."""
        self._slices.pop(_slice_key(slice_), None)
        self._families.pop(_slice_key(slice_), None)

    def replace(self, namespace: str, slices: Iterable[Mapping[str, Any]]) -> None:
        """Replace all slices of a namespace."""
        for key in [key for key in self._slices if key[0] == namespace]:
            del self._slices[key], self._families[key]
        for slice_ in slices:
            self.put(slice_)

    def workers(self) -> dict[str, DiscoveredWorker]:
        """Workers by id. A pod in several slices is one worker: IPv4 comes first.

        It is terminating if any of its slices says so. Of two pods with one name in two namespaces, the first
        namespace's counts, since an id names one worker.
        """
        by_id: dict[str, DiscoveredWorker] = {}
        for key in sorted(self._slices, key=lambda key: (key[0], _family_rank(self._families[key]), key[1])):
            for worker in self._slices[key]:
                existing = by_id.get(worker.id)
                if existing is None:
                    by_id[worker.id] = worker
                elif existing.namespace == worker.namespace:
                    by_id[worker.id] = _merge_worker(existing, worker)
        return by_id


AgentNames = Mapping[tuple[str, str], str]
"""(worker's id in the slices, its agent's URL) -> the name that the agent reports, if it differs from that id"""


def workers_by_agent_name(
    by_id: Mapping[str, DiscoveredWorker], agent_names: AgentNames, *, ids: Container[str], owners: Mapping[str, str]
) -> dict[str, DiscoveredWorker]:
    """Rekey the slices' workers by agent name, which usually is the pod's name and so the id in the slices.

    Where two get one name, the one whose id in the slices is that name stays; the other's pod is deleted.

    by_id        id in the slices -> worker
    agent_names  (id in the slices, agent URL) -> the name that the agent reports, if it differs from that id
    ids          names of all workers known from other sources
    owners       agent URL -> name of those workers, for workers with another name in the slices
    """
    places: dict[str, DiscoveredWorker] = {}
    strangers: list[tuple[str, DiscoveredWorker]] = []
    for worker in by_id.values():
        name: str | None = worker.id
        if worker.agent_url is not None:
            name = agent_names.get((worker.id, worker.agent_url))
        if name is None:
            name = worker.id if worker.id in ids else owners.get(worker.agent_url or "", worker.id)
        if name == worker.id:
            places[name] = worker
        else:
            strangers.append((name, worker))
    for name, worker in strangers:
        # Of two entries with one address, one is of a deleted pod: the entry with the agent's own name counts.
        places.setdefault(name, worker)
    return places


def workers_in_slice(slice_: Mapping[str, Any]) -> tuple[DiscoveredWorker, ...]:
    """The workers in one slice. Malformed parts are skipped; nothing raises.

    source  discovery.k8s.io/v1: `endpoints` and `ports` may be null (a Service without pods); a condition that is
            absent means ready, serving and not terminating; with publishNotReadyAddresses what terminates is ready, too
    """
    metadata = _as_mapping(slice_.get("metadata"))
    namespace = str(metadata.get("namespace") or "")
    pool = str(_as_mapping(metadata.get("labels")).get(POOL_LABEL) or "")
    ports, schemes = _ports_by_name(slice_), _schemes_by_name(slice_)
    workers = []
    for endpoint in _as_mappings(slice_.get("endpoints")):
        addresses = endpoint.get("addresses")
        address = addresses[0] if isinstance(addresses, list) and addresses else None
        if not isinstance(address, str) or not address:
            continue
        host = f"[{address}]" if ":" in address else address
        conditions = _as_mapping(endpoint.get("conditions"))
        is_terminating = conditions.get("terminating") is True
        says_ready = conditions.get("ready") is not False
        serving = conditions.get("serving")
        target = _as_mapping(endpoint.get("targetRef"))
        workers.append(
            DiscoveredWorker(
                id=str(target.get("name") or address) if target.get("kind", "Pod") == "Pod" else address,
                namespace=namespace,
                agent_url=_endpoint_url(schemes.get(AGENT, "http"), host, ports.get(AGENT)),
                engine_url=_endpoint_url(schemes.get(ENGINE, "http"), host, ports.get(ENGINE)),
                kv_events=_endpoint_url("tcp", host, ports.get(KV_EVENTS)),
                kv_replay=_endpoint_url("tcp", host, ports.get(KV_REPLAY)),
                zone=str(endpoint.get("zone") or ""),
                node=str(endpoint.get("nodeName") or ""),
                pool=pool,
                is_ready=says_ready and not is_terminating,
                is_serving=says_ready if serving is None else serving is True,
                is_terminating=is_terminating,
            )
        )
    return tuple(workers)


def _merge_worker(first: DiscoveredWorker, other: DiscoveredWorker) -> DiscoveredWorker:
    """One worker from two slices; the first slice's values come first."""
    is_terminating = first.is_terminating or other.is_terminating
    return replace(
        first,
        agent_url=first.agent_url or other.agent_url,
        engine_url=first.engine_url or other.engine_url,
        kv_events=first.kv_events or other.kv_events,
        kv_replay=first.kv_replay or other.kv_replay,
        zone=first.zone or other.zone,
        node=first.node or other.node,
        pool=first.pool or other.pool,
        is_ready=(first.is_ready or other.is_ready) and not is_terminating,
        is_serving=first.is_serving or other.is_serving,
        is_terminating=is_terminating,
    )


def _ports_by_name(slice_: Mapping[str, Any]) -> dict[str, int]:
    """A slice's TCP ports by name."""
    value = {}
    for port in _as_mappings(slice_.get("ports")):
        number = port.get("port")
        if port.get("protocol") in (None, "TCP") and isinstance(number, int) and 0 < number < 65536:
            value[str(port.get("name") or "")] = number
    return value


def _schemes_by_name(slice_: Mapping[str, Any]) -> dict[str, str]:
    """`https` by the name of each port whose `appProtocol` says so."""
    ports = _as_mappings(slice_.get("ports"))
    return {str(port.get("name") or ""): "https" for port in ports if port.get("appProtocol") == "https"}


def _endpoint_url(scheme: str, host: str, port: int | None) -> str | None:
    """`scheme://host:port`; None without a port."""
    return None if port is None else f"{scheme}://{host}:{port}"


def _slice_key(slice_: Mapping[str, Any]) -> tuple[str, str]:
    """Namespace and name of a slice."""
    metadata = _as_mapping(slice_.get("metadata"))
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _family_rank(family: str) -> int:
    """Sort key of an address family: IPv4, IPv6, others."""
    return {"IPv4": 0, "IPv6": 1}.get(family, 2)


def _as_mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def _as_mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; empty if the value is not a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
