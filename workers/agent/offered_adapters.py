"""Adapters that the engine may load by itself, with the request that waits for them, in place of a call before it.

Only adapters that this start of the engine has had before: their effect there is known, so the first answer needs no
check before it.
"""

import time
from collections.abc import Callable, Collection

import structlog

from lorafleet.engine.vllm_plugin.offers import takes_offers, withdraw_all_offers, withdraw_offer, write_offer
from orchestrator.model.offers import AdapterOffer
from workers.agent.current_engine import CurrentEngine
from workers.config import WorkerSettings
from workers.core.errors import EngineError
from workers.wire import WorkerAdapter

log = structlog.get_logger()

TAKEN_WITHIN_S = 2.0
"""An offer that no request has taken in this time is ended: its client may have left, or the engine has refused it."""


class OfferedAdapters:
    """The offers to one engine. Blocking calls of a few files: each takes less time than a thread would."""

    def __init__(
        self, settings: WorkerSettings, engine: CurrentEngine, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._boot_id = ""
        self._checked: set[str] = set()
        self._offered_at: dict[str, float] = {}

    @property
    def untaken(self) -> Collection[str]:
        """Engine names of the offers that the engine has not been seen to take."""
        return self._offered_at.keys()

    def is_overdue(self, engine_name: str) -> bool:
        """Whether an offer has waited for its request for longer than `TAKEN_WITHIN_S`."""
        return self._clock() - self._offered_at[engine_name] > TAKEN_WITHIN_S

    def note_checked(self, engine_name: str) -> None:
        """Record that this start of the engine has had the adapter, with its effect checked; its offer has ended."""
        self._begin_boot()
        self._checked.add(engine_name)
        self._offered_at.pop(engine_name, None)

    def try_offer(self, adapter: WorkerAdapter) -> bool:
        """Let the engine load the adapter with its first request. False: load it by a call.

        False as well for an engine that takes no offers, and where the file cannot be written, which is logged.
        """
        self._begin_boot()
        folder = self._settings.lora_reports
        if not self._settings.offer_loads or adapter.engine_name not in self._checked or not takes_offers(folder):
            return False
        try:
            write_offer(folder, AdapterOffer(adapter.engine_name, adapter.path, adapter.digest))
        except OSError as exc:
            log.warning("adapter not offered to the engine", lora_id=adapter.lora_id, error=str(exc))
            return False
        self._offered_at[adapter.engine_name] = self._clock()
        return True

    def withdraw(self, engine_name: str) -> None:
        """Make sure that the engine does not load the adapter by itself any more; call it before an unload.

        raises  EngineError `not_ready` if the disk does not take it
        """
        try:
            withdraw_offer(self._settings.lora_reports, engine_name)
        except OSError as exc:
            message = f"unload {engine_name}: its offer to the engine cannot be deleted: {exc}"
            raise EngineError("not_ready", message, retry_after_s=5) from exc
        self._offered_at.pop(engine_name, None)

    def withdraw_all(self) -> None:
        """Withdraw all offers, of an agent before, too."""
        self._offered_at.clear()
        withdraw_all_offers(self._settings.lora_reports)

    def _begin_boot(self) -> None:
        """Forget what an earlier start of the engine has had."""
        if self._boot_id != self._engine.boot_id:
            self._boot_id = self._engine.boot_id
            self._checked.clear()
            self._offered_at.clear()
