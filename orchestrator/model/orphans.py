"""An orphan: an adapter on workers that is not registered with these bytes."""

from dataclasses import dataclass

from orchestrator.model.cards import AdapterCard
from orchestrator.model.names import MESSAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanItem:
    """An adapter that workers have and that is not registered with this digest."""

    __pydantic_config__ = MESSAGE

    lora_id: str
    card: AdapterCard
    """its model card; of a foreign one the digest is that of its files, as the worker has read them"""
    engine_name: str
    workers: tuple[str, ...]
    problem: str | None = None
    """why it cannot be adopted"""
    is_foreign: bool = False
    """another client loaded it into the engine"""
    is_configured: bool = False
    """the settings of these workers name it"""
    error: str | None = None
    """why a worker cannot read or load it"""
