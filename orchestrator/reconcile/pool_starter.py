"""Pools at zero: while routers hold requests for one, its workload is scaled to one worker.

Further workers, and the way back to zero, are an autoscaler's.
"""

from collections.abc import Mapping

import structlog

from lorafleet.engine.settings import PoolFromZero
from lorafleet.kube.client import KubeClient
from lorafleet.kube.errors import KubeConflict, KubeError
from lorafleet.service.loops import forever
from orchestrator.reconcile.context import PassContext

log = structlog.get_logger()


class PoolStarter:
    """Scales pools from zero to one worker. Each number that is not 0 is left as it is."""

    def __init__(self, context: PassContext, kube: KubeClient, *, namespace: str) -> None:
        self._context = context
        self._kube = kube
        self._namespace = namespace
        self._pools: Mapping[str, PoolFromZero] = {
            name: pool for name, pool in context.settings.scale_from_zero.items() if pool.workload
        }

    async def run(self) -> None:
        """Look after each report of held requests, and again while there are some, until cancelled."""
        every_s = self._context.settings.pass_interval_s
        await forever(self.start_awaited, name="scale_from_zero", every_s=every_s, poke=self._context.held_due)

    async def start_awaited(self) -> None:
        """Scale each pool at zero for whose base model requests are held. Raises the last KubeError, after all pools.

        Does nothing unless we lead.
        """
        if not self._context.leadership.is_leading:
            return
        held = self._context.demand.routers.held_from_zero(self._context.clock())
        error: KubeError | None = None
        for name, pool in self._pools.items():
            if held.get(pool.base_model):
                try:
                    await self._start(name, pool, held[pool.base_model])
                except KubeConflict:
                    continue  # another client has just scaled it, or changed it: the next round looks again
                except KubeError as exc:
                    error = exc
        if error is not None:
            raise error

    async def _start(self, name: str, pool: PoolFromZero, held: int) -> None:
        """Set the workload's number of replicas to 1 where it is 0. Raises KubeError.

        The version makes the API server refuse the change where anybody else has changed the workload meanwhile.
        """
        path = f"/apis/apps/v1/namespaces/{self._namespace}/{pool.workload}/scale"
        scale = await self._kube.get(path)
        if (scale.get("spec") or {}).get("replicas", 0):  # JSON of a Scale leaves a 0 out
            return
        version = scale["metadata"]["resourceVersion"]
        await self._kube.patch(path, {"metadata": {"resourceVersion": version}, "spec": {"replicas": 1}})
        self._context.metrics.scaled_from_zero.labels(name).inc()
        log.info("pool scaled from zero", pool=name, workload=pool.workload, held_requests=held)
