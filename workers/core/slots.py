"""A model of the engine's adapter memory, which vLLM does not report.

vLLM keeps adapters in a host LRU of `max_cpu_loras`; the newest `max_loras` of them are on the device. An unload
removes the name but not the weights: they stay as a *ghost* until the LRU drops them. A registered adapter that the
LRU dropped is read from disk again by its next request (vLLM 0.32 lora/worker_manager.py add_adapter).

The model sees loads, unloads and the uses that routers report, so everything but the registered names is an estimate.
"""

from dataclasses import dataclass, replace
from typing import Literal

Location = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One entry of the host LRU. A ghost was unloaded; loading its name again makes a second entry."""

    name: str
    is_ghost: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The adapter slots of one engine. Immutable: each change returns a new object.

    registered    engine names that can be requested
    host_lru      entries of the host LRU, least recently used first
    keeps_ghosts  unloaded weights stay in the LRU (vLLM), or are freed at once (SGLang)
    """

    max_loras: int
    max_cpu_loras: int
    registered: frozenset[str] = frozenset()
    host_lru: tuple[HostEntry, ...] = ()
    keeps_ghosts: bool = True

    @property
    def free(self) -> int:
        """How many more adapters can be loaded. Ghosts take no slot: the LRU drops them."""
        return max(0, self.max_cpu_loras - len(self.registered))

    @property
    def ghosts(self) -> int:
        """Number of ghosts in the host LRU."""
        return sum(entry.is_ghost for entry in self.host_lru)

    def has(self, name: str) -> bool:
        """Whether the engine has an adapter of this name loaded."""
        return name in self.registered

    def location(self, name: str) -> Location:
        """Where a loaded adapter's weights are by the LRU's rules; "disk" if the LRU has dropped them."""
        live = HostEntry(name)
        if live not in self.host_lru:
            return "disk"
        return "device" if live in self.host_lru[-self.max_loras :] else "host"

    def after_load(self, name: str) -> "AdapterSlots":
        """The slots after a successful load, which also puts the adapter on the device."""
        return replace(self, registered=self.registered | {name}, host_lru=self._with_newest(name))

    def after_offer(self, name: str) -> "AdapterSlots":
        """The slots after an offer: requests may name the adapter, whose first one reads it from disk."""
        return replace(self, registered=self.registered | {name})

    def after_unload(self, name: str) -> "AdapterSlots":
        """The slots after a successful unload: the adapter becomes a ghost in its place, or is freed."""
        if self.keeps_ghosts:
            host_lru = tuple(
                HostEntry(name, is_ghost=True) if entry == HostEntry(name) else entry for entry in self.host_lru
            )
        else:
            host_lru = tuple(entry for entry in self.host_lru if entry != HostEntry(name))
        return replace(self, registered=self.registered - {name}, host_lru=host_lru)

    def after_use(self, name: str) -> "AdapterSlots":
        """The slots after a request used the adapter, which puts it on the device; unchanged if it is not loaded."""
        if not self.has(name):
            return self
        return replace(self, host_lru=self._with_newest(name))

    def displaced(self) -> tuple[str, ...]:
        """Loaded adapters whose weights the LRU has dropped: their next request stalls for a read from disk."""
        in_memory = {entry.name for entry in self.host_lru if not entry.is_ghost}
        return tuple(sorted(self.registered - in_memory))

    def _with_newest(self, name: str) -> tuple[HostEntry, ...]:
        """The host LRU with the adapter as its newest entry; the oldest entry of a full LRU is dropped."""
        others = tuple(entry for entry in self.host_lru if entry != HostEntry(name))
        return (*others, HostEntry(name))[-self.max_cpu_loras :]
