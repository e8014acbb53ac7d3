"""The sim engines that all contenders stand before: their own counters, and caches emptied between contenders."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

_IDLE_S, _POLL_S = 60.0, 0.2


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Prompt tokens that engines have looked up and found cached, since they began."""

    queries: float = 0.0
    hits: float = 0.0

    def since(self, before: "PrefixCounts") -> "PrefixCounts":
        """What was counted in between."""
        return PrefixCounts(self.queries - before.queries, self.hits - before.hits)


@dataclass(frozen=True, slots=True)
class EngineFleet:
    """The engines, by URL, and a client for what no router is asked."""

    client: httpx.AsyncClient
    urls: Sequence[str]

    async def counts(self) -> PrefixCounts:
        """Of all engines together."""
        pages = [(await self.client.get(f"{url}/metrics")).raise_for_status().text for url in self.urls]
        return PrefixCounts(
            *(sum(_value(page, f"vllm:prefix_cache_{name}") for page in pages) for name in ("queries", "hits"))
        )

    async def clear(self) -> None:
        """Empty their caches once nothing runs there. Raises TimeoutError if something goes on for a minute."""
        async with asyncio.timeout(_IDLE_S):
            for url in self.urls:
                # Another process, which has no event to wait on.
                while _value((await self.client.get(f"{url}/metrics")).text, "vllm:num_requests_running"):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
                (await self.client.post(f"{url}/reset_prefix_cache")).raise_for_status()


def _value(page: str, name: str) -> float:
    """The value of a counter or gauge in a page of metrics."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        if family.name == name
        for sample in family.samples
        if not sample.name.endswith("_created")
    )
