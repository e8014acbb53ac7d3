"""Follows the workers in EndpointSlices of one or several namespaces."""

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
from lorafleet.kube.watch import TIMES, WatchTimes, list_and_watch

log = structlog.get_logger()

# Changes within this time are reported as one: a flapping fleet of 1,000 causes 30 rounds a second, not thousands.
_BATCH_S = 0.03
_RECONNECT_S = 5.0


class SliceWatch:
    """Owns `workers`: replaced whole, and kept while the API server is unreachable."""

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
        """
        connect     opens a client; may raise KubeConfigError, and is then tried again
        selector    labels of the Services, which their slices have, too
        namespaces  empty for our own namespace
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
        self._table = SliceTable()
        self._unlisted: set[str] | None = None
        self._confirmed: dict[str, float] = {}
        self._publish_timer: asyncio.TimerHandle | None = None

    @property
    def is_synced(self) -> bool:
        """Whether every namespace has been listed once."""
        return self._unlisted is not None and not self._unlisted

    def age_s(self) -> float | None:
        """Seconds since the API server last confirmed the least recently confirmed namespace; None until synced."""
        return self._clock() - min(self._confirmed.values()) if self.is_synced else None

    async def run(self, on_change: Callable[[], object]) -> None:
        """Connect and follow until cancelled; replaces `workers` and calls `on_change` after each batch of changes."""
        self._on_change = on_change
        async with AsyncExitStack() as stack:
            kube = await self._connect_until_done(stack)
            namespaces = self._namespaces or (kube.namespace,)
            self._unlisted = set(namespaces)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for namespace in namespaces:
                        tasks.create_task(self._follow(kube, namespace))
            finally:
                if self._publish_timer is not None:
                    self._publish_timer.cancel()

    async def _connect_until_done(self, stack: AsyncExitStack) -> KubeClient:
        """Connect, trying again every 5 s while no API server is configured; each failure calls `on_failure`.

        A new error is logged.
        """
        last_error = ""
        while True:
            try:
                return await stack.enter_async_context(self._connect())
            except KubeConfigError as exc:
                self._on_failure(exc)
                if str(exc) != last_error:
                    last_error = str(exc)
                    log.warning("API server not configured", error=last_error, again_in_s=_RECONNECT_S)
                await asyncio.sleep(_RECONNECT_S)

    async def _follow(self, kube: KubeClient, namespace: str) -> None:
        """List and watch one namespace's EndpointSlices until cancelled; publish each change of `workers`."""

        def on_list(slices: list[Json]) -> None:
            """Replace the namespace's slices and publish."""
            self._table.replace(namespace, slices)
            assert self._unlisted is not None
            self._unlisted.discard(namespace)
            self._publish()  # at once: a starting service waits for it

        def on_event(kind: str, slice_: Json) -> None:
            """Put or remove a slice, and publish within 30 ms."""
            (self._table.remove if kind == "DELETED" else self._table.put)(slice_)
            if self._publish_timer is None:
                self._publish_timer = asyncio.get_running_loop().call_later(_BATCH_S, self._publish)

        await list_and_watch(
            kube,
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            label_selector=self._selector,
            on_list=on_list,
            on_event=on_event,
            on_failure=self._on_failure,
            on_answer=lambda: self._confirmed.update({namespace: self._clock()}),
            times=self.times,
            clock=self._clock,
            rng=self._rng,
        )

    def _publish(self) -> None:
        """Replace `workers` by the table's current workers and call `on_change`; ends a publish timer.

        Logs those gone.
        """
        if self._publish_timer is not None:
            self._publish_timer.cancel()
            self._publish_timer = None
        workers = self._table.workers()
        before, self.workers = self.workers, MappingProxyType(workers)
        if missing := sorted(before.keys() - workers.keys()):
            log.info("workers no longer named by slices", count=len(missing), workers=missing[:10], left=len(workers))
        self._on_change()
