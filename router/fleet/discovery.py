"""Who the replicas are and what they hold: follows catalog and EndpointSlices, and every agent's own report."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import httpx
import structlog

from lorafleet.engine.agentless import AgentlessEngine
from lorafleet.kube.discovery import SliceWatch
from lorafleet.kube.slices import DiscoveredWorker
from lorafleet.kv.connectors import EngineSalt
from lorafleet.service.loops import ChangeSignal, forever
from orchestrator.wire import Catalog
from router.core.errors import NO_CATALOG, NOBODY_HEARD, CatalogUnavailable, NoReplica
from router.core.fleet import AdapterAlias, Replica, RoutableAdapter, RouterFleet, with_last_resort
from router.core.kv.index import WorkerId
from router.fleet.catalog import draining_by_worker, named_by, read_catalog, save_catalog
from router.fleet.discovered_adapters import listed_adapters
from router.fleet.replica_report import FollowedWorker, placed, replica_from, state_of
from router.fleet.worker_sources import WorkerSource, named_workers
from router.http.engine_pool import EngineLost
from router.http.fetch import FetchedStream, FetchRefused
from workers.wire import Metadata

log = structlog.get_logger()

# Figures alone go into the snapshot together with all others' of this time: a large fleet reports many times a second,
# and with each snapshot decisions make their tables anew. Who keeps loads is told at once.
_FIGURES_WAIT_S = 0.25
# A router that starts while the API server is away knows its workers by the catalog, and waits no longer than this.
_SLICES_WITHIN_S = 10.0
# What is unknown here may be known at the orchestrator: it is asked this often at most, and waited for no longer.
_LOOKS_APART_S = 0.1
_LOOK_WITHIN_S = 1.0


class ReplicaListener(Protocol):
    """Who wants to know that a worker said something, or is gone."""

    def heard(self, replica: Replica, metadata: Metadata) -> None: ...

    def unheard(self, worker: WorkerId) -> None:
        """Its agent has been away for a while, and its engine answers."""

    def gone(self, worker: WorkerId) -> None: ...


class Discovery:
    """Owns the snapshot `fleet`; swaps it whole at every change and tells `changes`."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        ask: Callable[[str, str], Awaitable[bytes]],
        *,
        ask_engine: Callable[..., Awaitable[bytes]],
        listen: Callable[[str, str], AbstractAsyncContextManager[FetchedStream]],
        engine_key: str = "",
        engine_salt: EngineSalt = "auto",
        orchestrator_url: str,
        engines: Mapping[str, str] = MappingProxyType({}),
        slices: SliceWatch | None = None,
        zone: str = "",
        listener: ReplicaListener,
        state_file: Path | None,
        catalog_poll_s: float,
        metadata_poll_s: float,
        unreachable_after_s: float,
        first_sync_wait_s: float = 0.0,
        clock: Callable[[], float],
        on_failure: Callable[[str], object],
    ) -> None:
        """ask: the body that a GET of a path below a worker's URL answers; may raise EngineLost and Refused.

        Each worker is asked every second, and an HTTP client takes a millisecond of the router's core for that.

        ask_engine        the same of an engine, without our own key: it is somebody else's. `token`: the key it wants
        listen            the stream that a GET of a path below a URL answers, of an agent or the orchestrator
        engine_key, engine_salt  of engines without an agent
        orchestrator_url  empty: there is none, and only `engines` are followed
        engines           worker id -> URL of engines that have no agent
        slices            the workers that Kubernetes names; followed for as long as this runs
        zone              where this router is; empty: not known
        first_sync_wait_s  see `until_met`
        """
        self.fleet = RouterFleet()
        self.changes = ChangeSignal()
        self.drains_begun = asyncio.Event()
        """Set when the catalog names new drains: the orchestrator waits for a report that knows them."""
        self.has_catalog = False
        self.confirmed_at: float | None = None
        self._was_synced = False
        self._is_early = True
        self._first_sync_wait_s = first_sync_wait_s
        self._looked_at = self._look_began_at = -inf
        self._is_orchestrator_away = False
        self._look_later: asyncio.TimerHandle | None = None
        self._client = client
        self._ask = ask
        self._ask_engine = ask_engine
        self._listen_to = listen
        self._engine_key = engine_key
        self._engine_salt: EngineSalt = engine_salt
        self._url = orchestrator_url.rstrip("/")
        self._engines = engines
        self.slices = slices
        self._found: Mapping[str, DiscoveredWorker] = MappingProxyType({})
        self._zone = zone
        self._called: dict[tuple[str, str], str] = {}
        self._began_at = clock()
        self._listener = listener
        self._state_file = state_file
        self._catalog_poll_s = catalog_poll_s
        self._metadata_poll_s = metadata_poll_s
        self._unreachable_after_s = unreachable_after_s
        self._clock = clock
        self._on_failure = on_failure
        self._catalog = Catalog(revision=0)
        self._catalog_ids: frozenset[str] = frozenset()
        # Names of adapters and aliases that an engine's own list cannot give away once more.
        self._taken: frozenset[str] = frozenset()
        # Made once a catalog, not at every report of every agent: there are thousands.
        self._adapters: Mapping[str, RoutableAdapter] = MappingProxyType({})
        self._known: Mapping[str, RoutableAdapter] = self._adapters
        self._aliases: Mapping[str, AdapterAlias] = MappingProxyType({})
        self._draining: dict[str, frozenset[str]] = {}
        self._etag: str | None = None
        self._catalog_poke = asyncio.Event()
        self._follows: dict[str, FollowedWorker] = {}
        self._rebuild_later: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Follow until cancelled. The last catalog on disk is in force until the orchestrator answers."""
        if self._url:
            self._read_saved()
        self._name()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._url:
                    tasks.create_task(self._forever(self._look, "catalog", self._catalog_poll_s, self._catalog_poke))
                    tasks.create_task(self._forever(self._listen_orchestrator, "catalog_events", self._catalog_poll_s))
                if self.slices is not None:
                    follow_slices = partial(self.slices.run, self._take_slices)
                    tasks.create_task(self._forever(follow_slices, "slices", self._catalog_poll_s))
                tasks.create_task(asyncio.Event().wait())  # with neither, too, until cancelled
        finally:
            self._call_rebuild_off()
            if self._look_later is not None:
                self._look_later.cancel()
            for follow in self._follows.values():
                for task in follow.tasks:
                    task.cancel()

    def is_synced(self) -> bool:
        """Whether `waits_for` was nothing once; a worker that comes later or cannot be reached does not change it."""
        self._was_synced = self._was_synced or self.waits_for() is None
        return self._was_synced

    def waits_for(self) -> str | None:
        """What there has to be before requests are routed: a catalog, a list of slices, an answer of each worker.

        Without an API server the catalog's word is enough after a while, since it names workers, too.
        """
        if not self.has_catalog and self._url:
            return "the orchestrator's catalog"
        is_early = self._clock() - self._began_at < _SLICES_WITHIN_S
        if self.slices is not None and not self.slices.is_synced and is_early:
            return "the first list of EndpointSlices"
        if not self._has_asked_all():
            return "the first answer of each worker"
        return None if self.has_catalog else "the first answer of any worker"

    @property
    def is_early(self) -> bool:
        """Whether this router has just started and met no worker yet: a request may have to wait, see `until_met`."""
        if self._is_early:
            is_over = self._clock() - self._began_at >= self._first_sync_wait_s
            self._is_early = not (is_over or (self.is_synced() and self.fleet.replicas))
        return self._is_early

    async def until_met(self) -> None:
        """Wait while nothing is known of the fleet, until `first_sync_wait_s` after the start of this router."""
        if self.is_early:
            left_s = self._first_sync_wait_s - (self._clock() - self._began_at)
            await self.changes.until(lambda: not self.is_early, timeout_s=left_s)

    @property
    def may_look_again(self) -> bool:
        """Whether the orchestrator may know what the catalog in force here does not."""
        return bool(self._url) and not self._is_orchestrator_away

    async def look_again(self) -> bool:
        """Whether a catalog is in force by now that was asked for after this call: what was registered before a request
        was sent is known to it. False where the orchestrator is away, or does not answer soon.
        """
        if not self.may_look_again:
            return False
        asked_at = self._clock()
        self._look_soon(asked_at)
        await self.changes.until(
            lambda: self._looked_at >= asked_at or not self.may_look_again, timeout_s=_LOOK_WITHIN_S
        )
        return self._looked_at >= asked_at

    def _look_soon(self, now: float) -> None:
        wait_s = self._look_began_at + _LOOKS_APART_S - now
        if wait_s <= 0:
            self._catalog_poke.set()
        elif self._look_later is None:
            self._look_later = asyncio.get_running_loop().call_later(wait_s, self._look_now)

    def _look_now(self) -> None:
        self._look_later = None
        self._catalog_poke.set()

    def slices_age_s(self) -> float | None:
        """Seconds since the API server last confirmed the slices; None before the first time, or without any."""
        return None if self.slices is None else self.slices.age_s()

    def check_heard(self) -> None:
        """Raises NoReplica where there are workers and none has said anything yet: which base models there are is known
        from them alone.
        """
        if self._follows and not self.fleet.replicas:
            raise NoReplica("no worker has answered this router yet, so which base models there are is not known")

    def no_catalog(self) -> CatalogUnavailable:
        """What a request is told before `has_catalog`; without an orchestrator it is the workers that are to answer."""
        return CatalogUnavailable(NO_CATALOG if self._url else NOBODY_HEARD, retry_after_s=2.0)

    def _has_asked_all(self) -> bool:
        return all(f.metadata is not None or f.heard_at for f in self._follows.values())

    def look_now(self, worker: str | None = None) -> None:
        """Ask the orchestrator and this worker's agent (None: every agent) again at once."""
        self._catalog_poke.set()
        for id_, follow in self._follows.items():
            if worker in (None, id_):
                follow.poke.set()

    def catalog_age_s(self) -> float | None:
        """Seconds since the orchestrator last confirmed the catalog in force; None before the first time."""
        return None if self.confirmed_at is None else self._clock() - self.confirmed_at

    def report_age_s(self, worker: WorkerId) -> float | None:
        """Seconds since a worker's agent last reported; None: it has not, or nobody follows it."""
        follow = self._follows.get(worker)
        return None if follow is None or follow.metadata is None else self._clock() - follow.heard_at

    async def _look(self) -> None:
        self._look_began_at = began_at = self._clock()
        try:
            await self._read()
        except BaseException:
            self._is_orchestrator_away = True
            raise
        else:
            self._is_orchestrator_away, self._looked_at = False, began_at
        finally:
            self.changes.notify()

    async def _read(self) -> None:
        headers = {"if-none-match": self._etag} if self._etag else {}
        answer = await self._client.get(f"{self._url}/v1/catalog", headers=headers)
        if answer.status_code != 304:
            answer.raise_for_status()
            self._adopt(Catalog.model_validate_json(answer.content))
            self._etag = answer.headers.get("etag")
            if self._state_file is not None:
                save_catalog(self._state_file, answer.content)
        self.confirmed_at = self._clock()

    async def _listen_orchestrator(self) -> None:
        await self._listen(self._url, f"/v1/events?since={self._catalog.revision}", self._catalog_poke)

    async def _listen(self, url: str, path: str, poke: asyncio.Event) -> None:
        """Poke at every message of an SSE stream; the stream is only a hint, polling finds whatever it misses."""
        async with self._listen_to(url, path) as told:
            if told.status == 410:
                poke.set()
                return
            if told.status != 200:
                raise FetchRefused(f"GET {url}{path}: {told.status}")
            async for data in told:
                if b"data:" in data:  # and no sign of life
                    poke.set()

    def _adopt(self, catalog: Catalog) -> None:
        # Without what is read of it here and now: with 10,000 adapters that would be 10 MB.
        self._catalog = catalog.model_copy(update={"adapters": (), "aliases": (), "draining": ()})
        self._catalog_ids = frozenset(worker.id for worker in catalog.workers)
        self._adapters, self._aliases = named_by(catalog)
        self._taken = frozenset([adapter.lora_id for adapter in catalog.adapters]) | self._aliases.keys()
        self._list_anew()
        before, self._draining = self._draining, draining_by_worker(catalog)
        self.has_catalog = True
        self._name()
        self._rebuild()
        if any(names - before.get(worker_id, frozenset()) for worker_id, names in self._draining.items()):
            self.drains_begun.set()

    def _take_slices(self) -> None:
        assert self.slices is not None
        now = self.slices.workers
        # What they no longer name may be ending, or only have lost a label: what they said last is still the best word.
        followed = self._follows.keys() | {follow.url for follow in self._follows.values()}
        gone = {
            id_: worker
            for id_, worker in self._found.items()
            if id_ not in now and not followed.isdisjoint((id_, worker.agent_url, worker.engine_url))
        }
        self._found = MappingProxyType({**gone, **now})
        there = {(worker.id, worker.agent_url or "") for worker in self._found.values()}
        self._called = {key: name for key, name in self._called.items() if key in there}
        self._name()
        self._rebuild()

    def _name(self) -> None:
        """Follow whoever is named by anybody.

        Absence is no reason to let a worker go: an orchestrator that just started has heard from nobody yet, and an API
        server may have lost a label or everything. One that nobody names is followed for as long as it answers.
        """
        workers = named_workers(self._catalog.workers, self._found, self._engines, self._called)
        named = workers.keys()
        now = self._found if self.slices is None else self.slices.workers
        if len(now) < len(self._found):
            named = named_workers(self._catalog.workers, now, self._engines, self._called).keys()
        for id_, follow in self._follows.items():
            follow.is_named = id_ in named
        for id_, worker in workers.items():
            known = self._follows.get(id_)
            if known is not None:
                known.named = worker
                if not self._has_moved(known):
                    continue
                if id_ not in named:
                    self._unfollow(id_)
            if id_ in named:
                self._follow(worker)

    def _has_moved(self, follow: FollowedWorker) -> bool:
        """Whether to follow it elsewhere. One that answers stays: an address that nobody names may still be its own."""
        if follow.named.has_agent and follow.plain is not None:
            return True
        return follow.url not in follow.named.addresses and not follow.is_answering

    def _follow(self, worker: WorkerSource) -> None:
        """Follow it; one that was followed at another address is the same worker, and what runs there runs on."""
        if worker.id in self._follows:
            self._leave(worker.id)
        follow = FollowedWorker(worker, worker.addresses[0], asyncio.Event())
        if not worker.has_agent:
            follow.plain = AgentlessEngine(
                worker.id,
                follow.url,
                partial(self._ask_engine, follow.url, token=self._engine_key),
                kv_events=worker.kv_events,
                kv_replay=worker.kv_replay,
                salt=self._engine_salt,
                clock=self._clock,
            )
        self._follows[worker.id] = follow

        async def look() -> None:
            await self._hear(follow)

        async def listen() -> None:
            await self._listen(follow.url, "/v1/events", follow.poke)

        loops = [self._forever(look, "metadata", self._metadata_poll_s, follow.poke, worker=worker.id)]
        if follow.plain is None:
            loops.append(self._forever(listen, "agent_events", self._metadata_poll_s, worker=worker.id))
        follow.tasks = tuple(asyncio.create_task(loop) for loop in loops)

    def _unfollow(self, id_: str) -> None:
        self._leave(id_)
        self._listener.gone(WorkerId(id_))

    def _leave(self, id_: str) -> None:
        for task in self._follows.pop(id_).tasks:
            task.cancel()
        self._list_anew()

    async def _hear(self, follow: FollowedWorker) -> None:
        asked_at = self._clock()
        try:
            metadata = await self._report(follow)
        except Exception:  # of any kind: one odd answer must not keep all of us waiting for its first good one
            await self._is_silent(follow)
            raise
        if self._follows.get(follow.named.id) is not follow:
            return
        if metadata.instance_id != follow.named.id:
            self._rename(follow, metadata.instance_id)
            return
        before, follow.metadata = follow.metadata, placed(metadata, follow.named)
        _tell_refusal(before, metadata)
        follow.asked_at, follow.heard_at = asked_at, self._clock()
        follow.is_answering, follow.engine_answers = True, True
        if follow.plain is not None and (before is None or before.lora != metadata.lora):
            self._list_anew()
        replica = self._replica(follow, follow.metadata)
        known = self.fleet.replicas.get(replica.id)
        if known is not None and replace(known, report=replica.report) == replica:
            self._rebuild_soon()
        else:
            self._rebuild()
        self._listener.heard(replica, follow.metadata)

    async def _is_silent(self, follow: FollowedWorker) -> None:
        """No report: it restarts, is gone, or is somewhere else by now."""
        follow.heard_at, follow.is_answering = follow.heard_at or self._clock(), False
        is_late = self._clock() - follow.heard_at > self._unreachable_after_s
        if is_late:
            follow.engine_answers = await self._engine_answers(follow)
        id_, addresses = follow.named.id, follow.named.addresses
        if self._follows.get(id_) is not follow:
            return
        if is_late and not follow.is_named and not follow.engine_answers:
            self._unfollow(id_)
        elif self._has_moved(follow):
            self._follow(follow.named)
        elif follow.plain is None and len(addresses) > 1:
            follow.url = addresses[(addresses.index(follow.url) + 1) % len(addresses)]
        if is_late and follow.engine_answers:
            self._listener.unheard(WorkerId(id_))
        self._rebuild()

    async def _report(self, follow: FollowedWorker) -> Metadata:
        if follow.plain is not None:
            return await follow.plain.report()
        metadata = Metadata.model_validate_json(await self._ask(follow.url, "/metadata"))
        id_ = follow.named.id
        if metadata.instance_id != id_ and id_ in self._catalog_ids:  # somebody else has its address now
            raise FetchRefused(f"{follow.url} is worker {metadata.instance_id!r} by now, not {id_!r}")
        return metadata

    def _rename(self, follow: FollowedWorker, name: str) -> None:
        """Found in slices by another name than its own: from now on it goes by its own."""
        log.info("worker goes by its own name", found=follow.named.id, worker=name, agent_url=follow.url)
        self._called[follow.named.id, follow.url] = name
        self._unfollow(follow.named.id)
        self._name()
        self._rebuild()

    def _list_anew(self) -> None:
        """Join the catalog's adapters with what engines without an agent list, and listed when they were last heard."""
        plain = [f.metadata for f in self._follows.values() if f.plain is not None and f.metadata is not None]
        listed = listed_adapters(plain, self._taken) if plain else {}
        self._known = MappingProxyType({**self._adapters, **listed}) if listed else self._adapters

    async def _engine_answers(self, follow: FollowedWorker) -> bool:
        """An agent's restart or upgrade moves nothing: while its engine answers, the last report stays valid."""
        if follow.metadata is None:
            return False
        try:
            await self._ask_engine(follow.metadata.transport.engine_url, "/health")
        except (EngineLost, FetchRefused, ValueError):
            return False
        return True

    def _rebuild_soon(self) -> None:
        if self._rebuild_later is None:
            self._rebuild_later = asyncio.get_running_loop().call_later(_FIGURES_WAIT_S, self._rebuild)

    def _call_rebuild_off(self) -> None:
        """Nothing is to go into a later snapshot: this one has it all, or there is none."""
        if self._rebuild_later is not None:
            self._rebuild_later.cancel()
            self._rebuild_later = None

    def _rebuild(self) -> None:
        self._call_rebuild_off()
        replicas = {
            WorkerId(id_): self._replica(follow, follow.metadata)
            for id_, follow in self._follows.items()
            if follow.metadata is not None
        }
        replicas = with_last_resort(replicas)
        self.fleet = RouterFleet(self._catalog.revision, MappingProxyType(replicas), self._known, self._aliases)
        if not self._url and replicas and self._has_asked_all():
            self.has_catalog = True  # all that there is to know
        self.changes.notify()

    def _replica(self, follow: FollowedWorker, metadata: Metadata) -> Replica:
        is_silent = self._clock() - follow.heard_at > self._unreachable_after_s
        state = state_of(follow, metadata, is_silent=is_silent)
        is_ending, draining = follow.named.is_ending, self._draining.get(follow.named.id, frozenset())
        # One agent's report makes one replica anew, not all of them: a fleet reports many times a second.
        made = follow.made_from
        if (
            follow.replica is None
            or made is None
            or made[0] is not metadata
            or made[1:] != (state, is_ending, draining)
        ):
            follow.replica = replica_from(follow, metadata, state=state, draining=draining, zone=self._zone)
            follow.made_from = metadata, state, is_ending, draining
        return follow.replica

    def _read_saved(self) -> None:
        saved = None if self._state_file is None else read_catalog(self._state_file)
        if saved is not None:
            self._adopt(saved)

    async def _forever(
        self,
        step: Callable[[], Awaitable[object]],
        name: str,
        every_s: float,
        poke: asyncio.Event | None = None,
        **about: str,
    ) -> None:
        await forever(
            step, name=name, every_s=every_s, poke=poke, on_failure=lambda: self._on_failure(name), about=about
        )


def _tell_refusal(before: Metadata | None, now: Metadata) -> None:
    if now.lora.refusal and (before is None or before.lora.refusal != now.lora.refusal):
        log.warning("engine takes no adapters", worker=now.instance_id, reason=now.lora.refusal)
