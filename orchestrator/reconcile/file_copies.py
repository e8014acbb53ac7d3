"""Files by digest in the fleet: the copies that are kept, and the relay of their bytes."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from urllib.parse import quote

import httpx
import structlog
from pydantic import ValidationError

from lorafleet.keys.own_key import OwnKey
from orchestrator.agentless.transport import agent_url_of
from orchestrator.core.copies import CopyFacts, CopyPlan, CopyState, MarkStep, WorkerDisk, plan_copies
from orchestrator.core.errors import (
    InvalidAdapter,
    LeaseLost,
    NotFound,
    OrchestratorRequestError,
    OrchestratorUnavailable,
    WorkerFailed,
)
from orchestrator.core.failures import LONGEST_S, FailureBook
from orchestrator.core.plan import WorkerAction
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.agent_view import HeldFilesBook, ReportedDisk
from orchestrator.reconcile.context import PassContext
from orchestrator.reconcile.heartbeats import HeartbeatMonitor
from orchestrator.reconcile.worker_reports import KnownWorker, WorkerReports, worker_state
from workers.wire import AdapterFiles, MarkFilesRequest

log = structlog.get_logger()

_ABSENT_S = 10.0
"""A worker silent for less still counts with its copies: agents restart in that time. A guess."""
_STREAMS = 16
"""Files relayed at the same time. Each costs the event loop about a tenth of a core at 100 MB/s; a guess."""
_BUSY_RETRY_S = 2.0
_PROBES = 16
_RELAYED = ("range", "if-range")
_HTTP_OK = frozenset({200, 206, 416})
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


class FileCopies:
    """Keeps `fleet_copies` copies of the files that only the fleet has.

    states   digest -> state, of those that are not simply kept
    """

    def __init__(self, context: PassContext, monitor: HeartbeatMonitor) -> None:
        self._context = context
        self._monitor = monitor
        self._failures = FailureBook()
        self._arriving: Counter[str] = Counter()
        self._releasing: set[str] = set()
        self._dropping: set[tuple[str, str]] = set()
        self.states: Mapping[str, CopyState] = {}

    # --- a pass --------------------------------------------------------------------------------------------------

    def run(self, actions: Sequence[WorkerAction]) -> list[WorkerAction]:
        """Decide, and start what is to be done, each call in a task of its own; returns the pass's actions.

        Where one of them loads an adapter whose files are to be kept there, the load keeps them.
        """
        now = self._context.clock()
        self._failures.drop_expired(now)
        needs = self._needs()
        plan = self._plan(needs, now)
        for digest, state in plan.states.items():
            before = self.states.get(digest)
            if state.status == "lost" and (before is None or before.status != "lost"):
                log.error("the files of an adapter are lost", digest=digest, reason=state.reason)
        self.states = plan.states
        adapters = self._context.store.adapters
        kept = {(keep.digests[0], keep.worker_id): keep for keep in plan.keeps}
        self._context.operations.copying |= kept.keys()
        actions = [replace(action, keeps_files=_loaded_files(action, adapters) in kept) for action in actions]
        with_loads = {_loaded_files(action, adapters) for action in actions}
        for pair, keep in kept.items():
            if pair not in with_loads:
                self._context.tasks.spawn(self._keep(keep))
        for release in plan.releases:
            if release.worker_id not in self._releasing:
                self._releasing.add(release.worker_id)
                self._context.tasks.spawn(self._release(release))
        self._context.metrics.set_copies(len(needs), Counter(state.status for state in plan.states.values()))
        return actions

    def lost(self) -> dict[str, str]:
        """lora_id -> reason, of registered adapters whose files are lost."""
        lost = {digest: state.reason for digest, state in self.states.items() if state.status == "lost"}
        if not lost:
            return {}
        by_files = self._context.store.intent.index.by_files
        return {
            lora_id: f"files_lost: {reason}"
            for digest, reason in lost.items()
            for lora_id in sorted(by_files.get(digest, ()))
        }

    def state(self, digest: str) -> CopyState:
        """How the files of a digest are kept."""
        return self.states.get(digest) or CopyState(status="kept", kept_by=self.kept_by(digest))

    def kept_by(self, digest: str) -> tuple[str, ...]:
        """Workers that keep the files of a digest, by their reports."""
        return tuple(sorted(self._context.files.keepers.get(digest, ())))

    async def wait_kept(self, digest: str, copies: int, *, timeout_s: float) -> tuple[str, ...]:
        """Wait until so many workers keep the files of a digest; returns those that do when that is so, or time is up.

        The adapter must be registered with the fleet's own source, or the copies be made by the caller.
        """
        self._context.request_pass()
        await self._context.files.changed.until(lambda: len(self.kept_by(digest)) >= copies, timeout_s=timeout_s)
        return self.kept_by(digest)

    def clear(self) -> None:
        """Forget failures, calls under way and states at the end of a term; the next leader reports the copies."""
        self._failures.clear()
        self._context.operations.copying.clear()
        self._releasing.clear()
        self._dropping.clear()
        self.states = {}
        self._context.metrics.set_copies(0, {})

    @contextmanager
    def arriving(self, digest: str) -> Iterator[None]:
        """Release no copy of a digest during the block: it is about to be registered, perhaps after a deletion."""
        self._arriving[digest] += 1
        try:
            yield
        finally:
            self._arriving[digest] -= 1
            if not self._arriving[digest]:
                del self._arriving[digest]

    def _needs(self) -> dict[str, str]:
        """digest -> base model, of registered adapters whose files only the fleet has."""
        adapters, by_files = self._context.store.adapters, self._context.store.intent.index.by_files
        return {digest: adapters[max(same)].base_model or "" for digest, same in by_files.items()}

    def _plan(self, needs: Mapping[str, str], now: float) -> CopyPlan:
        """The steps of this pass."""
        strays = self._context.files.holders.keys() - needs.keys()
        deleted = self._context.store.dropped_digests() - self._arriving.keys() if strays else frozenset[str]()
        self._dropping = {pair for pair in self._dropping if pair[0] in deleted}
        disks = [
            self._disk(entry, self._context.files.disks[worker_id], now)
            for worker_id, entry in self._context.reports.workers.items()
            if worker_id in self._context.files.disks and agent_url_of(entry.report)
        ]
        facts = CopyFacts(
            needs=needs,
            disks=disks,
            keepers=self._context.files.keepers,
            copies=self._context.settings.fleet_copies,
            under_way=self._context.operations.copying,
            blocked=self._failures.by_pair.keys(),
            deleted=deleted,
            dropping=self._dropping,
        )
        return plan_copies(facts)

    def _disk(self, entry: KnownWorker, disk: ReportedDisk, now: float) -> WorkerDisk:
        """A worker's disk as the decision sees it."""
        report = entry.report
        intent = self._context.store.workers.get(report.instance_id)
        is_going = entry.is_terminating or (intent is not None and intent.state == "draining")
        is_heard = entry.reach == "heard"
        takes_copies = is_heard and not is_going and worker_state(entry, intent) in ("ready", "cordoned", "starting")
        return WorkerDisk(
            worker_id=report.instance_id,
            disk_id=disk.disk_id,
            base_model=report.model.base_model,
            zone=report.zone,
            node=report.node,
            files=disk.files,
            is_whole=disk.is_whole,
            is_safe=not is_going and (is_heard or now - entry.heard_at < _ABSENT_S),
            is_reachable=is_heard,
            takes_copies=takes_copies,
        )

    # --- calls to agents -----------------------------------------------------------------------------------------

    async def keep_on(self, worker_id: str, digest: str, neighbours: Sequence[str], *, timeout_s: float) -> None:
        """Have a worker keep the files of a digest, fetched from these workers if needed, and record that it does.

        Raises InvalidAdapter, WorkerFailed, LeaseLost.
        """
        step = MarkStep(worker_id=worker_id, digests=(digest,), mark="kept", neighbours=tuple(neighbours))
        await self._mark(step, timeout_s)

    async def _keep(self, step: MarkStep) -> None:
        """Have a worker keep the files of a digest; record the result and request a pass.

        A stale epoch ends our term.
        """
        pair = step.digests[0], step.worker_id
        try:
            await self._monitor.claim_worker(step.worker_id)
            await self._mark(step, self._context.settings.load_timeout_s)
        except LeaseLost as exc:
            self._context.leadership.on_newer_leader(str(exc))
        except (InvalidAdapter, WorkerFailed) as exc:
            log.warning("copy not made", digest=pair[0], worker_id=step.worker_id, error=str(exc))
            expiry_s = self._context.store.rules.failure_expiry_s
            self._failures.record_failure(
                pair,
                exc.code,
                str(exc),
                first_s=expiry_s,
                most_s=LONGEST_S,
                now=self._context.clock(),
                rng=self._context.rng,
            )
        else:
            self._failures.record_success(pair)
            log.info("copy kept", digest=pair[0], worker_id=step.worker_id)
        finally:
            self._context.operations.copying.discard(pair)
            self._context.request_pass()

    async def _release(self, step: MarkStep) -> None:
        """Let a worker delete files again; a failure is logged, and the next pass tries again."""
        try:
            await self._monitor.claim_worker(step.worker_id)
            await self._mark(step, self._context.settings.unload_timeout_s)
        except LeaseLost as exc:
            self._context.leadership.on_newer_leader(str(exc))
        except (InvalidAdapter, WorkerFailed) as exc:
            log.warning("copies not released", worker_id=step.worker_id, error=str(exc))
        else:
            if step.mark == "gone":
                self._dropping |= {(digest, step.worker_id) for digest in step.digests}
        finally:
            self._releasing.discard(step.worker_id)

    async def _mark(self, step: MarkStep, timeout_s: float) -> None:
        """Have a worker mark files, and record the answer. Raises InvalidAdapter, WorkerFailed, LeaseLost."""
        urls = tuple(filter(None, map(self._agent_url, step.neighbours)))
        ask = MarkFilesRequest(mark=step.mark, digests=step.digests, neighbours=urls)
        at = await self._context.agents.mark_files(self._agent_url(step.worker_id), ask, timeout_s=timeout_s)
        self._context.files.note_mark(step.worker_id, step.digests, step.mark, at)

    def _agent_url(self, worker_id: str) -> str:
        """URL of a worker's agent; "" without one."""
        entry = self._context.reports.workers.get(worker_id)
        return "" if entry is None else agent_url_of(entry.report)


@dataclass(slots=True)
class RelayedFile:
    """An open answer to pass on. It must be closed, also when nobody has read it: it holds one of our streams.

    on_close  called once, when it is closed
    """

    answer: httpx.Response
    on_close: Callable[[], None]
    is_closed: bool = False

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.answer.status_code

    @property
    def headers(self) -> dict[str, str]:
        """The headers about the content."""
        kept = ("content-type", "content-length", "content-range", "accept-ranges", "etag")
        return {key: self.answer.headers[key] for key in kept if key in self.answer.headers}

    def body(self) -> AsyncIterator[bytes]:
        """The bytes as they come. Raises httpx.HTTPError when the place that sends them breaks off."""
        return self.answer.aiter_raw()

    async def close(self) -> None:
        """Close the connection and free the stream; safe to call twice."""
        if not self.is_closed:
            self.is_closed = True
            self.on_close()
            await self.answer.aclose()


class FileRelay:
    """Finds a digest's files and streams them; nothing is stored here."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        reports: WorkerReports,
        files: HeldFilesBook,
        *,
        agents: AgentClient,
        peers: Sequence[str],
        peer_key: OwnKey,
        probe_timeout_s: float,
        read_timeout_s: float = 30.0,
    ) -> None:
        """
        agents    prove addresses, and have our key for them
        peers     URLs of other fleets' orchestrators that files may come from
        peer_key  key for them
        """
        self._client = client
        self._reports = reports
        self._files = files
        self._agents = agents
        self.peers = tuple(url.rstrip("/") for url in peers)
        self._peer_key = peer_key
        self._probe_timeout_s = probe_timeout_s
        self._timeout = httpx.Timeout(read_timeout_s, connect=probe_timeout_s)
        self._streams = asyncio.Semaphore(_STREAMS)

    def require_peer(self, fleet: str) -> None:
        """Raise OrchestratorRequestError 400 `fleet_unknown` unless `peer_fleets` names this URL."""
        if fleet.rstrip("/") not in self.peers:
            known = ", ".join(self.peers) or "none"
            raise OrchestratorRequestError(
                f"fleet {fleet[:200]!r} is not one that files may come from; peer_fleets names {known}",
                code="fleet_unknown",
                param="fleet",
            )

    async def file_names(self, digest: str) -> tuple[str, ...]:
        """Names of a digest's files, by a worker that has them.

        Raises as `open_file`, WorkerFailed for a list that is none or has other than plain names, httpx.HTTPError.
        """
        async with self.reading(digest, "") as chunks:
            body = b"".join([chunk async for chunk in chunks])
        try:
            names = tuple(file.name for file in AdapterFiles.model_validate_json(body).files)
        except ValidationError as exc:
            raise WorkerFailed(f"a worker sends no list of the files of digest {digest}") from exc
        if not all(_PLAIN_NAME.fullmatch(name) for name in names):
            raise WorkerFailed(f"a worker's list of the files of digest {digest} has names that are no adapter's files")
        return names

    @asynccontextmanager
    async def reading(self, digest: str, name: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of the list of a digest's files (`name` ""), or of one of them, from a worker here.

        Raises as `open_file`; the bytes raise httpx.HTTPError when the worker breaks off.
        """
        file = await self.open_file(digest, name, "", {})
        try:
            yield file.body()
        finally:
            await file.close()

    async def open_file(self, digest: str, name: str, fleet: str, headers: Mapping[str, str]) -> RelayedFile:
        """The list of a digest's files (`name` ""), or one of them, from the first place that has it.

        fleet    URL of the other fleet's orchestrator that is asked when no worker here has it; "" for none
        headers  of the request: ranges are passed on
        raises   NotFound `files_not_found`, OrchestratorRequestError `fleet_unknown`, OrchestratorUnavailable when too
                 many files are relayed now or no place could be asked
        """
        if fleet:
            self.require_peer(fleet)
        if self._streams.locked():
            raise OrchestratorUnavailable(
                f"{_STREAMS} files are being relayed already; ask again", code="files_busy", retry_after_s=_BUSY_RETRY_S
            )
        await self._streams.acquire()
        try:
            answer = await self._open_any(digest, name, fleet, {k: headers[k] for k in _RELAYED if k in headers})
        except BaseException:
            self._streams.release()
            raise
        return RelayedFile(answer, self._streams.release)

    async def _open_any(self, digest: str, name: str, fleet: str, headers: Mapping[str, str]) -> httpx.Response:
        """The open answer of the first worker that has the file, else of the other fleet. Raises as `open_file`."""
        path = f"/v1/files/{digest}" + (f"/{quote(name, safe='')}" if name else "")
        reported, others = self._holders_first(digest)
        is_silent = False
        for url in reported:
            answer = await self._try_agent(url, path, headers)
            if answer is not None and answer.status_code in _HTTP_OK:
                return answer
            is_silent |= answer is None
        async for url in self._with_files(others, digest):
            answer = await self._try_agent(url, path, headers)
            if answer is not None and answer.status_code in _HTTP_OK:
                return answer
        if fleet:
            answer = await self._try(fleet.rstrip("/") + path, {**headers, **self._peer_key.headers})
            if answer is not None and answer.status_code in _HTTP_OK:
                return answer
            raise self._peer_error(fleet, answer)
        if is_silent:
            raise OrchestratorUnavailable("the workers that have the files do not answer", code="worker_unreachable")
        raise NotFound(f"no worker has the files of digest {digest} on its disk", code="files_not_found")

    @staticmethod
    def _peer_error(fleet: str, answer: httpx.Response | None) -> Exception:
        """The error for a fleet that does not answer (None) or refuses."""
        if answer is None:
            return OrchestratorUnavailable(f"fleet {fleet} does not answer", code="fleet_unreachable")
        if answer.status_code in (401, 403):
            message = f"fleet {fleet} refuses our key (HTTP {answer.status_code}): peer_token_file needs scope `export`"
            return OrchestratorRequestError(message, code="fleet_refused")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return NotFound(f"fleet {fleet} has the files on no worker's disk", code="files_not_found")
        return OrchestratorUnavailable(f"fleet {fleet} answers HTTP {answer.status_code}", code="fleet_unreachable")

    def _holders_first(self, digest: str) -> tuple[list[str], list[str]]:
        """Agent URLs of workers that have reported the digest, and those of all others that can be asked."""
        holders = self._files.holders.get(digest, ())
        urls: tuple[list[str], list[str]] = [], []
        for worker_id, entry in self._reports.workers.items():
            if entry.reach == "heard" and (url := agent_url_of(entry.report)):
                urls[worker_id not in holders].append(url.rstrip("/"))
        return urls

    async def _with_files(self, urls: Iterable[str], digest: str) -> AsyncIterator[str]:
        """Those of the agents that have the digest, as they answer. One may not have reported all that it has yet."""
        limit = asyncio.Semaphore(_PROBES)

        async def probe(url: str) -> str | None:
            """The URL if its agent has the files."""
            async with limit:
                try:
                    headers = await self._agents.key_headers(url)
                    answer = await self._client.get(
                        f"{url}/v1/files/{digest}", headers=headers, timeout=self._probe_timeout_s
                    )
                except (httpx.HTTPError, httpx.InvalidURL, WorkerFailed):
                    return None
                return url if answer.is_success else None

        probes = [asyncio.create_task(probe(url)) for url in urls]
        try:
            for done in asyncio.as_completed(probes):
                if (url := await done) is not None:
                    yield url
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _try_agent(self, agent_url: str, path: str, headers: Mapping[str, str]) -> httpx.Response | None:
        """The open answer of an agent that has proved its address; None if there is none."""
        try:
            key = await self._agents.key_headers(agent_url)
        except WorkerFailed:
            return None
        return await self._try(agent_url + path, {**headers, **key})

    async def _try(self, url: str, headers: Mapping[str, str]) -> httpx.Response | None:
        """The open answer to a GET; None if there is none. An error answer is closed."""
        request = self._client.build_request(
            "GET", url, headers={"accept-encoding": "identity", **headers}, timeout=self._timeout
        )
        try:
            answer = await self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
        if answer.status_code not in _HTTP_OK:
            await answer.aclose()
        return answer


def _loaded_files(action: WorkerAction, adapters: Mapping[str, RegisteredAdapter]) -> tuple[str, str] | None:
    """(digest, worker_id) of a load; None for another action."""
    adapter = adapters.get(action.lora_id)
    if action.operation != "load" or adapter is None or adapter.digest is None:
        return None
    return adapter.digest, action.worker_id
