"""Makes the parts of one agent from its settings."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from random import Random

import httpx

from lorafleet.keys.own_key import OwnKey
from lorafleet.kv.connectors import ConnectorVerdict
from lorafleet.service.files import make_folder, write_atomically
from lorafleet.service.network.tls import Tls
from workers.agent.checks.module_probes import command_digest
from workers.config import AgentTimers, WorkerSettings
from workers.core.addresses import parse_networks
from workers.core.references import OWN_FLEET
from workers.core.retry import RetryPolicy
from workers.engines.command import words_in_effect
from workers.engines.kinds import engine_traits
from workers.engines.kv_connector import connector_from_command
from workers.engines.vllm_tables import vllm_facts
from workers.inventory.context import AgentContext
from workers.inventory.event_log import AgentEventLog
from workers.inventory.installed_adapters import InstalledAdapters
from workers.inventory.inventory import timestamp
from workers.metrics import WorkerMetrics
from workers.plugin import LoraDownloaderBase
from workers.sources.base import PLUGIN_SCHEME, Limits, Source
from workers.sources.file_system import FileSystemCalls
from workers.sources.fleet import FLEET_SCHEMES, FleetSource, OtherAgents
from workers.sources.guard import GuardedTransport
from workers.sources.hub import HubSource
from workers.sources.local import LocalSource
from workers.sources.objects import ObjectSource
from workers.sources.plugins import (
    DEFAULT_DOWNLOADER,
    PluginSource,
    create_downloader,
    entry_point_sources,
    event_forwarder,
)
from workers.sources.web import WebSource
from workers.storage.cache import AdapterCache
from workers.storage.cache_folder import CacheFolder
from workers.storage.local_adapters import LocalAdapters
from workers.storage.uploads import Uploads
from workers.verification.base_model import NO_ENGINE, EngineFacts
from workers.verification.manifest import AdapterRules
from workers.verification.verify import base_model_or_none, model_folder

_ATTACHED_ENGINE_LEASE_S = 7 * 86400.0
_LIST_TIMEOUT_S = 2.0


def agent_context(
    settings: WorkerSettings,
    *,
    port: int,
    own_command: Sequence[str],
    own: OwnKey,
    rng: Random,
    timers: AgentTimers,
    tls: Tls | None,
) -> AgentContext:
    """What the parts of the agent share. Creates the cache folder. Raises OSError, CommandError, SettingsError."""
    connector, facts = _kv_connector_verdict(settings, own_command), _engine_facts_before_start(settings, own_command)
    rules, calls = rules_of(settings, facts), FileSystemCalls(timeout_s=settings.source_timeout_s)
    cache_folder, sources = cache_folder_of(settings), sources_of(settings, rng, calls)
    fleet = _fleet_source(settings, port, own, rng, tls)
    sources |= dict.fromkeys((*FLEET_SCHEMES, OWN_FLEET), fleet)
    downloader = _downloader_plugin(settings, sources["hf"], cache_folder.folder)
    if downloader is not None:
        sources[PLUGIN_SCHEME] = PluginSource(downloader, limits_of(settings, rng))
    boot_id = uuid.uuid4().hex
    return AgentContext(
        settings=settings,
        boot_id=boot_id,
        agent_url=_agent_url(settings, port),
        cache=AdapterCache(
            cache_folder,
            sources=sources,
            rules=rules,
            fetch_deadline_s=settings.fetch_deadline_s,
            source_prefixes=settings.source_prefixes,
            parallel_fetches=settings.parallel_fetches,
        ),
        local_adapters=LocalAdapters(settings.lora_path.resolve() if settings.lora_path else None, rules, calls=calls),
        installed=InstalledAdapters(settings.state, settings.record_dir),
        uploads=Uploads(cache_folder, limits_of(settings, rng)),
        events=AgentEventLog(
            boot_id=boot_id,
            instance_id=settings.instance_id,
            size=settings.event_buffer,
            now=timestamp,
            on_event=event_forwarder(downloader, cache_folder.path) if downloader else lambda _: None,
        ),
        metrics=WorkerMetrics(settings.instance_id),
        fleet=fleet if settings.orchestrator_urls else None,
        downloader=downloader,
        connector=connector,
        facts=facts,
        command="" if settings.engine_url else command_digest(words_in_effect(settings, own_command)),
        tls=tls,
        timers=timers,
    )


def _kv_connector_verdict(settings: WorkerSettings, own_command: Sequence[str]) -> ConnectorVerdict | None:
    """The KV connector that the engine's command names; None if it names none. Raises CommandError."""
    if settings.engine_url or settings.engine in {"sglang", "sgl-jax"}:
        return None
    return connector_from_command(words_in_effect(settings, own_command))


def _engine_facts_before_start(settings: WorkerSettings, own_command: Sequence[str]) -> EngineFacts:
    """Facts about vLLM read from its command, before it runs and reports its version; none for other engines.

    Raises CommandError for a `--config` file that cannot be read.
    """
    is_vllm = engine_traits(settings.engine).dialect == "vllm"
    return vllm_facts(words_in_effect(settings, own_command)) if is_vllm else NO_ENGINE


def lock_folders(settings: WorkerSettings) -> list[int]:
    """Create the state folder and `record_dir`, and lock them for this process. Raises OSError if another uses one.

    returns  file descriptors of the locks; closing them, or the end of the process, releases the locks

    Two agents with one state folder would overwrite each other's files and share their engines' sockets. With one
    record each would load what the other has, and an unload by one would lose the other's.
    """
    make_folder(settings.state, "state_dir", is_private=True)
    locks = [_lock_of(settings.state, "state_dir", "instance_id or state_dir")]
    if settings.record_dir is not None:
        try:
            make_folder(settings.record_dir, "record_dir")
            locks.append(_lock_of(settings.record_dir, "record_dir", "record_dir (VLLM_LORA_ADAPTER_CACHE)"))
        except OSError:
            os.close(locks[0])
            raise
    return locks


def _lock_of(folder: Path, setting: str, advice: str) -> int:
    """Lock a folder for this process; returns the lock's file descriptor. Raises OSError if another agent uses it."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(handle)
        raise OSError(f"{setting} {folder}: another agent uses it; give this one its own {advice}") from exc
    return handle


def cache_folder_of(settings: WorkerSettings) -> CacheFolder:
    """Create and open the cache folder, under this agent's unique name, which a file keeps over restarts.

    Raises OSError.
    """
    file = settings.state / "agent_id"
    if not file.exists():
        write_atomically(file, uuid.uuid4().hex[:12].encode())  # atomic: a truncated name might not be unique
    make_folder(settings.cache_dir, "cache_dir")
    return CacheFolder(
        settings.cache_dir,
        agent_id=f"{settings.instance_id}.{file.read_text()}",
        max_bytes=settings.max_disk_bytes or shutil.disk_usage(settings.cache_dir).total // 2,
        grace_s=settings.cache_grace_s,
        lease_s=settings.cache_lease_s,
        # An attached engine may run, and read its adapters, long after this agent has stopped.
        engine_outlives_s=_ATTACHED_ENGINE_LEASE_S if settings.engine_url else 0.0,
        served_digests=_served_digests,
    )


def _served_digests(engine_url: str) -> frozenset[str]:
    """Ask the engine at a URL for the digests that it lists; empty if it does not answer. Blocking."""
    try:
        # Whoever answers gets nothing of us, and can only have files kept: nobody's certificate is checked.
        answer = httpx.get(f"{engine_url}/v1/models", timeout=_LIST_TIMEOUT_S, trust_env=False, verify=False)  # noqa: S501
        models = answer.json()["data"]
        return frozenset(Path(str(item.get("root"))).name for item in models if item.get("parent"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return frozenset()


def _agent_url(settings: WorkerSettings, port: int) -> str:
    """The agent's URL for others."""
    return settings.advertise_url.rstrip("/") or _own_agent_url(settings.scheme, settings.host, port)


def _own_agent_url(scheme: str, host: str, port: int) -> str:
    """The agent's URL at a host and port; for a wildcard address that of the loopback interface."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def _fleet_source(settings: WorkerSettings, port: int, own: OwnKey, rng: Random, tls: Tls | None) -> FleetSource:
    """The source of files by digest from the fleet's other workers, at another URL than this agent's own."""
    limits, agents = limits_of(settings, rng), OtherAgents(_agent_url(settings, port))
    return FleetSource(limits, orchestrator_urls=settings.orchestrator_urls, own_key=own, agents=agents, tls=tls)


def _downloader_plugin(settings: WorkerSettings, hub: Source, folder: Path) -> LoraDownloaderBase | None:
    """The downloader plugin: the one that is set, else the hub's where `lora_path` is not set. Raises SettingsError.

    A worker with a `lora_path` does not look on a hub for a name that it lacks: anyone may own that name there.
    """
    plugin = settings.lora_downloader_plugin or (DEFAULT_DOWNLOADER if settings.lora_path is None else "")
    return create_downloader(plugin, hub=hub, folder=folder) if plugin else None


def limits_of(settings: WorkerSettings, rng: Random) -> Limits:
    """The limits of this worker's sources."""
    return Limits(
        max_bytes=settings.max_adapter_bytes,
        timeout_s=settings.source_timeout_s,
        parts=settings.source_parts,
        allow_pickle=settings.allow_pickle,
        retry=RetryPolicy(attempts=settings.source_attempts),
        rng=rng,
    )


def sources_of(settings: WorkerSettings, rng: Random, calls: FileSystemCalls) -> dict[str, Source]:
    """Create the sources by scheme: built in, and from installed packages. Raises SettingsError."""
    limits = limits_of(settings, rng)
    roots = [*settings.lora_roots, *([settings.lora_path] if settings.lora_path else [])]
    allowed = parse_networks(settings.source_networks)
    hub = HubSource(limits, token_file=settings.hf_token_file)
    may_ask_hub = not settings.source_prefixes or any(each.startswith("hf://") for each in settings.source_prefixes)
    sources: dict[str, Source] = {
        "file": LocalSource(
            roots,
            max_bytes=settings.max_adapter_bytes,
            allow_pickle=settings.allow_pickle,
            calls=calls,
            hub=hub if may_ask_hub else None,
        ),
        "https": WebSource(
            limits,
            transport=lambda: GuardedTransport(httpx.create_ssl_context(), allowed=allowed),
            netrc=settings.source_netrc,
        ),
        "hf": hub,
        **{scheme: ObjectSource(scheme, limits) for scheme in ("s3", "gs", "az")},
    }
    return sources | entry_point_sources(limits, frozenset({*sources, PLUGIN_SCHEME}))


def rules_of(settings: WorkerSettings, facts: EngineFacts = NO_ENGINE) -> AdapterRules:
    """The rules that adapters of this worker must keep; reads the base model if its folder is here."""
    folder, names = Path(settings.model), {settings.base_name, settings.model_name, settings.model} - {""}
    has_folder = settings.check_shapes and settings.model and folder.is_dir()
    return AdapterRules(
        max_rank=settings.max_lora_rank,
        base_names=frozenset(names),
        base_check=settings.base_model_check if names else "off",
        base=base_model_or_none(folder, facts) if has_folder else None,
        max_bytes=settings.max_adapter_bytes,
        allow_pickle=settings.allow_pickle,
        tokenizer=model_folder(facts.tokenizer) if facts.tokenizer else folder if has_folder else None,
    )
