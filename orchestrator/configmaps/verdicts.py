"""What came of an adapter after its object was taken in: the object's status and an Event say that it failed."""

from collections.abc import Callable, Mapping

from orchestrator.configmaps.backend import ConfigMapBackend
from orchestrator.configmaps.events import KubeEvents, reason_of
from orchestrator.configmaps.objects import STATUS, annotation
from orchestrator.core.state import RegisteredAdapter

_FAILED = "failed: "


class FailureStatuses:
    """Compares what is known of adapters with what their objects say, after each pass.

    adapters   all that are registered
    failed     lora_id -> "code: message" of those that can be used nowhere
    is_ready   whether a worker serves the adapter
    """

    def __init__(
        self,
        backend: ConfigMapBackend,
        notices: KubeEvents,
        *,
        adapters: Callable[[], Mapping[str, RegisteredAdapter]],
        failed: Callable[[], Mapping[str, str]],
        is_ready: Callable[[str], bool],
    ) -> None:
        self._backend = backend
        self._notices = notices
        self._adapters = adapters
        self._failed = failed
        self._is_ready = is_ready
        self._told: dict[str, str] = {}  # lora_id -> why it failed, as its object says
        self._term = ""

    def turn(self) -> None:
        """While we lead: tell of what failed, and take it back once that is over. Writes nothing where all is told."""
        if not self._backend.is_caught_up:
            return
        if self._term != self._backend.drafts.writer:
            self._begin()
        failed, adapters = self._failed(), self._adapters()
        for lora_id, why in failed.items():
            adapter = adapters.get(lora_id)
            if adapter is not None and not adapter.is_deleting and self._told.get(lora_id) != why:
                self._tell(adapter, why)
        for lora_id in self._told.keys() - failed.keys():
            adapter = adapters.get(lora_id)
            # One that is only tried again has failed still, until somebody has found good bytes.
            if adapter is None or adapter.is_inspected or self._is_ready(lora_id):
                self._take_back(lora_id)

    def _begin(self) -> None:
        """A term: what the leader before us has told stands in the objects."""
        self._term = self._backend.drafts.writer
        self._told.clear()
        for lora_id in self._adapters():
            found = self._backend.mirror.objects.get(self._backend.tables.home("adapters", lora_id))
            said = "" if found is None else annotation(found, STATUS)
            if said.startswith(_FAILED):
                self._told[lora_id] = said.removeprefix(_FAILED)
                self._backend.say(self._backend.tables.home("adapters", lora_id), said)

    def _tell(self, adapter: RegisteredAdapter, why: str) -> None:
        name = self._backend.tables.home("adapters", adapter.lora_id)
        found = self._backend.mirror.objects.get(name)
        if found is None or self._backend.is_leaving(name):
            return  # not written yet, or on its way out
        said = self._backend.drafts.said.get(name, "")
        if said and not said.startswith(_FAILED):
            return  # an edit of it is refused: that is said first
        self._told[adapter.lora_id] = why
        if adapter.quarantine is None:  # a quarantine is in the status without us
            self._backend.say(name, f"{_FAILED}{why}")
        self._notices.warn(
            found, reason_of(why.partition(":")[0]) or "AdapterFailed", f"{adapter.lora_id} failed its checks: {why}"
        )

    def _take_back(self, lora_id: str) -> None:
        del self._told[lora_id]
        name = self._backend.tables.home("adapters", lora_id)
        if self._backend.drafts.said.get(name, "").startswith(_FAILED):
            self._backend.say_as_usual("adapters", lora_id, name)
