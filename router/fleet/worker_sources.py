"""The workers that the catalog, the EndpointSlices and our own settings name, merged by id. Pure.

If they disagree on an address, the slices come first: Kubernetes knows a pod's address before its agent reports it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorafleet.kube.slices import AgentNames, DiscoveredWorker, workers_by_agent_name
from orchestrator.model.catalog import CatalogWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSource:
    """A worker as its sources name it, before its first report.

    addresses  of its agent, or of its engine if it has no agent; the most reliable first
    drained    boot id of the agent that the catalog drains; "" for any agent, None for none
    is_ending  whether Kubernetes is ending its pod
    kept_out   lora_ids of adapters that get no copy there
    """

    id: str
    addresses: tuple[str, ...]
    has_agent: bool
    drained: str | None = None
    is_ending: bool = False
    kept_out: frozenset[str] = frozenset()
    zone: str = ""
    node: str = ""
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()


def merged_worker_sources(
    catalog: Iterable[CatalogWorker],
    in_slices: Mapping[str, DiscoveredWorker],
    engines: Mapping[str, str],
    agent_names: AgentNames,
) -> dict[str, WorkerSource]:
    """Worker id -> worker, merged from all sources.

    in_slices    workers of the EndpointSlices
    engines      worker id -> URL of engines without an agent, from our own settings
    agent_names  see `AgentNames`
    """
    in_catalog = {worker.id: worker for worker in catalog}
    owners = {worker.agent_url.rstrip("/"): worker.id for worker in in_catalog.values() if worker.agent_url}
    places = workers_by_agent_name(in_slices, agent_names, ids=in_catalog, owners=owners)
    names = [*in_catalog, *(name for name in places if name not in in_catalog)]
    workers = {name: _merged_source(name, in_catalog.get(name), places.get(name)) for name in names}
    for name, url in engines.items():
        workers[name] = WorkerSource(id=name, addresses=(url,), has_agent=False)
    return {name: worker for name, worker in workers.items() if worker.addresses}


def _merged_source(name: str, in_catalog: CatalogWorker | None, in_slices: DiscoveredWorker | None) -> WorkerSource:
    """One worker from its catalog entry and its slices."""
    agents = [in_slices.agent_url if in_slices else None, in_catalog.agent_url.rstrip("/") if in_catalog else None]
    engines = [in_slices.engine_url if in_slices else None, in_catalog.engine_url.rstrip("/") if in_catalog else None]
    has_agent = any(agents)
    addresses = dict.fromkeys(url for url in (agents if has_agent else engines) if url)
    return WorkerSource(
        id=name,
        addresses=tuple(addresses),
        has_agent=has_agent,
        drained=in_catalog.agent_boot_id if in_catalog is not None and in_catalog.state == "draining" else None,
        is_ending=in_slices is not None and in_slices.is_terminating,
        kept_out=frozenset(in_catalog.kept_out) if in_catalog is not None else frozenset(),
        zone=in_slices.zone if in_slices else "",
        node=in_slices.node if in_slices else "",
        kv_events=(in_slices.kv_events,) if in_slices and in_slices.kv_events else (),
        kv_replay=(in_slices.kv_replay,) if in_slices and in_slices.kv_replay else (),
    )
