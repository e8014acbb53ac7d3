"""The lease as a coordination.k8s.io/v1 Lease, which only a PUT with the resourceVersion that was read may change.

`acquireTime`, `renewTime`, `leaseDurationSeconds` and `leaseTransitions` are set for people and tools. Decisions use
`holderIdentity` and an annotation with what a Lease has no field for: the holder's URL, the beat that shows a renewal
without a clock, and a duration below a whole second.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

from lorafleet.kube.client import Json, KubeClient
from lorafleet.kube.errors import KubeConflict, KubeError, KubeNotFound
from lorafleet.service.times import utc_text
from orchestrator.core.errors import LeaseUnreachable
from orchestrator.core.lease import LeaseRecord

ANNOTATION = "lorafleet.io/hold"


class KubeLease:
    """A lease in a Kubernetes Lease object. PATCH is never sent: without a resourceVersion it would lock nothing.

    timeout_s   deadline of one call; less than the lease's duration, so that a call that hangs can be tried again
    """

    place = "the API server"
    is_absence_new = False  # pods start at any time, and a Lease is deleted with one command: a first start waits

    def __init__(
        self, kube: KubeClient, *, namespace: str, name: str, timeout_s: float, wall: Callable[[], float] = time.time
    ) -> None:
        self._kube = kube
        self._what = f"Lease {namespace}/{name}"
        self._name = name
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._timeout_s = timeout_s
        self._wall = wall
        self._known: Json | None = None

    async def read(self) -> LeaseRecord | None:
        """The record; None when there is no Lease. Raises LeaseUnreachable.

        Keeps the Lease, whose version the next `write` replaces.
        """
        try:
            self._known = await self._kube.get(f"{self._folder}/{self._name}", timeout_s=self._timeout_s)
        except KubeNotFound:
            self._known = None
        except KubeError as exc:
            raise self._unreachable_error(exc) from exc
        return None if self._known is None else record_in_lease(self._known)

    async def write(self, new: LeaseRecord, seen: LeaseRecord | None) -> bool:
        """Create the Lease, or replace exactly the version last read.

        False after a conflict, or if that version is not `seen`. Raises LeaseUnreachable.
        """
        known = self._known
        if (None if known is None else record_in_lease(known)) != seen:
            return False
        body = lease_with_record(known, new, name=self._name, at=self._wall())
        try:
            if known is None:
                self._known = await self._kube.post(self._folder, body, timeout_s=self._timeout_s)
            else:
                self._known = await self._kube.put(f"{self._folder}/{self._name}", body, timeout_s=self._timeout_s)
        except (KubeConflict, KubeNotFound):  # changed or deleted since it was read
            return False
        except KubeError as exc:
            raise self._unreachable_error(exc) from exc
        return True

    async def is_gone(self, hold: LeaseRecord) -> bool:  # noqa: ARG002  (the interface's)
        """False: a pod that cannot be reached may still act."""
        return False

    def close(self) -> None:
        """Do nothing: the client is closed elsewhere."""

    def _unreachable_error(self, exc: KubeError) -> LeaseUnreachable:
        """The lease's error for an error of the API server."""
        return LeaseUnreachable(f"{self._what}: {exc}")


def record_in_lease(lease: Json) -> LeaseRecord:
    """The record in a Lease. Without our annotation it has no URL and the duration of the spec."""
    spec = lease.get("spec") or {}
    noted: Any = {}
    with suppress(ValueError):
        noted = json.loads(((lease.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION, "{}"))
    noted = noted if isinstance(noted, dict) else {}
    holder = str(spec.get("holderIdentity") or "")
    return LeaseRecord(
        holder=holder,
        url=_text_or_empty(noted.get("url")),
        beat=int(_number_or(noted.get("beat"), 0)),
        duration_s=_number_or(noted.get("duration_s"), _number_or(spec.get("leaseDurationSeconds"), 1.0)),
        is_released=not holder,
    )


def lease_with_record(known: Json | None, hold: LeaseRecord, *, name: str, at: float) -> Json:
    """The Lease to send: `known`, with its resourceVersion and foreign fields, and this record. `at`: Unix time."""
    lease: Json = deepcopy(known) if known is not None else {"metadata": {"name": name}}
    spec: Json = lease.setdefault("spec", {})
    annotations = lease["metadata"].setdefault("annotations", {})
    annotations[ANNOTATION] = json.dumps({"url": hold.url, "beat": hold.beat, "duration_s": hold.duration_s})
    now = utc_text(datetime.fromtimestamp(at, UTC), "microseconds")
    if hold.is_released:
        spec["holderIdentity"] = ""
    elif spec.get("holderIdentity") != hold.holder:
        spec["holderIdentity"], spec["acquireTime"] = hold.holder, now
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (known is not None)
    spec["renewTime"] = now
    spec["leaseDurationSeconds"] = max(1, math.ceil(hold.duration_s))
    return lease | {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}


def _text_or_empty(value: object) -> str:
    """The value if it is text, else ""."""
    return value if isinstance(value, str) else ""


def _number_or(value: object, otherwise: float) -> float:
    """The value if it is a finite number of at least 0, else `otherwise`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if is_number else otherwise  # type: ignore[arg-type]
