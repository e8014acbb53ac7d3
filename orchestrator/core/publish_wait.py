"""What a publish waits for, and when it gives up: answers of agents about bytes, and loads on workers. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from orchestrator.core.failures import ENGINE_REFUSALS
from orchestrator.model.snapshot import AdapterFailure, Pair

UNSEEN_CODES = frozenset({"source_not_found", "adapter_incomplete", "digest_mismatch"})
"""Codes for bytes that are not there, not whole, or older ones: a network mount may show a new file seconds later."""
TORN_CODES = frozenset(
    {"adapter_config_invalid", "adapter_invalid", "tensor_unpaired", "weights_corrupt", "weights_empty"}
)
"""Codes for bytes that may be the first half of a file; see `TORN_S`."""
TORN_S = 5.0
"""Bytes that an agent finds broken for this long are broken. A guess: a mount that lags shows the end of a file within
a second or two of its beginning."""


def may_become_visible(code: str, since_s: float) -> bool:
    """Whether bytes that an agent refuses with this code may be right a moment later.

    since_s  seconds since the publish began
    """
    return code in UNSEEN_CODES or (code in TORN_CODES and since_s < TORN_S)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the loads of a version are.

    ready    workers on which it is ready, of those that count
    lacking  the others that count
    refused  the failure that no repetition mends; None without one
    """

    ready: frozenset[str]
    lacking: frozenset[str]
    is_done: bool
    refused: AdapterFailure | None


def load_progress(
    lora_id: str,
    able: Collection[str],
    replicas: int | None,
    ready: Collection[str],
    failures: Mapping[Pair, AdapterFailure],
    content_codes: Collection[str],
) -> LoadProgress:
    """How far the loads of a version are on the workers that may have it.

    able           workers that may have it: those that were there when the publish began, and still are
    replicas       how many of them must have it; None: all
    content_codes  codes about an adapter's bytes: other workers have the same bytes
    """
    counted = frozenset(able)
    found = counted.intersection(ready)
    needed = len(counted) if replicas is None else min(replicas, len(counted))
    refusals = (failures.get((lora_id, worker_id)) for worker_id in ("", *sorted(counted - found)))
    refused = next(
        (
            failure
            for failure in refusals
            if failure is not None and (failure.code in content_codes or failure.code in ENGINE_REFUSALS)
        ),
        None,
    )
    return LoadProgress(found, counted - found, bool(needed) and len(found) >= needed, refused)
