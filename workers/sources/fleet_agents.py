"""The fleet's other agents, as the leading orchestrator last named them: they are asked for files while it is away."""

from collections.abc import Iterable


class FleetAgents:
    """URLs of agents. Only the leader's answers to heartbeats name them: this worker sends them its key."""

    def __init__(self, own_url: str) -> None:
        """`own_url` is left out."""
        self._own_url = own_url
        self._urls: tuple[str, ...] = ()
        self.digest = ""
        """The orchestrator's digest of the list; "" before the first."""

    def replace(self, urls: Iterable[str], digest: str) -> None:
        """Replace the list by the orchestrator's."""
        self._urls = tuple(url for url in urls if url.startswith("http") and url != self._own_url)
        self.digest = digest

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the other agents."""
        return self._urls
