"""The workers that EndpointSlices name, followed in one or several namespaces."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import MappingProxyType

import structlog

from lorafleet.kube.client import Json, KubeClient
from lorafleet.kube.errors import KubeConfigError
from lorafleet.kube.slices import DiscoveredWorker, SliceTable
from lorafleet.kube.watch import TIMES, WatchTimes, follow

log = structlog.get_logger()

# Changes that come within this are told as one: a fleet of 1,000 that flaps costs 30 rounds a second, not thousands.
_GATHER_S = 0.03
_CONNECT_AGAIN_S = 5.0


class SliceWatch:
    """Owns `workers`: swapped whole, and kept as last known while the API server is away."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[KubeClient]],
        *,
        selector: str,
        namespaces: Sequence[str],
        on_failure: Callable[[Exception], object] = lambda _: None,
        times: WatchTimes = TIMES,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """connect     gives a client to use; may raise KubeConfigError, and is tried again
        selector    labels of the Services, which their slices have too
        namespaces  empty for our own
        """
        self.workers: Mapping[str, DiscoveredWorker] = MappingProxyType({})
        self.confirmed_at: float | None = None
        self._connect = connect
        self._selector = selector
        self._namespaces = tuple(namespaces)
        self._on_change: Callable[[], object] = lambda: None
        self._on_failure = on_failure
        self.times = times
        self._clock = clock
        self._rng = rng
        self._book = SliceTable()
        self._unlisted: set[str] | None = None
        self._confirmed: dict[str, float] = {}
        self._due: asyncio.TimerHandle | None = None

    @property
    def is_synced(self) -> bool:
        """Whether every namespace has been listed once."""
        return self._unlisted is not None and not self._unlisted

    def age_s(self) -> float | None:
        """Seconds since the API server last confirmed the namespace it has been silent about for longest."""
        return self._clock() - min(self._confirmed.values()) if self.is_synced else None

    async def run(self, on_change: Callable[[], object]) -> None:
        """Follow until cancelled; `on_change` after every swap of `workers`."""
        self._on_change = on_change
        async with AsyncExitStack() as stack:
            kube = await self._connected(stack)
            namespaces = self._namespaces or (kube.namespace,)
            self._unlisted = set(namespaces)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for namespace in namespaces:
                        tasks.create_task(self._follow(kube, namespace))
            finally:
                if self._due is not None:
                    self._due.cancel()

    async def _connected(self, stack: AsyncExitStack) -> KubeClient:
        said = ""
        while True:
            try:
                return await stack.enter_async_context(self._connect())
            except KubeConfigError as exc:
                self._on_failure(exc)
                if str(exc) != said:
                    said = str(exc)
                    log.warning("API server not configured", error=said, again_in_s=_CONNECT_AGAIN_S)
                await asyncio.sleep(_CONNECT_AGAIN_S)

    async def _follow(self, kube: KubeClient, namespace: str) -> None:
        def listed(slices: list[Json]) -> None:
            self._book.replace(namespace, slices)
            assert self._unlisted is not None
            self._unlisted.discard(namespace)
            self._tell()  # at once: whoever starts waits for it

        def changed(kind: str, slice_: Json) -> None:
            (self._book.remove if kind == "DELETED" else self._book.put)(slice_)
            if self._due is None:
                self._due = asyncio.get_running_loop().call_later(_GATHER_S, self._tell)

        await follow(
            kube,
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            label_selector=self._selector,
            on_list=listed,
            on_event=changed,
            on_failure=self._on_failure,
            on_answer=lambda: self._confirmed.update({namespace: self._clock()}),
            times=self.times,
            clock=self._clock,
            rng=self._rng,
        )

    def _tell(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        workers = self._book.workers()
        before, self.workers = self.workers, MappingProxyType(workers)
        if gone := sorted(before.keys() - workers.keys()):
            log.info("workers no longer named by slices", count=len(gone), workers=gone[:10], left=len(workers))
        self._on_change()
