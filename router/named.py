"""Which workers there are, by the word of everybody who names some: catalog, EndpointSlices, our own settings. Pure.

A worker that several of them name is one worker. Where they disagree on its address, slices come first: Kubernetes
knows where a pod is before its agent has told anybody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorafleet.kube.slices import FoundWorker
from orchestrator.wire import CatalogWorker

Called = Mapping[tuple[str, str], str]
"""(id in the slices, agent's URL) -> what the agent there calls itself, where that is something else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A worker, before it has said anything itself.

    addresses   of its agent, or of its engine where it has no agent; the first is the best known
    is_draining somebody says that it is to get no new requests
    """

    id: str
    addresses: tuple[str, ...]
    has_agent: bool
    is_draining: bool = False
    zone: str = ""
    node: str = ""
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()


def named_workers(
    catalog: Iterable[CatalogWorker], found: Mapping[str, FoundWorker], engines: Mapping[str, str], called: Called
) -> dict[str, Named]:
    """Worker id -> worker.

    engines  worker id -> URL of engines without an agent, from our own settings
    """
    listed = {worker.id: worker for worker in catalog}
    places = _by_name(listed, found, called)
    names = [*listed, *(name for name in places if name not in listed)]
    workers = {name: _joined(name, listed.get(name), places.get(name)) for name in names}
    for name, url in engines.items():
        workers[name] = Named(id=name, addresses=(url,), has_agent=False)
    return {name: worker for name, worker in workers.items() if worker.addresses}


def _by_name(
    listed: Mapping[str, CatalogWorker], found: Mapping[str, FoundWorker], called: Called
) -> dict[str, FoundWorker]:
    """Found workers by the name that the catalog, or the agent itself, has for them."""
    owners = {worker.agent_url.rstrip("/"): worker.id for worker in listed.values() if worker.agent_url}
    places: dict[str, FoundWorker] = {}
    strangers: list[tuple[str, FoundWorker]] = []
    for worker in found.values():
        url = worker.agent_url or ""
        name = called.get((worker.id, url))
        if name is None:
            name = worker.id if worker.id in listed else owners.get(url, worker.id)
        if name == worker.id:
            places[name] = worker
        else:
            strangers.append((name, worker))
    for name, worker in strangers:
        # Of two entries with one address, one is of a pod that is gone: the one with the agent's own name counts.
        places.setdefault(name, worker)
    return places


def _joined(name: str, listed: CatalogWorker | None, found: FoundWorker | None) -> Named:
    agents = [found.agent_url if found else None, listed.agent_url.rstrip("/") if listed else None]
    engines = [found.engine_url if found else None, listed.engine_url.rstrip("/") if listed else None]
    has_agent = any(agents)
    addresses = dict.fromkeys(url for url in (agents if has_agent else engines) if url)
    return Named(
        id=name,
        addresses=tuple(addresses),
        has_agent=has_agent,
        is_draining=(listed is not None and listed.state == "draining") or (found is not None and found.is_terminating),
        zone=found.zone if found else "",
        node=found.node if found else "",
        kv_events=(found.kv_events,) if found and found.kv_events else (),
        kv_replay=(found.kv_replay,) if found and found.kv_replay else (),
    )
