"""What an engine's adapter memory holds, told from what was done to it: vLLM says nothing about it.

vLLM keeps adapters in a host LRU of `max_cpu_loras`; the newest `max_loras` of it are on the device. Unloading takes
the name away, not the weights: they stay as a *ghost* until the LRU drops them. A live adapter that the LRU dropped is
still registered, and its next request reads it from disk again (vLLM 0.32 lora/worker_manager.py add_adapter).

Only loads, unloads and the uses that routers report are seen here, so everything but "is it registered" is estimated.
"""

from dataclasses import dataclass, replace
from typing import Literal

Location = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One entry of the host LRU. A ghost has lost its name; loading the name again makes a second entry."""

    name: str
    is_ghost: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """registered: engine names that answer; held: the host LRU, least recently used first.

    keeps_ghosts  whether unloaded weights stay (vLLM), or go at once (SGLang)
    """

    max_loras: int
    max_cpu_loras: int
    registered: frozenset[str] = frozenset()
    held: tuple[HostEntry, ...] = ()
    keeps_ghosts: bool = True

    @property
    def free(self) -> int:
        """How many more adapters may be registered. Ghosts take no slot: the LRU gives them up."""
        return max(0, self.max_cpu_loras - len(self.registered))

    @property
    def ghosts(self) -> int:
        return sum(held.is_ghost for held in self.held)

    def has(self, name: str) -> bool:
        return name in self.registered

    def location(self, name: str) -> Location:
        """Where a registered adapter's weights are, by the LRU's rules."""
        live = HostEntry(name)
        if live not in self.held:
            return "disk"
        return "device" if live in self.held[-self.max_loras :] else "host"

    def loaded(self, name: str) -> "AdapterSlots":
        """After the engine accepted a load, which also put the adapter on the device."""
        return replace(self, registered=self.registered | {name}, held=self._newest(name))

    def unloaded(self, name: str) -> "AdapterSlots":
        """After the engine accepted an unload: the name is gone, the weights are a ghost where they were, or go too."""
        if self.keeps_ghosts:
            held = tuple(HostEntry(name, is_ghost=True) if entry == HostEntry(name) else entry for entry in self.held)
        else:
            held = tuple(entry for entry in self.held if entry != HostEntry(name))
        return replace(self, registered=self.registered - {name}, held=held)

    def used(self, name: str) -> "AdapterSlots":
        """After a request ran on the adapter, which the engine may have had to read from disk."""
        if not self.has(name):
            return self
        return replace(self, held=self._newest(name))

    def displaced(self) -> tuple[str, ...]:
        """Registered adapters whose weights the LRU has dropped: each one's next request stalls for a read."""
        held = {entry.name for entry in self.held if not entry.is_ghost}
        return tuple(sorted(self.registered - held))

    def _newest(self, name: str) -> tuple[HostEntry, ...]:
        others = tuple(entry for entry in self.held if entry != HostEntry(name))
        return (*others, HostEntry(name))[-self.max_cpu_loras :]
