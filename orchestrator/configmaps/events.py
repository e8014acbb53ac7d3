"""Kubernetes Events that tell people what is wrong with their objects."""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from lorafleet.kube.client import Json, KubeClient
from lorafleet.kube.errors import KubeConflict, KubeError
from lorafleet.service.times import utc_text
from orchestrator.configmaps.objects import name_of, uid_of

log = structlog.get_logger()

_MOST_WAITING = 2000
_MOST_REMEMBERED = 50_000
_MOST_CHARACTERS = 1000  # of a message; the API server allows 1,024 bytes
_AGAIN_S = 3000.0  # an API server keeps an Event for an hour (--event-ttl)


class KubeEvents:
    """Sends Events in the background; one that holds for longer is sent again. A failed send is only logged."""

    def __init__(
        self,
        kube: KubeClient,
        *,
        namespace: str,
        reporter: str,
        wall: Callable[[], float] = time.time,
        call_s: float = 5.0,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._folder = f"/api/v1/namespaces/{namespace}/events"
        self._reporter = reporter
        self._wall = wall
        self._call_s = call_s
        self._sent: dict[str, tuple[float, int]] = {}  # hash -> when it was sent last, and how often
        self._waiting: asyncio.Queue[Json] = asyncio.Queue(_MOST_WAITING)

    def warn(self, about: Json, reason: str, message: str) -> None:
        """Queue and log a Warning Event about the object, unless the same was queued of late. A full queue drops it."""
        event_hash = hashlib.sha256(f"{uid_of(about)} {reason} {message}".encode()).hexdigest()[:16]
        now = self._wall()
        sent_at, count = self._sent.get(event_hash, (-math.inf, 0))
        if now - sent_at < _AGAIN_S:
            return
        if len(self._sent) >= _MOST_REMEMBERED:
            self._sent.clear()
        self._sent[event_hash] = now, count + 1
        if not count:
            log.warning("object refused", object=name_of(about), reason=reason, message=message)
        if not self._waiting.full():
            self._waiting.put_nowait(self._event_object(about, event_hash, reason, message, count + 1))

    async def run(self) -> None:
        """Send queued Events until cancelled. One that cannot be sent is logged and dropped."""
        while True:
            event = await self._waiting.get()
            try:
                await self._send_event(event)
            except KubeError as exc:
                log.info("event not sent", object=event["involvedObject"]["name"], error=str(exc))

    async def _send_event(self, event: Json) -> None:
        """Create the Event; one that is there already gets the time of now, and a count of at least 2."""
        try:
            await self._kube.post(self._folder, event, timeout_s=self._call_s)
        except KubeConflict:
            again = {"lastTimestamp": event["lastTimestamp"], "count": max(2, event["count"])}
            await self._kube.patch(f"{self._folder}/{name_of(event)}", again, timeout_s=self._call_s)

    def _event_object(self, about: Json, event_hash: str, reason: str, message: str, count: int) -> Json:
        """The Event object to send the `count`th time. `event_hash`: hash in its name, by which repeats are found."""
        now = utc_text(datetime.fromtimestamp(self._wall(), UTC), "seconds")
        cut = message if len(message) <= _MOST_CHARACTERS else message[: _MOST_CHARACTERS - 1] + "…"
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{name_of(about)[:200].rstrip('-.')}.{event_hash}", "namespace": self._namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "namespace": self._namespace,
                "name": name_of(about),
                "uid": uid_of(about),
            },
            "type": "Warning",
            "reason": reason,
            "message": cut,
            "source": {"component": "lorafleet-orchestrator"},
            "reportingComponent": "lorafleet.io/orchestrator",
            "reportingInstance": self._reporter,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": count,
        }


def reason_of(code: str) -> str:
    """The reason of an Event: the error code in CamelCase."""
    return "".join(word.capitalize() for word in code.split("_"))
