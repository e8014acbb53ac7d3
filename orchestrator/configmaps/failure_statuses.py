"""Failures of adapters, shown in their objects' status and as Kubernetes Events."""

from collections.abc import Callable, Mapping

from orchestrator.configmaps.backend import ConfigMapBackend
from orchestrator.configmaps.events import KubeEvents, reason_of
from orchestrator.configmaps.objects import STATUS, annotation
from orchestrator.model.adapters import RegisteredAdapter

_FAILED = "failed: "


class FailureStatuses:
    """Keeps objects' statuses in agreement with the failures of their adapters, after each pass.

    adapters   returns all registered adapters
    failed     returns lora_id -> "code: message" of adapters that no worker can use
    is_ready   whether a worker serves the adapter
    """

    def __init__(
        self,
        backend: ConfigMapBackend,
        events: KubeEvents,
        *,
        adapters: Callable[[], Mapping[str, RegisteredAdapter]],
        failed: Callable[[], Mapping[str, str]],
        is_ready: Callable[[str], bool],
    ) -> None:
        self._backend = backend
        self._events = events
        self._adapters = adapters
        self._failed = failed
        self._is_ready = is_ready
        self._shown_reasons: dict[str, str] = {}  # lora_id -> failure as its object shows it
        self._term = ""

    def update(self) -> None:
        """Show new failures and clear those that are over, while we lead. Writes nothing without a change."""
        if not self._backend.is_caught_up:
            return
        if self._term != self._backend.rendering.term_mark:
            self._begin_term()
        failed, adapters = self._failed(), self._adapters()
        for lora_id, why in failed.items():
            adapter = adapters.get(lora_id)
            if adapter is not None and not adapter.is_deleting and self._shown_reasons.get(lora_id) != why:
                self._show_failure(adapter, why)
        for lora_id in self._shown_reasons.keys() - failed.keys():
            adapter = adapters.get(lora_id)
            # An adapter that is only retried counts as failed until a worker has found good bytes.
            if adapter is None or adapter.is_inspected or self._is_ready(lora_id):
                self._clear_failure(lora_id)

    def _begin_term(self) -> None:
        """Begin a term: replace the shown failures by those that the objects show already, and keep their statuses."""
        self._term = self._backend.rendering.term_mark
        self._shown_reasons.clear()
        for lora_id in self._adapters():
            found = self._backend.mirror.objects.get(self._backend.tables.object_name("adapters", lora_id))
            status = "" if found is None else annotation(found, STATUS)
            if status.startswith(_FAILED):
                self._shown_reasons[lora_id] = status.removeprefix(_FAILED)
                self._backend.set_status(self._backend.tables.object_name("adapters", lora_id), status)

    def _show_failure(self, adapter: RegisteredAdapter, why: str) -> None:
        """Show the failure in the object's status and as an Event, unless the status shows a refused edit.

        Does nothing for an object that is not written yet or about to be deleted.
        """
        name = self._backend.tables.object_name("adapters", adapter.lora_id)
        found = self._backend.mirror.objects.get(name)
        if found is None or self._backend.will_delete_object(name):
            return  # not written yet, or about to be deleted
        status = self._backend.rendering.statuses.get(name, "")
        if status and not status.startswith(_FAILED):
            return  # a refused edit takes precedence
        self._shown_reasons[adapter.lora_id] = why
        if adapter.quarantine is None:  # the rendered status shows a quarantine already
            self._backend.set_status(name, f"{_FAILED}{why}")
        self._events.warn(
            found, reason_of(why.partition(":")[0]) or "AdapterFailed", f"{adapter.lora_id} failed its checks: {why}"
        )

    def _clear_failure(self, lora_id: str) -> None:
        """Forget the shown failure, and restore the object's default status if it shows one."""
        del self._shown_reasons[lora_id]
        name = self._backend.tables.object_name("adapters", lora_id)
        if self._backend.rendering.statuses.get(name, "").startswith(_FAILED):
            self._backend.clear_status("adapters", lora_id, name)
