"""The processes of a local fleet: started in order, restarted when they end, stopped in order.

prepare (model, adapters, folders) -> start (orchestrator, router, agents with engines) -> wait (workers ready, adapters
registered and inspected) -> ready line -> demo -> keep running -> stop
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import yaml

from lorafleet.engine.errors import last_error
from lorafleet.keys.key_files import hash_key, new_key
from lorafleet.keys.roles import PROGRAM_HEADER, UP
from lorafleet.local import adapter_folders, browser, commands, demo, notices
from lorafleet.local.authority import Authority
from lorafleet.local.options import FleetOptions, lora_roots, takes_adapters_at_start
from lorafleet.local.processes import ChildProcess, ProcessGuard, clean_environment, lines_of, tail_of
from lorafleet.local.progress import StartProgress
from lorafleet.service import files
from lorafleet.service.failure import CommandFailed
from lorafleet.service.network.sockets import socket_folder
from lorafleet.service.network.tls import TlsFiles, client_context, role_name, worker_name

_POLL_S = 0.05
# Per worker. vLLM takes 25-60 s on an idle machine; after ten minutes it is stuck.
_START_TIMEOUT_S = {"sim": 300.0, "vllm": 600.0, "sglang": 600.0, "sgl-jax": 900.0}
_SERVICE_START_TIMEOUT_S = 300.0  # they take a second or two; a minute was seen on a machine with other work
_STARTS_BEFORE_READY = 3
_LONGEST_BACKOFF_S = 10.0
# vLLM's socket names have a UUID and a prefix or suffix.
_SOCKET_NAME_BYTES = 64
_NO_SPACE_BYTES = 2**20  # a guess: with less, neither an adapter nor a log fits
_UP_STATES = ("ready", "cordoned", "draining")
_StartError: TypeAlias = CommandFailed | OSError | httpx.HTTPError
_STEADY_S = 30.0  # after this time a restart begins with the shortest pause


class LocalFleet:
    """A local fleet: call `run_until_cancelled`, and always `stop`."""

    def __init__(self, options: FleetOptions) -> None:
        """Start the guard process and create the sockets' folder."""
        self.options = options
        self.steps = StartProgress()
        self.is_ready = False
        self.token = ""
        self._tokens: dict[tuple[str, str], str] = {}  # (service, setting) -> key
        self._folder = options.state_dir.resolve()
        self._mark = secrets.token_hex(16)
        # Not in the state folder: socket paths must be short.
        self._scratch = socket_folder("lf-", name_bytes=_SOCKET_NAME_BYTES)
        self._guard = ProcessGuard(self._mark, self._scratch)
        self._ports = {"router": options.router_port, "orchestrator": options.orchestrator_port}
        self._children: dict[str, ChildProcess] = {}
        self._keep_tasks: list[asyncio.Task[None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._adapters: Mapping[str, Path] = {}  # lora_id -> folder
        self._authority: Authority | None = None
        self._certificates: Mapping[str, TlsFiles] = {}  # by process
        self._held_back: dict[str, str] = {}  # workers that an earlier run cordoned or drained

    def url(self, name: str) -> str:
        """The URL of the router or the orchestrator, once it has started."""
        return f"{self._scheme}://{commands.LOOPBACK}:{self._ports[name]}"

    @property
    def _scheme(self) -> str:
        """What the services speak."""
        return "https" if self.options.tls else "http"

    def _http_client(self) -> httpx.AsyncClient:
        """A client of this fleet's services, with the fleet's own key."""
        verify = True if self._authority is None else client_context(self._authority.ca)
        return httpx.AsyncClient(timeout=10, trust_env=False, headers=self._auth_headers(), verify=verify)

    @property
    def workers(self) -> list[str]:
        """The workers' names: w0, w1 and so on."""
        return [f"w{number}" for number in range(self.options.workers)]

    async def run_until_cancelled(self) -> None:
        """Start the fleet, run the demo, and stay until cancelled, or with `once` return. Raises CommandFailed."""
        try:
            async with asyncio.TaskGroup() as self._group:
                with self.steps:
                    for line in notices.startup_notices(self.options, os.environ):
                        self.steps.say(line)
                    await self._bring_up()
                if self.options.once:
                    for keeper in self._keep_tasks:
                        keeper.cancel()
        except* (CommandFailed, OSError, httpx.HTTPError) as failures:
            raise self._as_command_failed(_first_error(failures)) from None

    async def stop(self) -> None:
        """Stop router, agents with engines and orchestrator, in this order; then kill what is left.

        Removes the sockets' folder. Prints what it does.
        """
        began = time.monotonic()
        if self._children:
            self.steps.say("stopping: router, workers, orchestrator")
        for names in (["router"], self.workers, ["orchestrator"]):
            children = [self._children[name] for name in names if name in self._children]
            service = commands.service_of(names[0])
            grace_s = commands.stop_timeout_s(service, self.options.options_of(service), self.options.grace_s)
            for child, has_ended in zip(
                children, await asyncio.gather(*(c.stop(grace_s) for c in children)), strict=True
            ):
                if not has_ended:
                    self.steps.say(f"{child.name}: did not stop within {grace_s:.0f} s and was killed")
        await asyncio.to_thread(self._guard.release)
        if self._children:
            self.steps.say(f"stopped in {time.monotonic() - began:.1f} s; nothing is left running")

    def kill_and_wait(self) -> None:
        """Kill all processes at once, remove the sockets' folder, and wait until this is done."""
        self._guard.release()

    # --- bringing up --------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Start everything, wait until it is ready, print the ready line and run the demo. Raises CommandFailed."""
        base, adapters = await asyncio.to_thread(self._make_files)
        self._adapters = adapters
        async with self._http_client() as client:
            await self._start_service("orchestrator", self._orchestrator_command)
            registered = await self._register_adapters(client, adapters)
            for line in notices.earlier_adapter_notices(
                await self._registered_adapters(client), registered, base.request_name
            ):
                self.steps.say(f"adapters: {line}")
            # The orchestrator collects reports for some seconds before it is ready; the others start meanwhile.
            await self._start_service("router", self._router_command)
            await self._start_workers(client, base, commands.rank_for(adapters.values()))
            await self._wait_until_ready(client, "orchestrator")
            await self._wait_for_inspection(client, registered)
            await self._wait_until_ready(client, "router")
        self.is_ready = True
        self.steps.close()
        printer = notices.IncidentPrinter(
            self.url("orchestrator"), self._http_client, self.steps.say, since=datetime.now(UTC)
        )
        assert self._group is not None, "run_until_cancelled sets it"
        self._keep_tasks.append(self._group.create_task(printer.run()))
        has_keys = self.options.key_file is not None
        notices.print_ready(
            self.url("router"),
            self.url("orchestrator"),
            self._folder / "logs",
            base.request_name,
            registered,
            has_keys=has_keys,
            ca=None if self._authority is None else self._authority.ca,
        )
        if self.options.opens_console and not self.options.once:
            self.steps.say(await browser.open_page(f"{self.url('orchestrator')}/ui", os.environ))
        if self.options.demo and self._are_all_held_back:
            self.steps.say("demo: skipped, because every worker is cordoned or drained")
        elif self.options.demo:
            await self._try_demo(base.request_name, registered)

    async def _try_demo(self, base_model: str, registered: Sequence[str]) -> None:
        """Run the demo; print its failure, for the fleet can be used all the same. With `once`: raise CommandFailed."""
        try:
            async with self._http_client() as client:
                await demo.run_demo(client, self.url("router"), base_model, registered)
        except CommandFailed as exc:
            if self.options.once:
                raise
            self.steps.say(str(exc))

    def _make_files(self) -> tuple[commands.LocalBaseModel, dict[str, Path]]:
        """Create folders, the fleet's key, and the demo's model and adapters if no model is given; prints notices.

        returns  the base model, and adapter folders by lora_id
        """
        for name in ("logs", "run"):
            (self._folder / name).mkdir(exist_ok=True)
        self._write_key()
        self._write_authority()
        model, adapters = self.options.model, self.options.adapters
        if model is None:
            from lorafleet.local import tiny_model  # noqa: PLC0415  (only the demo model needs numpy and tokenizers)

            model = tiny_model.make_model(self._folder / tiny_model.MODEL_NAME, progress=self.steps.say)
            if adapters is None:
                tiny_model.make_adapters(self._adapters_folder, progress=self.steps.say)
        settings = self.options.worker_settings()
        name = str(settings.get("served_model_name") or model_name(model))
        request_name = str(settings.get("base_model") or name)
        is_tiny = self.options.model is None
        base = commands.LocalBaseModel(name=name, folder=model.resolve(), is_tiny=is_tiny, request_name=request_name)
        if self.options.adapters is None and not base.is_tiny:
            return base, {}  # the demo adapters fit the tiny model alone
        for line in adapter_folders.folder_notices(self._adapters_folder):
            self.steps.say(f"adapters: {line}")
        return base, adapter_folders.adapter_folders(self._adapters_folder)

    @property
    def _adapters_folder(self) -> Path:
        """The folder of adapters: `--adapters`, else the demo's in the state folder."""
        return (self.options.adapters or self._folder / "adapters").resolve()

    def _write_key(self) -> None:
        """With a key file, create `token`, this process's own key, and its services' keys; only hashes are stored."""
        if self.options.key_file is None:
            return
        self.token = new_key()
        entries = [_key_entry(self.token, ["admin"], "lorafleet up itself")]
        for service, settings in commands.KEY_SCOPES.items():
            for setting, scopes in settings.items():
                token = self._tokens[service, setting] = new_key()
                entries.append(_key_entry(token, scopes, f"lorafleet up, {setting.lower()} of its {service}"))
        files.write_atomically(self._own_key_file, yaml.safe_dump({"keys": entries}).encode())

    def _write_authority(self) -> None:
        """With `tls`, make an authority and the certificates of all services, in place of an earlier start's."""
        if not self.options.tls:
            return
        folder = self._folder / "tls"
        files.make_private_folder(folder)
        self._authority = Authority(folder)
        here = (commands.LOOPBACK, "localhost")
        self._certificates = {
            "router": self._authority.issue("router", role_name("router"), *here),
            "orchestrator": self._authority.issue("orchestrator", role_name("orchestrator"), *here),
            **{
                name: self._authority.issue(name, role_name("worker"), worker_name(name), *here)
                for name in self.workers
            },
        }

    async def _start_workers(self, client: httpx.AsyncClient, base: commands.LocalBaseModel, needed_rank: int) -> None:
        """Start all workers, engines other than the sim a few at a time, and wait until they are ready.

        Raises a group of CommandFailed.
        """
        # Starting one engine a core at a time is fastest; more only compete for the cores.
        at_once = self.options.workers if self.options.engine == "sim" else max(1, os.cpu_count() or 2)
        start_slots = asyncio.Semaphore(at_once)

        async def start(name: str) -> None:
            """Start one worker and wait until it is ready. Raises CommandFailed."""
            async with start_slots:
                self.steps.begin(name, f"starting {self.options.engine}")
                await self._start_process(name, lambda: self._agent_command(name, base, needed_rank))
                await self._wait_for_worker(client, name)

        async with asyncio.TaskGroup() as group:
            for name in self.workers:
                group.create_task(start(name))

    def _engine_failure(self, name: str) -> str:
        """The last error in the output of a worker's engine, the end of its log, and where more is."""
        output = self._folder / "workers" / name / "engine.log"
        error = last_error(lines_of(output))
        first = f"The engine's last error: {error}\n" if error else ""
        return f"{first}The end of {output}:\n{tail_of(output)}\nMore in {self._children[name].log_path}"

    async def _wait_for_worker(self, client: httpx.AsyncClient, name: str) -> None:
        """Wait until agent and orchestrator report the worker as up, and keep its port; prints if it is held back.

        Raises CommandFailed if its engine fails, or is not ready in time.
        """
        began = time.monotonic()
        while (now := await self._worker_state(client, name)) not in _UP_STATES:
            # The agent would retry for ever, but a first start that fails rarely succeeds later.
            if now.startswith("engine_down"):
                raise CommandFailed(f"{name}: {now}\n{self._engine_failure(name)}")
            if time.monotonic() - began > self._start_within_s:
                raise self._process_failure(
                    self._children[name], f"is not ready in time (it is: {now.splitlines()[0]})"
                )
            self.steps.update(name, notices.starting_status(self.options.engine, now))
            await asyncio.sleep(_POLL_S)
        if now != "ready":
            self._held_back[name] = now
            self.steps.say(notices.held_back_notice(name, now, self._cli_command()))
        self._ports[name] = int(self._port_file(name).read_text())
        self.steps.finish(name, f"ready after {time.monotonic() - began:.1f} s")

    @property
    def _start_within_s(self) -> float:
        """Seconds within which a worker must be ready: the engine's, or the setting `start_deadline_s` if longer."""
        return max(
            _START_TIMEOUT_S[self.options.engine], self.options.options_of("workers").number("start_deadline_s", 0.0)
        )

    async def _worker_state(self, client: httpx.AsyncClient, name: str) -> str:
        """Ask agent and orchestrator for the worker's state: `ready`, or another state with its reason.

        Without an answer it is `starting`.
        """
        if not self._port_file(name).exists():
            return "starting"
        try:
            at = f"{commands.LOOPBACK}:{self._port_file(name).read_text()}"
            agent = await client.get(f"{self._scheme}://{at}/ready")
            # A draining agent is up: the orchestrator drains it, as an earlier run asked.
            if not agent.is_success and (message := str(agent.json()["error"]["message"])) != "draining":
                return message
            items = (await client.get(f"{self.url('orchestrator')}/v1/workers")).json()["data"]
        except (httpx.HTTPError, ValueError, KeyError):
            return "starting"
        return next((str(item["state"]) for item in items if item["id"] == name), "starting: not registered yet")

    def _cli_command(self) -> str:
        """The command `lorafleet` with the flags that reach this fleet."""
        is_usual = self._ports["orchestrator"] == 8080 and not self.options.tls
        address_flag = "" if is_usual else f" --orchestrator-url {self.url('orchestrator')}"
        ca = "" if self._authority is None else f" --tls-ca {self._authority.ca}"
        return f"lorafleet{ca}{address_flag}{'' if self.options.key_file is None else ' --token KEY'}"

    @property
    def _are_all_held_back(self) -> bool:
        """Whether every worker was cordoned or drained in an earlier run."""
        return set(self._held_back) == set(self.workers)

    async def _register_adapters(self, client: httpx.AsyncClient, adapters: dict[str, Path]) -> list[str]:
        """Register each folder at the orchestrator, and print refusals; the lora_ids that are registered now.

        Existing registrations are not changed.
        """
        registered = []
        for lora_id, folder in adapters.items():
            spec = {"lora_id": lora_id, "source": str(folder)}
            headers = {PROGRAM_HEADER: UP}
            answer = await client.post(f"{self.url('orchestrator')}/v1/adapters", json=spec, headers=headers)
            body = answer.json()
            code = None if answer.is_success else body["error"]["code"]
            if code in (None, "already_registered"):  # the latter keeps its policy and tenants
                registered.append(lora_id)
            else:
                self.steps.say(f"adapter {lora_id}: not registered: {body['error']['message']}")
        if adapters:
            self.steps.say(f"adapters: {len(registered)} of {len(adapters)} registered")
        return registered

    async def _registered_adapters(self, client: httpx.AsyncClient) -> dict[str, str | None]:
        """Ask the orchestrator, page by page, for every registered adapter: lora_id -> base model, or None if unknown.

        Raises httpx.HTTPError.
        """
        base_models: dict[str, str | None] = {}
        page: dict[str, Any] = {"next": ""}
        while (cursor := page["next"]) is not None:
            query = {"cursor": cursor} if cursor else {}
            page = (await client.get(f"{self.url('orchestrator')}/v1/adapters", params=query)).raise_for_status().json()
            base_models |= {item["lora_id"]: item["spec"]["base_model"] for item in page["data"]}
        return base_models

    async def _wait_for_inspection(self, client: httpx.AsyncClient, lora_ids: list[str]) -> None:
        """Wait until a worker has verified each adapter or reported what is wrong with it, and print the results.

        Returns early if every worker is held back. Raises CommandFailed if it takes too long.
        """
        began = time.monotonic()
        waiting = set(lora_ids)
        if waiting:
            self.steps.begin("adapters", "being fetched and verified")
        while waiting:
            for lora_id in sorted(waiting):
                item = (await client.get(f"{self.url('orchestrator')}/v1/adapters/{lora_id}")).json()
                # An answer that is an error has neither: the next one is waited for.
                digest, status = item.get("spec", {}).get("digest"), item.get("status", {})
                if digest:
                    waiting.discard(lora_id)
                    rank = (status.get("card") or {}).get("rank", "not known yet")
                    self.steps.say(f"adapter {lora_id}: rank {rank}, digest {digest[:12]}")
                elif status.get("state") == "failed":
                    waiting.discard(lora_id)
                    self.steps.say(f"adapter {lora_id}: failed: {status['error']}")
            if waiting and self._are_all_held_back:
                why = "every worker is cordoned or drained"
                self.steps.finish("adapters", f"{len(waiting)} not verified, because {why}")
                return
            if waiting:
                self.steps.update("adapters", f"being fetched and verified ({len(waiting)} to go)")
                if time.monotonic() - began > _SERVICE_START_TIMEOUT_S + 2 * len(lora_ids):
                    raise self._process_failure(
                        self._children["orchestrator"], f"has not inspected {min(waiting)} in time"
                    )
                await asyncio.sleep(_POLL_S)
        if lora_ids:
            self.steps.finish("adapters", "verified")

    # --- children -----------------------------------------------------------------------------------------------

    async def _start_service(self, name: str, command: Callable[[], list[str]]) -> None:
        """Start a service, wait until it listens, and keep its port over restarts; raises CommandFailed."""
        port_file = self._port_file(name)
        self.steps.begin(name, "starting")
        await self._start_process(name, command)
        deadline = time.monotonic() + _SERVICE_START_TIMEOUT_S
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise self._process_failure(self._children[name], "does not listen in time")
            await asyncio.sleep(_POLL_S)
        self._ports[name] = int(port_file.read_text())

    async def _wait_until_ready(self, client: httpx.AsyncClient, name: str) -> None:
        """Poll a service's `/ready` until it succeeds, and show that step as done. Raises CommandFailed in time."""
        deadline = time.monotonic() + _SERVICE_START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{self.url(name)}/ready")).is_success:
                    self.steps.finish(name, f"ready at {self.url(name)}")
                    return
            if time.monotonic() > deadline:
                raise self._process_failure(self._children[name], "is not ready in time")
            await asyncio.sleep(_POLL_S)

    async def _start_process(self, name: str, command: Callable[[], list[str]]) -> None:
        """Start a process with an empty log, and a task that restarts it whenever it ends.

        Deletes its former port file first.
        """
        log_path = self._folder / "logs" / f"{name}.log"
        service = commands.service_of(name)
        environment = clean_environment(self._mark, service) | commands.token_environment(name, self._tokens)
        if service == "workers":
            environment |= self._agent_environment(name)
        environment["VLLM_RPC_BASE_PATH"] = str(self._scratch)  # else its sockets stay in /tmp when it is killed
        child = ChildProcess(name=name, command=command, environment=environment, log_path=log_path)
        log_path.write_bytes(b"")  # so that the log's end is never an earlier run's
        self._children[name] = child
        self._port_file(name).unlink(missing_ok=True)
        await child.start()
        assert self._group is not None
        self._keep_tasks.append(self._group.create_task(self._keep_running(child)))

    async def _keep_running(self, child: ChildProcess) -> None:
        """Restart a process whenever it ends, with growing pauses, and print it.

        Raises CommandFailed if it never starts at all.
        """
        in_a_row = 0
        while True:
            assert child.process is not None
            status = await child.process.wait()
            in_a_row = 0 if time.monotonic() - child.started_at > _STEADY_S else in_a_row + 1
            if not self.is_ready and (status == 2 or in_a_row >= _STARTS_BEFORE_READY):
                raise self._process_failure(child, f"ended with {_exit_text(status)}")
            wait_s = min(_LONGEST_BACKOFF_S, 0.25 * 2 ** (in_a_row - 1)) if in_a_row else 0.0
            restart = f"starting it again in {wait_s:.2g} s"
            self.steps.say(f"{child.name}: ended with {_exit_text(status)}; {restart}; log: {child.log_path}")
            await asyncio.sleep(wait_s)
            await self._start_again(child)

    async def _start_again(self, child: ChildProcess) -> None:
        """Start a process that has ended; try until the system can. Raises OSError before the fleet is ready."""
        while True:
            try:
                await child.start()
            except OSError as exc:  # no process or memory is left, or the folder of logs is gone
                if not self.is_ready:
                    raise
                self.steps.say(f"{child.name}: cannot be started: {exc}; trying again in {_LONGEST_BACKOFF_S:g} s")
                await asyncio.sleep(_LONGEST_BACKOFF_S)
            else:
                return

    def _as_command_failed(self, first: _StartError) -> CommandFailed:
        """The error as a CommandFailed."""
        if isinstance(first, CommandFailed):
            return first
        if isinstance(first, httpx.HTTPError):
            return CommandFailed(
                f"a service of the fleet does not answer ({first!r}); its log is in {self._folder / 'logs'}"
            )
        return self._no_space() if files.is_full(first) else CommandFailed(str(first) or repr(first))

    def _no_space(self) -> CommandFailed:
        """The error for a full disk."""
        return CommandFailed(f"{files.disk_full_text(self._folder)}, or name another folder with --state-dir")

    def _process_failure(self, child: ChildProcess, problem: str) -> CommandFailed:
        """The error for a failed process, with the end of its log."""
        if shutil.disk_usage(self._folder).free < _NO_SPACE_BYTES:  # the disk is full: its log cannot have the reason
            return self._no_space()
        return CommandFailed(f"{child.name} {problem}. The end of {child.log_path}:\n{child.tail()}")

    # --- commands of the processes -----------------------------------------------------------------------------------

    def _orchestrator_command(self) -> list[str]:
        """The orchestrator's command in this fleet."""
        store = self._folder / "orchestrator.db"
        settings = self.options.options_of("orchestrator").values
        return commands.orchestrator_command(
            self._common_flags("orchestrator"), store, self.options.upload_store, self.options.grace_s, settings
        )

    def _router_command(self) -> list[str]:
        """The router's command in this fleet."""
        state_dir = self._folder / "router"
        settings = self.options.options_of("router").values
        return commands.router_command(
            self._common_flags("router"), self.url("orchestrator"), state_dir, self.options.grace_s, settings
        )

    def _agent_command(self, name: str, base: commands.LocalBaseModel, needed_rank: int) -> list[str]:
        """The command of one worker's agent in this fleet."""
        return commands.agent_command(
            self._common_flags(name),
            name=name,
            engine=self.options.engine,
            base=base,
            max_loras=self._max_loras,
            max_lora_rank=self.options.max_lora_rank,
            needed_rank=needed_rank,
            orchestrator_url=self.url("orchestrator"),
            folder=self._folder,
            sockets=self._scratch,
            grace_s=self.options.grace_s,
            given=self.options.worker_settings(),
        )

    @property
    def _max_loras(self) -> int | None:
        """The slots of each engine: the flag's, or one for each adapter where all are loaded at the start; else None.

        None: a worker's setting or the default counts.
        """
        is_set = self.options.max_loras is not None or "max_loras" in self.options.worker_settings()
        has_all = takes_adapters_at_start(self.options.engine) and not is_set
        return (len(self._adapters) or None) if has_all else self.options.max_loras

    def _agent_environment(self, name: str) -> dict[str, str]:
        """Variables of one worker's agent: engine arguments, adapter folders, and its devices."""
        options = self.options
        roots, is_tiny = lora_roots(options, self._adapters_folder), options.model is None
        visible = {"CUDA_VISIBLE_DEVICES": options.devices[self.workers.index(name)]} if options.devices else {}
        environment = commands.engine_environment(options, roots, is_tiny=is_tiny) | visible
        if takes_adapters_at_start(options.engine) and "preload_loras" not in options.worker_settings():
            environment |= commands.preload_environment(self._adapters_folder, self._adapters)
        return environment

    def _common_flags(self, name: str) -> list[str]:
        """Flags of one process that every service has: address, port file, keys, settings file."""
        keys = [] if self.options.key_file is None else [self.options.key_file.resolve(), self._own_key_file]
        settings = self.options.options_of(commands.service_of(name))
        port, certificate = self._ports.get(name, 0), self._certificates.get(name, TlsFiles())
        return commands.common_flags(port, self._port_file(name), keys, settings, certificate)

    @property
    def _own_key_file(self) -> Path:
        """The key file with the hash of the fleet's own key."""
        return self._folder / "run" / "own-keys.yaml"

    def _port_file(self, name: str) -> Path:
        """The file into which a process writes its port."""
        return self._folder / "run" / f"{name}.port"

    def _auth_headers(self) -> dict[str, str]:
        """The header with the fleet's own key; empty without keys."""
        return {"authorization": f"Bearer {self.token}"} if self.token else {}


def _key_entry(key: str, scopes: Sequence[str], note: str) -> dict[str, object]:
    """The entry of a key in a key file."""
    return {"sha256": hash_key(key), "scopes": list(scopes), "note": note}


def model_name(folder: Path) -> str:
    """The folder's name, also of a link; for a snapshot in a hub cache the repository's name, not the commit."""
    path = Path(os.path.abspath(folder))  # noqa: PTH100  (removes `..` and keeps links)
    repository = path.parent.parent.name
    is_snapshot = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if is_snapshot else path.name


def _exit_text(status: int) -> str:
    """An exit status in words: a signal's name, or `status N`."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return f"status {status}"


def _first_error(group: BaseExceptionGroup[_StartError]) -> _StartError:
    """The first error in a group of errors."""
    inner = group.exceptions[0]
    return _first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner
