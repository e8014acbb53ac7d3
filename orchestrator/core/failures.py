"""Failures of adapters on workers: each blocks further loads there for a time that doubles with every repetition."""

from collections.abc import Set
from random import Random
from typing import Literal

from lorafleet.identity import fleet_digest
from orchestrator.core.placement.context import is_registered_digest
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.snapshot import AdapterFailure, ObservedFleet, Pair

ANYWHERE = ""
"""The worker_id of a failure that blocks every worker: no worker has found good bytes at the adapter's source."""
SOURCE_CODES = frozenset(
    {
        "source_address_forbidden",
        "source_extra_missing",
        "source_forbidden",
        "source_invalid",
        "source_is_repository",
        "source_not_found",
        "source_relative",
        "source_too_big",
        "source_unauthorized",
        "source_unsafe",
        "source_unsupported",
    }
)
"""Agent error codes (workers/core/errors.py) about a source; another worker may have better access to it."""

CONTENT_CODES = frozenset(
    {
        "adapter_config_invalid",
        "adapter_file_unsupported",
        "adapter_incomplete",
        "adapter_invalid",
        "adapter_no_effect",
        "adapter_pickled",
        "adapter_refused",
        "base_model_mismatch",
        "bias_unsupported",
        "digest_mismatch",
        "dora_unsupported",
        "dtype_unsupported",
        "invalid_lora_id",
        "module_unknown",
        "module_unsupported",
        "module_untargeted",
        "modules_ignored",
        "not_accepted",
        "modules_to_save_unsupported",
        "modules_unmatched",
        "peft_feature_unsupported",
        "peft_type_unsupported",
        "rank_mismatch",
        "shape_mismatch",
        "tensor_unexpected",
        "tensor_unpaired",
        "weights_corrupt",
        "weights_empty",
        "weights_not_finite",
        "weights_too_large",
    }
)
"""Agent error codes about an adapter's bytes.

All other codes are about the worker at that moment, `disk_full` and `rank_too_big` included.
"""

FINAL_CODES = SOURCE_CODES | CONTENT_CODES
"""Agent error codes that somebody has to mend: by itself the same load fails again on that worker."""
ENGINE_REFUSALS = frozenset(("adapter_refused", "adapter_no_effect", "modules_ignored", "not_accepted"))
"""Error codes of bytes with the registered digest that an engine refuses, or does not use."""
MOST_TRIED = 3
"""After this many workers found no good bytes at the source, no other is waited for; a guess, nothing measured."""
MOST_REFUSALS = 2
"""After this many engines have refused an adapter it is quarantined until an operator retries it."""
LONGEST_S = 3600.0
_JITTER = 0.25
"""Expiries are shortened at random by up to this part, so that failures of one moment are not all retried at one."""


def failure_scope(
    adapter: RegisteredAdapter, observed: ObservedFleet, now: float
) -> Literal["worker", "fleet", "adapter"]:
    """How far an engine's refusal of an adapter reaches; the refusal must be among the observed failures.

    worker   another worker serves the same bytes, or another can still be tried: only this worker is blocked
    adapter  two engines have refused the bytes: the adapter is quarantined
    fleet    there is no other worker to try: every worker is blocked until the failure expires

    One refusal proves nothing: an engine answers the same for unusable bytes and for a lack of memory.
    """
    lora_id = adapter.lora_id
    copies = [worker.adapters[lora_id] for worker in observed.workers.values() if lora_id in worker.adapters]
    if any(held.state == "ready" and is_registered_digest(adapter, held) for held in copies):
        return "worker"
    failures = {id_: observed.failures.get((lora_id, id_)) for id_ in observed.workers}
    current = {id_: failure for id_, failure in failures.items() if failure is not None and failure.until > now}
    if sum(failure.code in ENGINE_REFUSALS for failure in current.values()) >= MOST_REFUSALS:
        return "adapter"
    fitting = (w.id for w in observed.workers.values() if w.can_take(adapter))
    return "worker" if any(id_ not in current for id_ in fitting) else "fleet"


def failure_everywhere(adapter: RegisteredAdapter, observed: ObservedFleet, now: float) -> AdapterFailure | None:
    """The failure that keeps the adapter from being loaded anywhere now; None while a worker tries it, or may try it.

    One that passes by itself goes before one that does not (`FINAL_CODES`), then the one that ends first. Where
    `MOST_TRIED` workers have found no good bytes, the others are not waited for.
    """
    lora_id = adapter.lora_id
    if lora_id in observed.inspecting or any(name == lora_id for name, _ in observed.load_began):
        return None
    if adapter.is_inspected:
        takers = [w for w in observed.workers.values() if w.can_take(adapter)]
        takers = [w for w in takers if w.has_agent or fleet_digest(adapter.source) is None]
    else:
        takers = [w for w in observed.workers.values() if w.state == "ready" and w.can_serve(adapter.base_model)]
    found = [observed.current_failure(lora_id, worker.id, now) for worker in takers]
    failures = [failure for failure in found if failure is not None]
    final = [failure for failure in failures if failure.code in FINAL_CODES]
    if len(final) >= MOST_TRIED:
        return min(final, key=lambda failure: failure.until)
    if not failures or len(failures) < len(found):
        return None
    return min(failures, key=lambda failure: (failure.code in FINAL_CODES, failure.until))


class FailureBook:
    """Failures by (lora_id, worker_id). One writer; `by_pair` may be read at any time and includes expired ones."""

    def __init__(self) -> None:
        self.by_pair: dict[Pair, AdapterFailure] = {}
        self._of: dict[str, dict[Pair, AdapterFailure]] = {}
        self._streaks: dict[Pair, tuple[int, float]] = {}

    def record_failure(
        self,
        pair: Pair,
        code: str,
        message: str,
        *,
        first_s: float,
        most_s: float,
        now: float,
        rng: Random,
        least_s: float = 0.0,
    ) -> AdapterFailure:
        """Record a failure. Each in a row blocks twice as long, from `first_s` up to `most_s`, at least `least_s`.

        Returns the failure. Up to a quarter of its time is taken off at random.
        """
        count, _ = self._streaks.get(pair, (0, 0.0))
        lasts_s = min(first_s * 2.0 ** min(count, 30), max(first_s, most_s))
        until = now + max(lasts_s * (1.0 - _JITTER * rng.random()), least_s)
        # The streak ends when the next failure comes later than the wait and as long again.
        self._streaks[pair] = (count + 1, until + lasts_s)
        failure = AdapterFailure(until=until, code=code, message=message)
        self.set_failure(pair, failure)
        return failure

    def set_failure(self, pair: Pair, failure: AdapterFailure) -> None:
        """Set the failure of a worker on which the adapter was not tried; its streak stays."""
        self.by_pair[pair] = self._of.setdefault(pair[0], {})[pair] = failure

    def record_success(self, pair: Pair) -> None:
        """Drop the pair's failure and its streak."""
        self._streaks.pop(pair, None)
        self._drop_failure(pair)

    def forget_adapter(self, lora_id: str) -> None:
        """Drop all failures and streaks of the adapter, so that it may be loaded anywhere again."""
        for pair in self._of.pop(lora_id, {}):
            del self.by_pair[pair]
        self._streaks = {pair: row for pair, row in self._streaks.items() if pair[0] != lora_id}

    def clear(self) -> None:
        """Drop all failures and streaks of all adapters."""
        self.by_pair.clear()
        self._of.clear()
        self._streaks.clear()

    def drop_expired(self, now: float) -> None:
        """Drop failures that no longer block, and streaks that are over."""
        for pair in [pair for pair, failure in self.by_pair.items() if failure.until <= now]:
            self._drop_failure(pair)
        for pair in [pair for pair, (_, until) in self._streaks.items() if until <= now]:
            del self._streaks[pair]

    def newest_failure(self, lora_id: str, now: float) -> AdapterFailure | None:
        """The adapter's failure that blocks longest, on any worker; None when none blocks now."""
        failures = [failure for failure in self._of.get(lora_id, {}).values() if failure.until > now]
        return max(failures, key=lambda failure: failure.until, default=None)

    def blocked_worker_count(self, lora_id: str, now: float) -> int:
        """Number of workers on which the adapter is blocked now."""
        return sum(failure.until > now for failure in self._of.get(lora_id, {}).values())

    def fleet_failure(self, lora_id: str, now: float) -> AdapterFailure | None:
        """The adapter's failure that blocks every worker now, or None."""
        failure = self.by_pair.get((lora_id, ANYWHERE))
        return failure if failure is not None and failure.until > now else None

    @property
    def failed_ids(self) -> Set[str]:
        """Adapters with any failure, expired ones included."""
        return self._of.keys()

    def _drop_failure(self, pair: Pair) -> None:
        """Drop the pair's failure, if there is one; its streak stays."""
        if self.by_pair.pop(pair, None) is not None:
            pairs = self._of[pair[0]]
            del pairs[pair]
            if not pairs:
                del self._of[pair[0]]
