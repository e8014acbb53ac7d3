"""What the parts of one agent share. `workers.app` makes it once."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from lorafleet.kv.connectors import ConnectorVerdict
from lorafleet.service.network.tls import Tls
from workers.config import TIMERS, AgentTimers, WorkerSettings
from workers.inventory.event_log import AgentEventLog
from workers.inventory.installed_adapters import InstalledAdapters
from workers.metrics import WorkerMetrics
from workers.plugin import LoraDownloaderBase
from workers.sources.fleet import FleetSource
from workers.storage.cache import AdapterCache
from workers.storage.local_adapters import LocalAdapters
from workers.storage.uploads import Uploads
from workers.verification.base_model import NO_ENGINE, EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """One agent's settings, its disk, its logs and its clock."""

    settings: WorkerSettings
    boot_id: str
    agent_url: str
    cache: AdapterCache
    local_adapters: LocalAdapters
    installed: InstalledAdapters
    uploads: Uploads
    """What clients send."""
    events: AgentEventLog
    metrics: WorkerMetrics
    fleet: FleetSource | None = None
    """Fetches adapters by digest from the fleet's other workers; None without an orchestrator."""
    downloader: LoraDownloaderBase | None = None
    """The downloader plugin; it gets the agent's events."""
    connector: ConnectorVerdict | None = None
    """The KV connector that the engine's command names; None: ask the engine."""
    facts: EngineFacts = NO_ENGINE
    """What is known of the engine by its command."""
    command: str = ""
    """Digest of the engine's command and environment; "": an engine that was not started here."""
    tls: Tls | None = None
    """For calls to the engine, to orchestrators and to other agents."""
    timers: AgentTimers = TIMERS
    clock: Callable[[], float] = time.monotonic
