"""Pods run as processes: started, probed and stopped as a kubelet does it."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from lorafleet.local.processes import ChildProcess, clean_environment, kill_marked, marked_processes, tail_of
from tests.kube import podspec
from tests.kube.podspec import PodPlace
from tests.kube.store import Object
from tests.patience import patience

_SETTLED_WITHIN_S = patience(1.0)
_RESTART_AFTER_S = 0.5  # a real one backs off from 10 s on; tests wait for it


class PlayedPod:
    """One pod, from its start until it is gone. `told`: called at each change of its status.

    pace  what periods and delays of probes are multiplied by, so that a test need not wait for a cluster's habits
    """

    def __init__(
        self,
        pod: Object,
        place: PodPlace,
        read: podspec.NamespaceReader,
        told: Callable[["PlayedPod"], None],
        *,
        extra: Mapping[str, str],
        pace: float,
    ) -> None:
        self.name = pod["metadata"]["name"]
        self.address = place.address
        self.is_ready = False
        self.phase = "Running"
        self.restarts = 0
        self.left: list[str] = []
        self.children: dict[str, ChildProcess] = {}
        self._place, self._read, self._told, self._extra, self._pace = place, read, told, extra, pace
        self._mark = uuid.uuid4().hex
        self._logs = place.folder.parent / "logs"
        # A container's root is read-only, and its working folder lies there: nothing may turn up in this one.
        self.working_folder = place.folder / ".root"

    async def live(self) -> None:
        """Run volumes, init containers, containers and probes until cancelled."""
        podspec.made_volumes(self._place, self._read)
        self._logs.mkdir(exist_ok=True)
        for container in self._place.spec.get("initContainers") or []:
            child = self._child(container)
            await child.start()
            assert child.process is not None
            assert await child.process.wait() == 0, f"{child.name}:\n{child.tail()}"
        if self._place.spec.get("restartPolicy") == "Never":
            await self._run_once()
            return
        async with httpx.AsyncClient(trust_env=False, verify=False) as client, asyncio.TaskGroup() as tasks:
            for container in self._place.spec["containers"]:
                tasks.create_task(self._run(container, client))

    async def stop(self, grace_s: float) -> None:
        """Stop the pod: preStop, SIGTERM, and SIGKILL after the grace period."""
        deadline = time.monotonic() + grace_s
        await asyncio.gather(*(self._end(container, deadline) for container in self._place.spec["containers"]))
        await asyncio.to_thread(self._see_who_is_left)
        await self.kill()

    async def kill(self) -> None:
        """Kill every process that the pod has started."""
        for child in self.children.values():
            await child.stop(0.0)
        await asyncio.to_thread(kill_marked, self._mark)

    def _see_who_is_left(self) -> None:
        """Note in `left` the command lines of processes that outlive the pod's end."""
        until = time.monotonic() + _SETTLED_WITHIN_S
        while (pids := marked_processes(self._mark)) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in pids:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                self.left.append(line.replace("\0", " ")[:300])

    def processes(self) -> list[int]:
        return marked_processes(self._mark)

    def log(self) -> str:
        """The last output of the pod's containers."""
        return "\n".join(f"{child.name}:\n{tail_of(child.log_path, 40)}" for child in self.children.values())

    async def _run_once(self) -> None:
        """Run a pod that ends with its containers: a job or a test."""
        self.children = {container["name"]: self._child(container) for container in self._place.spec["containers"]}
        codes = []
        for child in self.children.values():
            await child.start()
            assert child.process is not None
            codes.append(await child.process.wait())
        self.phase = "Failed" if any(codes) else "Succeeded"
        self._told(self)

    async def _run(self, container: Mapping[str, Any], client: httpx.AsyncClient) -> None:
        """Run a container and restart it whenever it ends, after killing what it left behind."""
        child = self.children[container["name"]] = self._child(container)
        while True:
            await child.start()
            assert child.process is not None
            probing = asyncio.create_task(self._probe(container, client))
            ended = asyncio.create_task(child.process.wait())
            try:
                await asyncio.wait({probing, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                probing.cancel()
                ended.cancel()
                self._is(ready=False)
            if probing.done() and not probing.cancelled():
                probing.result()  # an error of ours; a probe that has failed for good merely ends
            await child.stop(1.0)
            await asyncio.to_thread(kill_marked, self._mark)
            self.restarts += 1
            await asyncio.sleep(_RESTART_AFTER_S)

    async def _probe(self, container: Mapping[str, Any], client: httpx.AsyncClient) -> None:
        """Wait until the container has to be restarted."""
        readiness, liveness = container.get("readinessProbe") or {}, container.get("livenessProbe") or {}
        startup = container.get("startupProbe") or liveness
        if startup and not await self._settled(startup, container, client):
            return
        unready = dead = 0
        lives_until = 0.0
        while True:
            unready = 0 if await self._succeeds(readiness, container, client) else unready + 1
            if time.monotonic() > lives_until:
                dead = 0 if await self._succeeds(liveness, container, client) else dead + 1
                lives_until = time.monotonic() + liveness.get("periodSeconds", 10) * self._pace
            if dead >= liveness.get("failureThreshold", 3):
                return
            if not unready:
                self._is(ready=True)
            elif unready >= readiness.get("failureThreshold", 3):
                self._is(ready=False)
            await asyncio.sleep(readiness.get("periodSeconds", 10) * self._pace)

    async def _settled(self, probe: Mapping[str, Any], container: Mapping[str, Any], client: httpx.AsyncClient) -> bool:
        """Whether the container starts within the probe's budget, in a busy machine's time; the period is shortened."""
        budget_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        ends_at = time.monotonic() + patience(budget_s / 3)
        while time.monotonic() < ends_at:
            if await self._succeeds(probe, container, client):
                return True
            await asyncio.sleep(probe.get("periodSeconds", 10) * self._pace)
        return False

    async def _succeeds(
        self, probe: Mapping[str, Any], container: Mapping[str, Any], client: httpx.AsyncClient
    ) -> bool:
        if not probe:
            return True
        get = probe["httpGet"]
        url = f"http://{self.address}:{podspec.port_of(container, get['port'])}{get.get('path', '/')}"
        try:
            # Of a container that hangs it is late to say so; of one that a busy machine keeps waiting it is wrong.
            answer = await client.get(url, timeout=patience(probe.get("timeoutSeconds", 1)))
        except httpx.HTTPError:
            return False
        return answer.status_code < 400

    async def _end(self, container: Mapping[str, Any], deadline: float) -> None:
        child = self.children.get(container["name"])
        if child is None or not child.is_running:
            return
        if hook := ((container.get("lifecycle") or {}).get("preStop") or {}).get("exec"):
            words = podspec.translated_words(hook["command"], container, self._place, child.environment)
            path = self._logs / f"{self.name}.{container['name']}.prestop.log"
            before = ChildProcess(name="preStop", command=lambda: words, environment=child.environment, log_path=path)
            await before.start()
            assert before.process is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                    await before.process.wait()
            await before.stop(0.0)
        await child.stop(max(2.0, deadline - time.monotonic()))

    def _child(self, container: Mapping[str, Any]) -> ChildProcess:
        own = podspec.environment(container, self._place, self._read)
        environment = clean_environment(self._mark) | {"HOSTNAME": self.name} | dict(self._extra) | own
        words = podspec.command(container, self._place, environment)
        self.working_folder.mkdir(exist_ok=True)
        return ChildProcess(
            name=f"{self.name}/{container['name']}",
            command=lambda: ["env", "-C", str(self.working_folder), *words],
            environment=environment,
            log_path=self._logs / f"{self.name}.{container['name']}.log",
        )

    def _is(self, *, ready: bool) -> None:
        if ready != self.is_ready:
            self.is_ready = ready
            self._told(self)


def folder_for(root: Path, pod: Object) -> Path:
    """A short folder path, as the path of a Unix socket in it has at most 107 bytes."""
    return root / pod["metadata"]["uid"][:8]
