"""What this router sent where, told to the orchestrator: demand, and the word that nothing is in flight."""

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from orchestrator.wire import AdapterUse, UsageReport
from router.core.index import WorkerId
from router.core.load import LoadBook

# Every adapter version ever used would be in every report, for weeks. Demand looks at the last minute.
_FORGET_AFTER_S = 900.0


@dataclass(slots=True)
class _Use:
    requests: int = 0
    prompt_tokens: int = 0
    last_at: float = 0.0


@dataclass(slots=True)
class Usage:
    """Cumulative counts per (worker, engine name) since this router's boot."""

    router_id: str
    load: LoadBook
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _uses: dict[tuple[WorkerId, str], _Use] = field(default_factory=dict)
    _seq: "itertools.count[int]" = field(default_factory=itertools.count)

    def dispatched(self, worker: WorkerId, engine_name: str, prompt_tokens: int, now: float) -> None:
        """Count one request that is about to be sent."""
        use = self._uses.setdefault((worker, engine_name), _Use())
        use.requests += 1
        use.prompt_tokens += prompt_tokens
        use.last_at = now

    def forget(self, worker: WorkerId) -> None:
        """Drop a gone worker's counts."""
        for key in [key for key in self._uses if key[0] == worker]:
            del self._uses[key]

    def report(self, revision_seen: int, now: float) -> UsageReport:
        """Everything so far; the receiver takes differences, so a lost report costs nothing."""
        in_flight = {(worker, name): count for worker, name, count in self.load.in_flight()}
        # One that was forgotten and comes back starts at zero, as one that was never there does.
        for key in [k for k, use in self._uses.items() if k not in in_flight and now - use.last_at > _FORGET_AFTER_S]:
            del self._uses[key]
        uses = tuple(
            AdapterUse(
                worker_id=worker,
                engine_name=name,
                requests=use.requests,
                prompt_tokens=use.prompt_tokens,
                in_flight=in_flight.get((worker, name), 0),
                last_dispatch_age_s=now - use.last_at,
            )
            for (worker, name), use in self._uses.items()
        )
        return UsageReport(
            router_id=self.router_id,
            boot_id=self.boot_id,
            seq=next(self._seq),
            revision_seen=revision_seen,
            uses=uses,
        )


async def send_usage(
    client: httpx.AsyncClient, url: str, usage: Usage, revision: Callable[[], int], now: Callable[[], float]
) -> None:
    """One report to the orchestrator; raises httpx.HTTPError when it does not arrive."""
    answer = await client.post(f"{url}/v1/usage", json=usage.report(revision(), now()).model_dump())
    answer.raise_for_status()
