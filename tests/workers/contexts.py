"""A context for parts of an agent that are tested alone."""

from pathlib import Path

from workers.agent.current_engine import CurrentEngine
from workers.agent.installer import Installer
from workers.config import WorkerSettings
from workers.inventory.context import AgentContext
from workers.inventory.event_log import AgentEventLog
from workers.inventory.installed_adapters import InstalledAdapters
from workers.inventory.inventory import Inventory, timestamp
from workers.metrics import WorkerMetrics
from workers.sources.base import Limits
from workers.storage.cache import AdapterCache
from workers.storage.local_adapters import LocalAdapters
from workers.storage.uploads import Uploads


def agent_context(cache: AdapterCache, state: Path, *, secrets: Path | None = None) -> AgentContext:
    return AgentContext(
        settings=WorkerSettings(model="/models/m", secrets_dir=secrets),
        boot_id="b",
        agent_url="http://127.0.0.1:1",
        cache=cache,
        local_adapters=LocalAdapters(None, cache.rules),
        installed=InstalledAdapters(state),
        uploads=Uploads(cache.folder, Limits(max_bytes=1 << 30)),
        events=AgentEventLog(boot_id="b", size=1000, now=timestamp),
        metrics=WorkerMetrics(),
    )


def inventory_of(context: AgentContext) -> Inventory:
    return Inventory(
        settings=context.settings, installed=context.installed, events=context.events, metrics=context.metrics
    )


def installer_of(context: AgentContext, inventory: Inventory | None = None) -> Installer:
    """An installer beside an engine that is not up."""
    engine = CurrentEngine(context.settings, context.metrics)
    return Installer(context, inventory=inventory or inventory_of(context), engine=engine)
