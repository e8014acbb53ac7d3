"""What an engine may load by itself: offered by its agent, or by the orchestrator."""

from dataclasses import dataclass

from orchestrator.model.names import MESSAGE


@dataclass(frozen=True, slots=True)
class AdapterOffer:
    """An adapter that an engine may load under this name."""

    __pydantic_config__ = MESSAGE

    engine_name: str
    path: str
    """The folder of its files, on the engine's own disk."""
    digest: str
    """Of those files. An agent has verified it; an engine without an agent reads them first."""
