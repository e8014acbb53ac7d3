"""The router's view of the fleet: follows the catalog, EndpointSlices and every worker's own report."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol
from urllib.parse import quote

import httpx
import structlog

from lorafleet.engine.agentless import AgentlessEngine, engines_by_id
from lorafleet.kube.discovery import SliceWatch
from lorafleet.kube.slices import DiscoveredWorker
from lorafleet.service.loops import MOST_BACKOFF_S, ChangeSignal, forever
from lorafleet.telemetry.repeats import RepeatLimiter
from orchestrator.model.catalog import CatalogAdapter
from orchestrator.model.pauses import PauseLease
from router.config import RouterSettings
from router.core.errors import NO_CATALOG, NOBODY_HEARD, CatalogUnavailable, NoReplica
from router.core.fleet import Replica, RouterFleet, with_last_resort
from router.core.kv.index import WorkerId
from router.fleet.catalog import RouterCatalog, configured_adapters, discovered_adapters, with_own_adapters
from router.fleet.catalog_follower import CatalogFollower
from router.fleet.replica_report import (
    FollowedWorker,
    is_same_but_report,
    replica_from,
    replica_state,
    with_location,
    with_newer_load,
)
from router.fleet.saved_catalog import SavedCatalog
from router.fleet.worker_sources import WorkerSource, merged_worker_sources
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchedStream, FetchRefused
from workers.wire import AvailableLoras, Metadata, WorkerAdapter

log = structlog.get_logger()

# Reports that change only engine metrics are batched into one new snapshot. A large fleet reports many times a second,
# and each snapshot makes the scheduler rebuild its tables. The load book gets every report at once.
_METRICS_REBUILD_DELAY_S = 0.25
# A new leader holds its answers to changes for routers that have not found it yet, for `confirm_wait_s` (2 s).
_CATALOG_BACKOFF_S = 1.0
# A stream of the orchestrator's changes that has ended is opened again so soon. The orchestrator waits two seconds for
# its routers to confirm a change (`confirm_wait_s`).
_EVENTS_AGAIN_S = 0.5
# A router that starts while the API server is unreachable waits this long, then takes its workers from the catalog.
_SLICES_WAIT_S = 10.0
_MOST_CONFIGURED = 100_000


class ReplicaListener(Protocol):
    """Gets each worker's reports and its removal."""

    def on_report(self, replica: Replica, metadata: Metadata) -> None:
        """A worker has reported; the replica is made of the report."""

    def on_agent_silent(self, worker: WorkerId) -> None:
        """The worker's agent has been silent for a while, but its engine answers."""

    def on_gone(self, worker: WorkerId) -> None:
        """The worker is no longer followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAccess:
    """How discovery reaches the orchestrator, agents, engines and Kubernetes.

    control          client of the orchestrator's REST API
    get              GETs a path below an agent's URL and returns the body; may raise EngineLost and FetchRefused.
                     Not httpx: every worker is polled each second, and httpx takes 1 ms of CPU a request
    get_from_engine  the same for an engine, without our own key, since the engine may be another party's.
                     `token` is the key that the engine wants
    open_stream      GETs a path below a URL of an agent or the orchestrator as a stream
    slices           the workers that Kubernetes lists; followed while `run` runs
    """

    control: httpx.AsyncClient
    get: Callable[[str, str], Awaitable[bytes]]
    get_from_engine: Callable[..., Awaitable[bytes]]
    open_stream: Callable[[str, str], AbstractAsyncContextManager[FetchedStream]]
    slices: SliceWatch | None = None


class Discovery:
    """Owns the snapshot `fleet`, replaces it whole at every change and notifies `changes`.

    followed     workers that are polled now, by id
    catalog_ids  workers that the catalog names
    """

    def __init__(
        self,
        settings: RouterSettings,
        access: FleetAccess,
        listener: ReplicaListener,
        *,
        router_id: str,
        adopt_pauses: Callable[[tuple[PauseLease, ...]], bool],
        confirmation_due: asyncio.Event,
        clock: Callable[[], float],
        on_failure: Callable[[str], object],
    ) -> None:
        """
        router_id         by which the orchestrator knows this router
        adopt_pauses      puts a catalog's pauses in force: whether there is a new one
        confirmation_due  set when the catalog has new drains or pauses: the orchestrator waits for a report that
                          confirms them
        on_failure        counts a failure of a background loop by the loop's name
        """
        self._from_zero = frozenset(pool.base_model for pool in settings.scale_from_zero.values())
        self.fleet = RouterFleet(from_zero=self._from_zero)
        self.changes = ChangeSignal()
        self.confirmation_due = confirmation_due
        self._adopt_pauses = adopt_pauses
        self._was_synced = False
        self._is_starting_up = True
        self._settings = settings
        self._access = access
        self._url = settings.orchestrator_url.rstrip("/")
        self._engines = engines_by_id(settings.engines)
        self._agents: dict[str, DiscoveredWorker] = {}  # of `engines` those that have turned out to be agents
        self.slices = access.slices
        self._slice_workers: Mapping[str, DiscoveredWorker] = MappingProxyType({})
        self._agent_names: dict[tuple[str, str], str] = {}
        self._began_at = clock()
        self._listener = listener
        self.clock = clock
        self._on_failure = on_failure
        state_file = settings.state_dir / "catalog.json" if settings.state_dir else None
        self._catalog = CatalogFollower(
            access.control,
            url=self._url,
            router_id=router_id,
            saved=None if state_file is None else SavedCatalog(state_file, RepeatLimiter(clock), clock),
            clock=clock,
            changes=self.changes,
            on_change=self._adopt_catalog,
        )
        self.catalog_ids: frozenset[str] = frozenset()
        self._all_adapters: Mapping[str, CatalogAdapter] = MappingProxyType({})
        self._has_heard_engines = False
        self.followed: dict[str, FollowedWorker] = {}
        self._rebuild_timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Follow the fleet until cancelled. The catalog saved on disk is used until the orchestrator answers."""
        if self._url:
            self._catalog.load_saved()
        self._update_followed()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._url:
                    read, wake = self._catalog.read, self._catalog.wake
                    poll_s, retry_s = self._settings.catalog_poll_s, _CATALOG_BACKOFF_S
                    tasks.create_task(self._repeat(read, "catalog", poll_s, wake, most_backoff_s=retry_s))
                    events = self._follow_catalog_events
                    again_s = min(poll_s, _EVENTS_AGAIN_S)
                    tasks.create_task(self._repeat(events, "catalog_events", again_s, most_backoff_s=retry_s))
                if self.slices is not None:
                    follow_slices = partial(self.slices.run, self._adopt_slices)
                    tasks.create_task(self._repeat(follow_slices, "slices", self._settings.catalog_poll_s))
                tasks.create_task(asyncio.Event().wait())  # also without orchestrator and slices: until cancelled
        finally:
            self._cancel_rebuild()
            self._catalog.cancel_read()
            for followed in self.followed.values():
                for task in followed.tasks:
                    task.cancel()

    def is_synced(self) -> bool:
        """Whether the router has known the fleet once; once true it stays true, whatever workers do later."""
        self._was_synced = self._was_synced or self.missing_for_sync() is None
        return self._was_synced

    def missing_for_sync(self) -> str | None:
        """What the router still waits for before it routes requests; None if nothing.

        It needs a catalog, a list of EndpointSlices and an answer of each worker. If the API server stays unreachable,
        the catalog's workers are enough. A catalog saved on disk is enough once the orchestrator has been asked: while
        this router was away, names may have been pointed elsewhere.
        """
        if self._url and not (self.has_catalog and self._catalog.has_asked):
            return "the orchestrator's catalog"
        may_wait = self.clock() - self._began_at < _SLICES_WAIT_S
        if self.slices is not None and not self.slices.is_synced and may_wait:
            return "the first list of EndpointSlices"
        if not self._has_polled_all():
            return "the first answer of each worker"
        return None if self.has_catalog else "the first answer of any worker"

    @property
    def is_starting_up(self) -> bool:
        """Whether this router just started and has no worker yet, so that a request may wait. False is final.

        Not with a pool that may be at zero: a request for its first worker waits elsewhere.
        """
        if self._is_starting_up:
            is_over = self.clock() - self._began_at >= self._settings.first_sync_wait_s
            has_models = self.fleet.replicas or self.fleet.from_zero
            self._is_starting_up = not (is_over or (self.is_synced() and has_models))
        return self._is_starting_up

    async def wait_for_first_worker(self) -> None:
        """Wait while no worker is known, at most until `first_sync_wait_s` after this router's start."""
        if self.is_starting_up:
            left_s = self._settings.first_sync_wait_s - (self.clock() - self._began_at)
            await self.changes.until(lambda: not self.is_starting_up, timeout_s=left_s)

    @property
    def has_catalog(self) -> bool:
        """Whether the adapters are known: by a catalog, or without an orchestrator by the workers' reports."""
        return self._catalog.is_known or self._has_heard_engines

    def is_registered(self, lora_id: str) -> bool:
        """Whether the adapter is in the catalog, or an engine lists it; true for all while no catalog is known."""
        return not self.has_catalog or lora_id in self.fleet.adapters

    @property
    def confirmed_at(self) -> float | None:
        """When the orchestrator last confirmed the catalog in force; None before the first time."""
        return self._catalog.confirmed_at

    @property
    def can_refresh_catalog(self) -> bool:
        """Whether the orchestrator can be asked for a newer catalog."""
        return bool(self._url) and self._catalog.can_refresh

    async def refresh_catalog(self) -> bool:
        """Whether a catalog requested after this call is now in force; see `CatalogFollower.refresh`."""
        return bool(self._url) and await self._catalog.refresh()

    def slices_age_s(self) -> float | None:
        """Seconds since the API server last confirmed the slices; None before the first time or without slices."""
        return None if self.slices is None else self.slices.age_s()

    def check_any_report(self) -> None:
        """Raise NoReplica if no worker has reported yet, since only workers know which base models exist."""

        if self.followed and not self.fleet.replicas:
            raise NoReplica("no worker has answered this router yet, so which base models there are is not known")

    def catalog_unavailable(self) -> CatalogUnavailable:
        """The error for requests before `has_catalog`; without an orchestrator it names the workers instead."""
        return CatalogUnavailable(NO_CATALOG if self._url else NOBODY_HEARD, retry_after_s=2.0)

    def _has_polled_all(self) -> bool:
        """Whether each followed worker has been polled, with or without success."""
        return all(f.metadata is not None or f.heard_at for f in self.followed.values())

    def poll_now(self, worker: str | None = None) -> None:
        """Wake the polling of the orchestrator and of one worker (None: every worker); does not wait for answers."""
        self._catalog.wake.set()
        for id_, followed in self.followed.items():
            if worker in (None, id_):
                followed.wake.set()

    def catalog_age_s(self) -> float | None:
        """Seconds since the orchestrator last confirmed the catalog in force; None before the first time."""
        return self._catalog.age_s()

    def report_age_s(self, worker: WorkerId) -> float | None:
        """Seconds since a worker last reported; None if it has not, or is not followed."""
        followed = self.followed.get(worker)
        return None if followed is None or followed.metadata is None else self.clock() - followed.heard_at

    async def _follow_catalog_events(self) -> None:
        """Wake the polling of the catalog at each of its changes, until the stream of events ends.

        Raises FetchRefused.
        """
        path = f"/v1/events?changes=true&since={self._catalog.current.revision}"
        await self._follow_events(self._url, path, self._catalog.wake)

    async def _follow_events(self, url: str, path: str, wake: asyncio.Event) -> None:
        """Set `wake` at each message of an SSE stream until it ends; once for a 410. Raises FetchRefused for others."""
        async with self._access.open_stream(url, path) as events:
            if events.status == 410:
                wake.set()
                return
            if events.status != 200:
                raise FetchRefused(f"GET {url}{path}: {events.status}")
            async for data in events:
                if b"data:" in data:  # not a keep-alive comment
                    wake.set()

    def _adopt_catalog(self, before: RouterCatalog) -> None:
        """Follow the catalog now in force: rebuilds the fleet, adopts pauses, signals new drains and pauses."""
        self.catalog_ids = frozenset(worker.id for worker in self._catalog.current.workers)
        self._update_known_adapters()
        self._update_followed()
        self.rebuild_fleet()
        known, now = before.draining, self._catalog.current.draining
        has_drains = any(names - known.get(worker_id, frozenset()) for worker_id, names in now.items())
        if self._adopt_pauses(self._catalog.current.pauses) or has_drains:
            self.confirmation_due.set()

    def _adopt_slices(self) -> None:
        """Put the current workers of the EndpointSlices in force, and rebuild the fleet.

        A worker that slices name no longer is kept while it is followed.
        """
        assert self.slices is not None
        now = self.slices.workers
        # A worker that the slices no longer list may be ending, or may only have lost a label: keep its last entry.
        in_use = self.followed.keys() | {followed.url for followed in self.followed.values()}
        missing = {
            id_: worker
            for id_, worker in self._slice_workers.items()
            if id_ not in now and not in_use.isdisjoint((id_, worker.agent_url, worker.engine_url))
        }
        self._slice_workers = MappingProxyType({**missing, **now})
        listed = (*self._slice_workers.values(), *self._agents.values())
        present = {(worker.id, worker.agent_url or "") for worker in listed}
        self._agent_names = {key: name for key, name in self._agent_names.items() if key in present}
        self._update_followed()
        self.rebuild_fleet()

    def _update_followed(self) -> None:
        """Start following workers that the catalog, the slices or the settings name, and move those with a new address.

        A worker that none of them names is still followed for as long as it answers. An orchestrator that just started
        has no reports yet, and a pod may have lost its label.
        """
        workers = self._merged_sources(self._slice_workers)
        named_ids = workers.keys()
        now = self._slice_workers if self.slices is None else self.slices.workers
        if len(now) < len(self._slice_workers):
            named_ids = self._merged_sources(now).keys()
        for id_, followed in self.followed.items():
            followed.is_named = id_ in named_ids
        for id_, worker in workers.items():
            known = self.followed.get(id_)
            if known is not None:
                known.source = worker
                if not self._has_moved(known):
                    continue
                if id_ not in named_ids:
                    self.stop_following(id_)
            if id_ in named_ids:
                self._start_following(worker)

    def _merged_sources(self, in_slices: Mapping[str, DiscoveredWorker]) -> dict[str, WorkerSource]:
        """The workers that catalog, these slices and settings name, by id."""
        engines = {id_: url for id_, url in self._engines.items() if id_ not in self._agents}
        named = self._catalog.current.workers
        return merged_worker_sources(named, {**self._agents, **in_slices}, engines, self._agent_names)

    def _has_moved(self, followed: FollowedWorker) -> bool:
        """Whether to follow a worker at another address. A worker that answers is not moved."""
        if followed.source.has_agent and followed.agentless is not None:
            return True
        return followed.url not in followed.source.addresses and not followed.is_answering

    def _start_following(self, worker: WorkerSource) -> None:
        """Start polling a worker at its first address, in place of any other address. Its requests run on.

        Starts its tasks: one polls the report, one follows the agent's events if it has an agent.
        """
        if worker.id in self.followed:
            self._cancel_following(worker.id)
        followed = FollowedWorker(worker, worker.addresses[0], asyncio.Event())
        if not worker.has_agent:
            followed.agentless = AgentlessEngine(
                worker.id,
                followed.url,
                partial(self._access.get_from_engine, followed.url, token=self._settings.engine_key),
                kv_events=worker.kv_events,
                kv_replay=worker.kv_replay,
                salt=self._settings.engine_salt,
                clock=self.clock,
            )
        self.followed[worker.id] = followed

        async def poll() -> None:
            """Poll this worker once; raises what the read raises."""
            await self._poll_worker(followed)

        async def listen() -> None:
            """Wake the worker's polling at each event of its agent, until the stream ends. Raises FetchRefused."""
            await self._follow_events(followed.url, "/v1/events?files=false", followed.wake)

        loops = [self._repeat(poll, "metadata", self._settings.metadata_poll_s, followed.wake, worker=worker.id)]
        if followed.agentless is None:
            loops.append(self._repeat(listen, "agent_events", self._settings.metadata_poll_s, worker=worker.id))
        followed.tasks = tuple(asyncio.create_task(loop) for loop in loops)

    def stop_following(self, id_: str) -> None:
        """Stop polling a worker and report to the listener that it is gone; the next rebuild drops its replica."""
        self._cancel_following(id_)
        self._listener.on_gone(WorkerId(id_))

    def _cancel_following(self, id_: str) -> None:
        """Cancel the polling of a worker, and drop the adapters that only it listed."""
        for task in self.followed.pop(id_).tasks:
            task.cancel()
        self._update_known_adapters()

    async def _poll_worker(self, followed: FollowedWorker) -> None:
        """Read a worker's report once, update its replica and call the listener; raises what the read raises.

        A failed read marks the worker. A report under another id renames it; one of a worker given up is dropped.
        """
        asked_at = self.clock()
        try:
            metadata = await self._fetch_report(followed)
            listed = await self._read_configured(followed, metadata)
        except Exception:  # any error counts as no report: one odd answer must not hold up the first sync
            if await self._is_agent(followed):
                self._follow_as_agent(followed)
                return
            await self._on_missing_report(followed)
            raise
        if self.followed.get(followed.source.id) is not followed:
            return
        if metadata.instance_id != followed.source.id:
            self._rename_worker(followed, metadata.instance_id)
            return
        before, followed.metadata = followed.metadata, with_location(metadata, followed.source)
        _log_refusal(before, metadata)
        followed.asked_at, followed.heard_at = asked_at, self.clock()
        followed.is_answering, followed.engine_answers = True, True
        has_other_list, followed.configured = listed != followed.configured, listed
        lists_own = followed.agentless is not None or not metadata.lora.enabled
        is_other_engine = lists_own and (before is None or before.lora.loaded_loras != metadata.lora.loaded_loras)
        if is_other_engine or has_other_list:
            self._update_known_adapters()
        replica = self._replica_of(followed, followed.metadata)
        known = self.fleet.replicas.get(replica.id)
        if known is not None and is_same_but_report(known, replica):
            self._schedule_rebuild()
        else:
            self.rebuild_fleet()
        self._listener.on_report(replica, followed.metadata)

    async def _on_missing_report(self, followed: FollowedWorker) -> None:
        """After a failed poll: try the worker's next address, mark it late, or stop following it. Rebuilds fleet."""
        followed.heard_at, followed.is_answering = followed.heard_at or self.clock(), False
        is_late = self.clock() - followed.heard_at > self._settings.unreachable_after_s
        if is_late:
            followed.engine_answers = await self._is_engine_healthy(followed)
        id_, addresses = followed.source.id, followed.source.addresses
        if self.followed.get(id_) is not followed:
            return
        if is_late and not followed.is_named and not followed.engine_answers:
            self.stop_following(id_)
        elif self._has_moved(followed):
            self._start_following(followed.source)
        elif followed.agentless is None and len(addresses) > 1:
            followed.url = addresses[(addresses.index(followed.url) + 1) % len(addresses)]
        if is_late and followed.engine_answers:
            self._listener.on_agent_silent(WorkerId(id_))
        self.rebuild_fleet()

    async def _fetch_report(self, followed: FollowedWorker) -> Metadata:
        """A worker's report, from its agent or its engine; raises FetchRefused if another worker answers."""
        if followed.agentless is not None:
            return await followed.agentless.report()
        metadata = followed.reader.read(await self._access.get(followed.url, "/metadata?available=false"))
        id_ = followed.source.id
        if metadata.instance_id != id_ and id_ in self.catalog_ids:  # another worker has its address now
            raise FetchRefused(f"{followed.url} is worker {metadata.instance_id!r} by now, not {id_!r}")
        return metadata

    async def _read_configured(
        self, followed: FollowedWorker, metadata: Metadata
    ) -> tuple[str, tuple[WorkerAdapter, ...]]:
        """What the worker's settings name, with the digest in its report; read where that is new.

        Nothing where an orchestrator registers it. Raises what the read raises.
        """
        digest = metadata.lora.configured_digest
        if self._url or followed.agentless is not None or digest == followed.configured[0]:
            return followed.configured
        found: list[WorkerAdapter] = []
        cursor: str | None = ""
        while digest and cursor is not None and len(found) < _MOST_CONFIGURED:
            path = f"/v1/metadata/loras?configured=true&limit=1000&cursor={quote(cursor, safe='')}"
            page = AvailableLoras.model_validate_json(await self._access.get(followed.url, path))
            found += page.data
            cursor = page.next
        return digest, tuple(found)

    async def _is_agent(self, followed: FollowedWorker) -> bool:
        """Whether one of `engines` that gives no report as an engine does is an agent. It is asked without our key."""
        if followed.agentless is None or followed.source.id not in self._engines or followed.metadata is not None:
            return False
        try:
            Metadata.model_validate_json(await self._access.get_from_engine(followed.url, "/metadata"))
        except Exception:  # noqa: BLE001  (any error: it is no agent, or none that answers now)
            return False
        return True

    def _follow_as_agent(self, followed: FollowedWorker) -> None:
        """Follow one of `engines` as the agent that it is."""
        id_, url = followed.source.id, followed.url
        log.info("an entry of engines is an agent", worker=id_, agent_url=url)
        self._agents[id_] = DiscoveredWorker(id=id_, namespace="", agent_url=url, engine_url=None)
        self._update_followed()
        self.rebuild_fleet()

    def _rename_worker(self, followed: FollowedWorker, name: str) -> None:
        """Follow a worker under the name that its agent reports, not that of the slices; rebuilds the fleet."""
        log.info("worker goes by its own name", found=followed.source.id, worker=name, agent_url=followed.url)
        self._agent_names[followed.source.id, followed.url] = name
        self.stop_following(followed.source.id)
        self._update_followed()
        self.rebuild_fleet()

    def _update_known_adapters(self) -> None:
        """Merge the catalog's adapters with those that engines without an agent last listed.

        Without an orchestrator, with those that workers' settings name, too.
        """
        heard = [(f, f.metadata) for f in self.followed.values() if f.metadata is not None]
        agentless = [metadata if f.agentless is not None else with_own_adapters(metadata) for f, metadata in heard]
        catalog, has_orchestrator = self._catalog.current, bool(self._url)
        listed = discovered_adapters(agentless, catalog.names(), has_orchestrator=has_orchestrator) if agentless else {}
        if not has_orchestrator:
            lists = [(metadata.model.base_model, f.configured[1]) for f, metadata in heard if f.configured[1]]
            listed = {**listed, **configured_adapters(lists)}
        self._all_adapters = MappingProxyType({**catalog.adapters, **listed}) if listed else catalog.adapters

    async def _is_engine_healthy(self, followed: FollowedWorker) -> bool:
        """GET /health of a silent agent's engine; whether it answers: then its last report stays valid."""
        if followed.metadata is None:
            return False
        try:
            await self._access.get_from_engine(followed.metadata.transport.engine_url, "/health")
        except (EngineLost, FetchRefused, ValueError):
            return False
        return True

    def kept_out(self, worker_id: str) -> frozenset[str]:
        """lora_ids of the adapters that an operator keeps out of the worker, by the catalog."""
        followed = self.followed.get(worker_id)
        return frozenset() if followed is None else followed.source.kept_out

    def _schedule_rebuild(self) -> None:
        """Rebuild the fleet in a quarter of a second, unless that is scheduled already."""
        if self._rebuild_timer is None:
            self._rebuild_timer = asyncio.get_running_loop().call_later(_METRICS_REBUILD_DELAY_S, self.rebuild_fleet)

    def _cancel_rebuild(self) -> None:
        """Cancel the scheduled rebuild, if any."""
        if self._rebuild_timer is not None:
            self._rebuild_timer.cancel()
            self._rebuild_timer = None

    def rebuild_fleet(self) -> None:
        """Replace the snapshot `fleet` with one of the latest reports, and notify `changes`; ends a scheduled rebuild.

        Without an orchestrator, `has_catalog` is true once all workers have been polled.
        """
        self._cancel_rebuild()
        replicas = {
            WorkerId(id_): self._replica_of(followed, followed.metadata)
            for id_, followed in self.followed.items()
            if followed.metadata is not None
        }
        replicas = with_last_resort(replicas)
        catalog = self._catalog.current
        self.fleet = RouterFleet(
            catalog.revision,
            MappingProxyType(replicas),
            self._all_adapters,
            catalog.aliases,
            catalog.cache if self._url else self._settings.cache,
            self._from_zero,
        )
        if not self._url and replicas and self._has_polled_all():
            self._has_heard_engines = True
        self.changes.notify()

    def _replica_of(self, followed: FollowedWorker, metadata: Metadata) -> Replica:
        """A worker's replica, built again, and kept, only if its report, state or drains have changed."""
        is_silent = self.clock() - followed.heard_at > self._settings.unreachable_after_s
        state = replica_state(followed, metadata, is_silent=is_silent)
        catalog, id_ = self._catalog.current, followed.source.id
        is_ending, draining = followed.source.is_ending, catalog.draining.get(id_, frozenset())
        # Only replicas whose report changed are rebuilt: a fleet reports many times a second.
        inputs = followed.made_from
        replica = followed.replica
        if replica is not None and inputs is not None and inputs[1:] == (state, is_ending, draining):
            if inputs[0] is metadata:
                return replica
            replica = with_newer_load(followed, inputs[0], metadata)
        else:
            replica = None
        if replica is None:
            replica = replica_from(followed, metadata, state=state, draining=draining, zone=self._settings.zone)
        followed.replica, followed.made_from = replica, (metadata, state, is_ending, draining)
        return replica

    async def _repeat(
        self,
        step: Callable[[], Awaitable[object]],
        name: str,
        every_s: float,
        poke: asyncio.Event | None = None,
        *,
        most_backoff_s: float = MOST_BACKOFF_S,
        **about: str,
    ) -> None:
        """Run a step for ever, at most every `every_s` and at each `poke`, counting its failures by name."""
        await forever(
            step,
            name=name,
            every_s=every_s,
            poke=poke,
            on_failure=lambda: self._on_failure(name),
            about=about,
            most_backoff_s=most_backoff_s,
        )


def _log_refusal(before: Metadata | None, now: Metadata) -> None:
    """Log that an engine takes no adapters, when that or its reason is new."""
    if now.lora.refusal and (before is None or before.lora.refusal != now.lora.refusal):
        log.warning("engine takes no adapters", worker=now.instance_id, reason=now.lora.refusal)
