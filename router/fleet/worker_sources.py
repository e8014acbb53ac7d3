"""Which workers there are, by the word of everybody who names some: catalog, EndpointSlices, our own settings. Pure.

A worker that several of them name is one worker. Where they disagree on its address, slices come first: Kubernetes
knows where a pod is before its agent has told anybody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorafleet.kube.slices import Called, DiscoveredWorker, by_own_name
from orchestrator.wire import CatalogWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSource:
    """A worker, before it has said anything itself.

    addresses   of its agent, or of its engine where it has no agent; the first is the best known
    drained     the catalog says that this agent (by its boot id) is to get no new requests; "": whichever agent it has
    is_ending   Kubernetes is ending its pod
    """

    id: str
    addresses: tuple[str, ...]
    has_agent: bool
    drained: str | None = None
    is_ending: bool = False
    zone: str = ""
    node: str = ""
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()


def named_workers(
    catalog: Iterable[CatalogWorker], found: Mapping[str, DiscoveredWorker], engines: Mapping[str, str], called: Called
) -> dict[str, WorkerSource]:
    """Worker id -> worker.

    engines  worker id -> URL of engines without an agent, from our own settings
    """
    listed = {worker.id: worker for worker in catalog}
    owners = {worker.agent_url.rstrip("/"): worker.id for worker in listed.values() if worker.agent_url}
    places = by_own_name(found, called, ids=listed, owners=owners)
    names = [*listed, *(name for name in places if name not in listed)]
    workers = {name: _joined(name, listed.get(name), places.get(name)) for name in names}
    for name, url in engines.items():
        workers[name] = WorkerSource(id=name, addresses=(url,), has_agent=False)
    return {name: worker for name, worker in workers.items() if worker.addresses}


def _joined(name: str, listed: CatalogWorker | None, found: DiscoveredWorker | None) -> WorkerSource:
    agents = [found.agent_url if found else None, listed.agent_url.rstrip("/") if listed else None]
    engines = [found.engine_url if found else None, listed.engine_url.rstrip("/") if listed else None]
    has_agent = any(agents)
    addresses = dict.fromkeys(url for url in (agents if has_agent else engines) if url)
    return WorkerSource(
        id=name,
        addresses=tuple(addresses),
        has_agent=has_agent,
        drained=listed.agent_boot_id if listed is not None and listed.state == "draining" else None,
        is_ending=found is not None and found.is_terminating,
        zone=found.zone if found else "",
        node=found.node if found else "",
        kv_events=(found.kv_events,) if found and found.kv_events else (),
        kv_replay=(found.kv_replay,) if found and found.kv_replay else (),
    )
