"""The processes of a local fleet: brought up in order, kept alive, taken down in order.

prepare (model, adapters, folders) -> children (orchestrator, router, agents with engines) -> settle (workers ready,
adapters registered and inspected) -> ready line -> demo -> keep (restart what dies) -> stop, and sweep
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from lorafleet.local import adapter_folders, commands, demo, notices, welcome
from lorafleet.local.options import FleetOptions, lora_roots
from lorafleet.local.processes import ChildProcess, ProcessGuard, clean_environment, tail_of
from lorafleet.local.progress import StartProgress
from lorafleet.service import files
from lorafleet.service.auth import hash_key, new_key
from lorafleet.service.failure import CommandFailed
from lorafleet.service.sockets import socket_folder

_POLL_S = 0.05
# Per worker; on an idle box vLLM takes 25-60 s, and ten minutes is stuck.
_WITHIN_S = {"sim": 60.0, "vllm": 600.0, "sglang": 600.0}
_SERVER_WITHIN_S = 60.0  # orchestrator and router take about a second; beside two starting vLLMs several
_STARTS_BEFORE_READY = 3
_LONGEST_BACKOFF_S = 10.0
# vLLM's own sockets there are named by a UUID, with something before or after it.
_SOCKET_NAME_BYTES = 64
_NO_SPACE_BYTES = 2**20  # a guess: less than that, and no adapter fits, nor much of a log
_UP = ("ready", "cordoned", "draining")
_CALM_S = 30.0  # a child that ran this long has its backoff forgotten


class LocalFleet:
    """The children and what is known of them. Make it, `live`, and always `stop`."""

    def __init__(self, options: FleetOptions) -> None:
        self.options = options
        self.steps = StartProgress()
        self.is_ready = False
        self.token = ""
        self._folder = options.state_dir.resolve()
        self._mark = secrets.token_hex(16)
        # Not the state folder, which may lie deep.
        self._scratch = socket_folder("lf-", name_bytes=_SOCKET_NAME_BYTES)
        self._guard = ProcessGuard(self._mark, self._scratch)
        self._ports = {"router": options.router_port, "orchestrator": options.orchestrator_port}
        self._children: dict[str, ChildProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._held_back: dict[str, str] = {}  # workers that are up and cordoned or draining, by an earlier run's word

    def url(self, name: str) -> str:
        """Of the router or the orchestrator, once it has started."""
        return f"http://{commands.LOOPBACK}:{self._ports[name]}"

    @property
    def workers(self) -> list[str]:
        return [f"w{number}" for number in range(self.options.workers)]

    async def live(self) -> None:
        """From nothing to ready and the demo, then until cancelled (or, with `once`, no longer). Raises Failure."""
        try:
            async with asyncio.TaskGroup() as self._group:
                with self.steps:
                    for line in notices.told_of(self.options, os.environ):
                        self.steps.say(line)
                    await self._bring_up()
                if self.options.once:
                    for keeper in self._keepers:
                        keeper.cancel()
        except* (CommandFailed, OSError) as failures:
            raise self._told(_first(failures)) from None

    async def stop(self) -> None:
        """Router, agents with their engines, orchestrator, in this order; then whatever is left, by force."""
        began = time.monotonic()
        if self._children:
            self.steps.say("stopping: router, workers, orchestrator")
        for names in (["router"], self.workers, ["orchestrator"]):
            children = [self._children[name] for name in names if name in self._children]
            grace_s = self._patience_s("workers" if names == self.workers else names[0])
            for child, went in zip(children, await asyncio.gather(*(c.stop(grace_s) for c in children)), strict=True):
                if not went:
                    self.steps.say(f"{child.name}: did not stop within {grace_s:.0f} s and was killed")
        await asyncio.to_thread(self._guard.release)
        if self._children:
            self.steps.say(f"stopped in {time.monotonic() - began:.1f} s; nothing is left running")

    def _patience_s(self, house: str) -> float:
        """Seconds that a service may take to stop: those of its own settings, and at least the usual ones."""
        given, grace_s = self.options.of(house), self.options.grace_s
        if house == "router":
            return max(grace_s, given.number("drain_s", 0.0) + given.number("grace_s", grace_s))
        if house == "workers":  # an agent stops an engine in turn
            return max(3 * grace_s, given.number("engine_shutdown_s", 0.0) + 2 * grace_s)
        return max(grace_s, given.number("stop_grace_s", 0.0))

    def kill(self) -> None:
        """Everything, at once."""
        self._guard.release()

    # --- bringing up ---------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        base, adapters = await asyncio.to_thread(self._prepare)
        async with httpx.AsyncClient(timeout=10, trust_env=False, headers=self._headers()) as client:
            await self._serve("orchestrator", self._orchestrator)
            registered = await self._register(client, adapters)
            for line in notices.known_before(await self._known(client), registered, base.asked_by):
                self.steps.say(f"adapters: {line}")
            # The orchestrator hears its fleet out for some seconds before it is ready: the others start meanwhile.
            await self._serve("router", self._router)
            await self._start_workers(client, base, commands.rank_for(adapters.values()))
            await self._answers(client, "orchestrator")
            await self._inspected(client, registered)
            await self._answers(client, "router")
        self.is_ready = True
        self.steps.close()
        has_keys = self.options.key_file is not None
        welcome.show(
            self.url("router"),
            self.url("orchestrator"),
            self._folder / "logs",
            base.asked_by,
            registered,
            has_keys=has_keys,
        )
        if self.options.demo and self._are_all_held_back:
            self.steps.say("demo: left out: every worker is cordoned or drained")
        elif self.options.demo:
            await demo.run(self.url("router"), self.token, base.asked_by, registered)

    def _prepare(self) -> tuple[commands.LocalBaseModel, dict[str, Path]]:
        """The base model's folder and the adapters' by lora_id; the tiny ones are made where none were given."""
        for name in ("logs", "run"):
            (self._folder / name).mkdir(exist_ok=True)
        self._write_keys()
        model, adapters = self.options.model, self.options.adapters
        if model is None:
            from lorafleet.local import tiny_model  # noqa: PLC0415  (numpy and tokenizers: only the demo model needs them)

            model = tiny_model.make_model(self._folder / tiny_model.MODEL_NAME, progress=self.steps.say)
            if adapters is None:
                tiny_model.make_adapters(self._adapters, progress=self.steps.say)
        said = self.options.said_of_workers()
        name = str(said.get("served_model_name") or model_name(model))
        asked_by = str(said.get("base_model") or name)
        is_tiny = self.options.model is None
        base = commands.LocalBaseModel(name=name, folder=model.resolve(), is_tiny=is_tiny, asked_by=asked_by)
        if self.options.adapters is None and not base.is_tiny:
            return base, {}  # the tiny model's adapters fit no other
        for line in adapter_folders.remarks(self._adapters):
            self.steps.say(f"adapters: {line}")
        return base, adapter_folders.adapter_folders(self._adapters)

    @property
    def _adapters(self) -> Path:
        return (self.options.adapters or self._folder / "adapters").resolve()

    def _write_keys(self) -> None:
        """With a key file the fleet's own processes need a key too: a new one at every start, only its hash on disk."""
        if self.options.key_file is None:
            return
        self.token = new_key()
        entry = {"sha256": hash_key(self.token), "scopes": ["admin"], "note": "lorafleet up, for its own processes"}
        self._own_keys.write_text(yaml.safe_dump({"keys": [entry]}))

    async def _start_workers(
        self, client: httpx.AsyncClient, base: commands.LocalBaseModel, max_lora_rank: int
    ) -> None:
        # On 2 cores two vLLMs are ready after 36 s together and after 46 s in turn; more than one a core only queue up.
        at_once = self.options.workers if self.options.engine == "sim" else max(1, os.cpu_count() or 2)
        turn = asyncio.Semaphore(at_once)

        async def start(name: str) -> None:
            async with turn:
                self.steps.begin(name, f"starting {self.options.engine}")
                await self._start(name, lambda: self._agent(name, base, max_lora_rank))
                await self._worker_ready(client, name)

        async with asyncio.TaskGroup() as group:
            for name in self.workers:
                group.create_task(start(name))

    async def _worker_ready(self, client: httpx.AsyncClient, name: str) -> None:
        """Until the agent says so and the orchestrator has heard it. Raises Failure when the engine does not start."""
        began = time.monotonic()
        while (now := await self._worker_state(client, name)) not in _UP:
            # The agent would try again for ever. Here somebody waits, and a first start that fails seldom mends itself.
            if now.startswith("engine_down"):
                words = self._folder / "workers" / name / "engine.log"
                more = f"More in {self._children[name].log_path}"
                raise CommandFailed(f"{name}: {now}\nThe end of {words}:\n{tail_of(words)}\n{more}")
            if time.monotonic() - began > self._start_within_s:
                raise self._failed(self._children[name], f"is not ready in time (it is: {now.splitlines()[0]})")
            self.steps.still(name, notices.starting(self.options.engine, now))
            await asyncio.sleep(_POLL_S)
        if now != "ready":
            self._held_back[name] = now
            self.steps.say(notices.held_back(name, now, self._command()))
        self._ports[name] = int(self._port_file(name).read_text())
        self.steps.done(name, f"ready after {time.monotonic() - began:.1f} s")

    @property
    def _start_within_s(self) -> float:
        return max(_WITHIN_S[self.options.engine], self.options.of("workers").number("start_deadline_s", 0.0))

    async def _worker_state(self, client: httpx.AsyncClient, name: str) -> str:
        """`ready`, or what it is instead and why."""
        if not self._port_file(name).exists():
            return "starting"
        try:
            agent = await client.get(f"http://{commands.LOOPBACK}:{self._port_file(name).read_text()}/ready")
            # An agent that drains is up: the orchestrator has told it to, as it was told itself before.
            if not agent.is_success and (message := str(agent.json()["error"]["message"])) != "draining":
                return message
            items = (await client.get(f"{self.url('orchestrator')}/v1/workers")).json()["data"]
        except (httpx.HTTPError, ValueError, KeyError):
            return "starting"
        return next((str(item["state"]) for item in items if item["id"] == name), "starting: not registered yet")

    def _command(self) -> str:
        """`lorafleet` with the flags that it needs to reach this fleet."""
        where = "" if self._ports["orchestrator"] == 8080 else f" --orchestrator-url {self.url('orchestrator')}"
        return f"lorafleet{where}{'' if self.options.key_file is None else ' --token KEY'}"

    @property
    def _are_all_held_back(self) -> bool:
        return set(self._held_back) == set(self.workers)

    async def _register(self, client: httpx.AsyncClient, adapters: dict[str, Path]) -> list[str]:
        """Tell the orchestrator of each folder; the lora_ids it took. What it knows already is left as it is."""
        taken = []
        for lora_id, folder in adapters.items():
            spec = {"lora_id": lora_id, "source": str(folder)}
            answer = await client.post(f"{self.url('orchestrator')}/v1/adapters", json=spec)
            body = answer.json()
            code = None if answer.is_success else body["error"]["code"]
            if code in (None, "already_registered"):  # the latter: somebody gave it a policy or tenants since
                taken.append(lora_id)
            else:
                self.steps.say(f"adapter {lora_id}: not registered: {body['error']['message']}")
        if adapters:
            self.steps.say(f"adapters: {len(taken)} of {len(adapters)} registered")
        return taken

    async def _known(self, client: httpx.AsyncClient) -> dict[str, str | None]:
        """lora_id -> base model, where one is known, of every adapter that is registered."""
        found: dict[str, str | None] = {}
        page: dict[str, Any] = {"next": ""}
        while (cursor := page["next"]) is not None:
            query = {"cursor": cursor} if cursor else {}
            page = (await client.get(f"{self.url('orchestrator')}/v1/adapters", params=query)).raise_for_status().json()
            found |= {item["lora_id"]: item.get("base_model") for item in page["data"]}
        return found

    async def _inspected(self, client: httpx.AsyncClient, lora_ids: list[str]) -> None:
        """Until a worker has fetched and verified each adapter, or said what is wrong with it."""
        began = time.monotonic()
        waiting = set(lora_ids)
        if waiting:
            self.steps.begin("adapters", "being fetched and verified")
        while waiting:
            for lora_id in sorted(waiting):
                item = (await client.get(f"{self.url('orchestrator')}/v1/adapters/{lora_id}")).json()
                if item.get("digest"):
                    waiting.discard(lora_id)
                    self.steps.say(f"adapter {lora_id}: rank {item['rank']}, digest {item['digest'][:12]}")
                elif item.get("state") == "failed":
                    waiting.discard(lora_id)
                    self.steps.say(f"adapter {lora_id}: failed: {item.get('error')}")
            if waiting and self._are_all_held_back:
                why = "every worker is cordoned or drained"
                self.steps.done("adapters", f"{len(waiting)} not verified yet: {why}; they are once one is not")
                return
            if waiting:
                self.steps.still("adapters", f"being fetched and verified ({len(waiting)} to go)")
                if time.monotonic() - began > _SERVER_WITHIN_S + 2 * len(lora_ids):
                    raise self._failed(self._children["orchestrator"], f"has not inspected {min(waiting)} in time")
                await asyncio.sleep(_POLL_S)
        if lora_ids:
            self.steps.done("adapters", "verified")

    # --- children ------------------------------------------------------------------------------------------------

    async def _serve(self, name: str, command: Callable[[], list[str]]) -> None:
        """Start a server and learn its port, which it keeps over restarts."""
        port_file = self._port_file(name)
        self.steps.begin(name, "starting")
        await self._start(name, command)
        deadline = time.monotonic() + _SERVER_WITHIN_S
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise self._failed(self._children[name], "does not listen in time")
            await asyncio.sleep(_POLL_S)
        self._ports[name] = int(port_file.read_text())

    async def _answers(self, client: httpx.AsyncClient, name: str) -> None:
        deadline = time.monotonic() + _SERVER_WITHIN_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{self.url(name)}/ready")).is_success:
                    self.steps.done(name, f"ready at {self.url(name)}")
                    return
            if time.monotonic() > deadline:
                raise self._failed(self._children[name], "is not ready in time")
            await asyncio.sleep(_POLL_S)

    async def _start(self, name: str, command: Callable[[], list[str]]) -> None:
        log_path = self._folder / "logs" / f"{name}.log"
        house = commands.house_of(name)
        environment = clean_environment(self._mark, house) | commands.environment(name, self.token)
        if house == "workers":
            environment |= self._agents_environment(name)
        environment["VLLM_RPC_BASE_PATH"] = str(self._scratch)  # or its own sockets stay in /tmp when it is killed
        child = ChildProcess(name=name, command=command, environment=environment, log_path=log_path)
        log_path.write_bytes(b"")  # this run's only: a failure's tail must not be an older one's
        self._children[name] = child
        self._port_file(name).unlink(missing_ok=True)
        await child.start()
        assert self._group is not None
        self._keepers.append(self._group.create_task(self._keep(child)))

    async def _keep(self, child: ChildProcess) -> None:
        """Restart it whenever it ends, slower each time. Raises Failure when it never comes up to begin with."""
        in_a_row = 0
        while True:
            assert child.process is not None
            status = await child.process.wait()
            in_a_row = 0 if time.monotonic() - child.started_at > _CALM_S else in_a_row + 1
            if not self.is_ready and (status == 2 or in_a_row >= _STARTS_BEFORE_READY):
                raise self._failed(child, f"ended with {_ending(status)}")
            wait_s = min(_LONGEST_BACKOFF_S, 0.25 * 2 ** (in_a_row - 1)) if in_a_row else 0.0
            again = f"starting it again in {wait_s:.2g} s"
            self.steps.say(f"{child.name}: ended with {_ending(status)}; {again}; log: {child.log_path}")
            await asyncio.sleep(wait_s)
            await child.start()

    def _told(self, first: CommandFailed | OSError) -> CommandFailed:
        """It, or what an error of the system's says in one line."""
        if isinstance(first, CommandFailed):
            return first
        return self._no_space() if files.is_full(first) else CommandFailed(str(first) or repr(first))

    def _no_space(self) -> CommandFailed:
        return CommandFailed(f"{files.no_space(self._folder)}, or name another folder with --state-dir")

    def _failed(self, child: ChildProcess, what: str) -> CommandFailed:
        if shutil.disk_usage(self._folder).free < _NO_SPACE_BYTES:  # its log would not have the reason
            return self._no_space()
        return CommandFailed(f"{child.name} {what}. The end of {child.log_path}:\n{child.tail()}")

    # --- what the children are told ------------------------------------------------------------------------------

    def _orchestrator(self) -> list[str]:
        store = self._folder / "orchestrator.db"
        return commands.orchestrator(self._common("orchestrator"), store)

    def _router(self) -> list[str]:
        state_dir = self._folder / "router"
        said = self.options.of("router").values
        return commands.router(self._common("router"), self.url("orchestrator"), state_dir, self.options.grace_s, said)

    def _agent(self, name: str, base: commands.LocalBaseModel, max_lora_rank: int) -> list[str]:
        return commands.agent(
            self._common(name),
            name=name,
            engine=self.options.engine,
            base=base,
            max_loras=self.options.max_loras,
            max_lora_rank=max_lora_rank,
            orchestrator_url=self.url("orchestrator"),
            folder=self._folder,
            sockets=self._scratch,
            said=self.options.said_of_workers(),
        )

    def _agents_environment(self, name: str) -> dict[str, str]:
        options = self.options
        roots, is_tiny = lora_roots(options, self._adapters), options.model is None
        visible = {"CUDA_VISIBLE_DEVICES": options.devices[self.workers.index(name)]} if options.devices else {}
        return commands.agents_environment(options.engine_words, roots, is_tiny=is_tiny) | visible

    def _common(self, name: str) -> list[str]:
        keys = [] if self.options.key_file is None else [self.options.key_file.resolve(), self._own_keys]
        given = self.options.of(commands.house_of(name))
        return commands.common(self._ports.get(name, 0), self._port_file(name), keys, given)

    @property
    def _own_keys(self) -> Path:
        return self._folder / "run" / "own-keys.yaml"

    def _port_file(self, name: str) -> Path:
        return self._folder / "run" / f"{name}.port"

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}


def model_name(folder: Path) -> str:
    """The folder's own name, also of a link; of a snapshot in a hub's cache its repository's, not its commit's."""
    path = Path(os.path.abspath(folder))  # noqa: PTH100  (`..` goes, and links stay)
    repository = path.parent.parent.name
    is_snapshot = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if is_snapshot else path.name


def _ending(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return f"status {status}"


def _first(group: BaseExceptionGroup[CommandFailed | OSError]) -> CommandFailed | OSError:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
