"""One request in the queue."""

from math import inf
from typing import Any

import msgspec

from router.core.kv.index import WorkerId
from router.core.schedule.request import HashedRequest, PrefixMatch


class QueuedRequest(msgspec.Struct, eq=False, kw_only=True):
    """A request that waits for room at an engine, or would if there is none.

    tenant, adapter  the share that it counts against
    weight           of the adapter within its tenant; 2.0 gets twice the share of 1.0
    priority         order within one tenant and adapter, lower first, as in vLLM
    size_bytes       memory that it holds while it waits
    deadline_at      time after which the client no longer wants the answer
    most_wait_s      refused at once where its predicted wait is longer; infinite: never
    payload          the caller's own
    matched          its prefix match, and when that was made
    place_s          its place among those of one priority: when it came, later by the service of its
                     program; infinite before it is queued
    number           order of arrival
    likely_worker, work_s   the replica that it would go to as things stand, and its seconds of work there
    expected_s, enqueued_at  predicted wait when it was enqueued, 0.0 without a prediction; and when that was
    wants_slot       it waits for an adapter slot at the likely replica, or behind a request that does
    """

    hashed: HashedRequest
    tenant: str = ""
    adapter: str = ""
    weight: float = 1.0
    priority: float = 0.0
    size_bytes: int = 0
    deadline_at: float | None = None
    most_wait_s: float = inf
    payload: Any = None
    matched: tuple[PrefixMatch, float] | None = None
    place_s: float = inf
    number: int = 0
    likely_worker: WorkerId | None = None
    work_s: float = 0.0
    expected_s: float = 0.0
    enqueued_at: float = 0.0
    wants_slot: bool = False
    is_waiting: bool = False
