"""One run of the benchmark: contenders on one core, stub engines and clients on the other, figures by name."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from benchmarks.relay.client import LoadClient
from benchmarks.relay.contenders import ADAPTERS, EXACT, NotStarted, Running, Stage, before_name, start_router
from benchmarks.relay.fleet import Spec
from benchmarks.relay.machine import cpu_ns, pinned, resident_mb
from benchmarks.relay.prompts import ChatKind, CountedPrompt, Requests, long_seen, shape
from benchmarks.scenes import lora_id
from lorafleet.tokenizer.chat import ChatTokenizer

_KNOWN_S = 60.0
_WAITING = "lorafleet_router_waiting_requests"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RelaySize:
    """How much is measured. seconds: of each contender's load in each round."""

    rounds: int
    seconds: float
    calls: int
    streams: int
    open_streams: int
    open_chunks: int
    blocks: int
    settle_s: float
    large_prompts: int
    lengths_kb: tuple[int, ...]


FULL = RelaySize(
    rounds=5,
    seconds=1.5,
    calls=1500,
    streams=256,
    open_streams=2000,
    open_chunks=100,
    blocks=100_000,
    settle_s=2.5,
    large_prompts=64,
    lengths_kb=(32, 33, 100, 400),
)
QUICK = RelaySize(
    rounds=1,
    seconds=0.2,
    calls=50,
    streams=16,
    open_streams=50,
    open_chunks=10,
    blocks=5_000,
    settle_s=0.0,
    large_prompts=4,
    lengths_kb=(32, 33),
)


@dataclass(slots=True)
class RelayBench:
    """What the rows are measured with.

    spreads    of each figure over its rounds, as a share of the figure
    quietest   CPU microseconds of a request in the round where they were fewest, by contender and kind of request
    """

    stage: Stage
    other_core: int
    model_dir: Path
    size: RelaySize
    spreads: list[float] = field(default_factory=list)
    quietest: dict[str, float] = field(default_factory=dict)
    _shapes: dict[str, CountedPrompt] = field(default_factory=dict)
    _tokenizer: ChatTokenizer | None = None

    @property
    def tokenizer(self) -> ChatTokenizer:
        if self._tokenizer is None:
            self._tokenizer = ChatTokenizer.from_dir(self.model_dir)
        return self._tokenizer

    def requests(self, ask: ChatKind, running: Running) -> Requests:
        """Of this kind, for this contender."""
        return Requests(ask, running.models, running.port, self.counted(ask))

    def counted(self, ask: ChatKind) -> CountedPrompt:
        """The tokens of such a prompt."""
        if ask.name not in self._shapes:
            self._shapes[ask.name] = shape(ask, self.tokenizer)
        return self._shapes[ask.name]

    def middle(self, values: Sequence[float]) -> float:
        """The median over rounds; how far they lie apart is remembered."""
        found = median(values)
        if len(values) > 1 and found:
            self.spreads.append((max(values) - min(values)) / 2 / abs(found))
        return found

    # --- fleets and routers -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def fleet(self, spec: Spec) -> Iterator[Stage]:
        """Stub engines and control plane; the stage in front of them."""
        spec = msgspec.structs.replace(spec, model_dir=str(self.model_dir))
        command = [sys.executable, "-P", "-m", "benchmarks.relay.fleet", msgspec.json.encode(spec).decode()]
        with pinned(self.other_core):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.stage.environment
            )
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise NotStarted(f"the stub fleet ended with {process.wait()}; its traceback is above")
            ports = json.loads(line)
            yield replace(self.stage, engines=tuple(ports["engines"]), control=ports["control"])
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait()

    @contextlib.contextmanager
    def router(self, stage: Stage, name: str, *, adapters: int = 10, is_before: bool = False) -> Iterator[Running]:
        """Ours in front of a fleet, or that of the version before, once it knows what its engines have."""
        running = start_router(stage, name, tuple(map(lora_id, range(adapters))), is_before=is_before)
        try:
            self.until_known(running, stage)
            yield running
        finally:
            running.stop()

    @contextlib.contextmanager
    def ours(self, stage: Stage, *flags: str, name: str = EXACT, has_events: bool = True) -> Iterator[list[Running]]:
        """This version in front of a fleet, and the one before where there is one; once both know what engines have."""
        with contextlib.ExitStack() as stack:
            started = []
            for one in (name, *([before_name(name)] if stage.before else [])):
                running = start_router(stage, one, ADAPTERS, *flags, is_before=one != name)
                stack.callback(running.stop)
                if has_events:
                    self.until_known(running, stage)
                started.append(running)
            yield started

    def predicted_tokens(self, running: Running, ask: ChatKind) -> tuple[int | str, int]:
        """Cached tokens that a router of ours predicts for such a prompt, or its refusal; and what is cached."""
        requests = self.requests(ask, running)
        predicted = _predicted(running, requests.next().partition(b"\r\n\r\n")[2])
        return predicted, self.counted(ask).cached_tokens

    async def waiting(self, running: Running) -> float:
        """Requests that wait in a router of ours for room at an engine."""
        text = await asyncio.to_thread(_fetched, running, "/metrics")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(_WAITING))

    def until_known(self, running: Running, stage: Stage) -> None:
        """Until every worker's blocks are followed, and a prompt's hit is predicted to the token.

        raises NotStarted when that does not come about
        """
        deadline = time.monotonic() + _KNOWN_S
        while True:
            predicted, expected = self.predicted_tokens(running, long_seen())
            metrics = _fetched(running, "/metrics")
            followed = re.search(r'^lorafleet_router_kv_feeds\{source="ledger"\} (\S+)', metrics, re.MULTILINE)
            feeds = int(float(followed[1])) if followed else 0
            if predicted == expected and feeds == len(stage.engines):
                return
            if time.monotonic() > deadline:
                raise NotStarted(
                    f"{running.name}: after {_KNOWN_S:.0f} s it predicts {predicted} cached tokens of a prompt of which"
                    f" {expected} are cached, and follows {feeds} of {len(stage.engines)} engines' blocks"
                )
            time.sleep(0.2)

    # --- measures ---------------------------------------------------------------------------------------------

    async def costs(self, runnings: Sequence[Running], ask: ChatKind, connections: int) -> dict[str, list[float]]:
        """CPU microseconds of each contender's router per request, one figure a round; they take turns."""
        found: dict[str, list[float]] = {running.name: [] for running in runnings}
        idle = await self.idle([running for running in runnings if running.kind == "ours"])
        async with _clients(runnings) as clients:
            totals = {r.name: await self._warmed(clients[r.name], self.requests(ask, r), connections) for r in runnings}
            await self.settle()
            for running in self._in_turn(runnings):
                client, total = clients[running.name], totals[running.name]
                before = cpu_ns(running.pid)
                await client.run(self.requests(ask, running), total=total, connections=connections)
                rested_ns = 0.0
                if running.kind == "ours":
                    # What ours puts off until a request is long over is paid here, too.
                    rested_ns = await self.settle() * idle[running.name] * 1e9
                found[running.name].append((cpu_ns(running.pid) - before - rested_ns) / total / 1e3)
        self.quietest |= {f"{name}, {ask.name}": min(values) for name, values in found.items()}
        return found

    async def idle(self, runnings: Sequence[Running]) -> dict[str, float]:
        """CPU seconds a second of each with nothing to do."""
        await self.settle()
        before = {running.name: cpu_ns(running.pid) for running in runnings}
        began = time.perf_counter()
        await asyncio.sleep(self.size.seconds * 2)
        wall_s = time.perf_counter() - began
        return {r.name: (cpu_ns(r.pid) - before[r.name]) / 1e9 / wall_s for r in runnings}

    async def settle(self) -> float:
        """Wait until nothing is left to do about requests that have ended; the seconds that took."""
        began = time.perf_counter()
        await asyncio.sleep(self.size.settle_s)
        return time.perf_counter() - began

    async def slopes(
        self, runnings: Sequence[Running], few: ChatKind, many: ChatKind, connections: int, total: int
    ) -> dict[str, list[float]]:
        """CPU microseconds per streamed chunk: two lengths, so that the request's own cost is not in it.

        What the router does in the background meanwhile is taken off, too.
        """
        found: dict[str, list[float]] = {running.name: [] for running in runnings}
        idle = await self.idle(runnings)
        async with _clients(runnings) as clients:
            for running in runnings:
                await clients[running.name].run(self.requests(few, running), total=connections, connections=connections)
            for running in self._in_turn(runnings):
                used = []
                for ask in (few, many):
                    requests, client = self.requests(ask, running), clients[running.name]
                    before = cpu_ns(running.pid)
                    # Out of step, as clients are.
                    over_s = min(1.0, self.size.seconds) if ask.is_paced else 0.0
                    outcome = await client.run(requests, total=total, connections=connections, over_s=over_s)
                    used.append((cpu_ns(running.pid) - before) / 1e3 - idle[running.name] * outcome.wall_s * 1e6)
                found[running.name].append((used[1] - used[0]) / total / (many.chunks - few.chunks))
        return found

    async def latencies(
        self, runnings: Sequence[Running], times_of: Callable[[LoadClient, Running], Awaitable[list[float]]]
    ) -> dict[str, list[list[float]]]:
        """The times that `times_of` measures, in seconds and sorted, for each contender and round."""
        found: dict[str, list[list[float]]] = {running.name: [] for running in runnings}
        async with _clients(runnings) as clients:
            for running in self._in_turn(runnings):
                found[running.name].append(sorted(await times_of(clients[running.name], running)))
        return found

    async def peak_mb(self, running: Running, work: "asyncio.Task[T]") -> float:
        """The most resident memory while that is done."""
        most = resident_mb(running.pid)
        while not work.done():
            await asyncio.wait([work], timeout=0.2)
            most = max(most, resident_mb(running.pid))
        return most

    async def _warmed(self, client: LoadClient, requests: Requests, connections: int) -> int:
        """How many requests take about `size.seconds`."""
        few = connections * 8
        await client.run(requests, total=few, connections=connections)
        wall_s = (await client.run(requests, total=few, connections=connections)).wall_s
        return max(connections, int(few * self.size.seconds / wall_s))

    def _in_turn(self, runnings: Sequence[Running]) -> Iterator[Running]:
        for _ in range(self.size.rounds):
            yield from runnings


@contextlib.asynccontextmanager
async def _clients(runnings: Sequence[Running]) -> AsyncIterator[dict[str, LoadClient]]:
    clients = {running.name: LoadClient(running.name, running.port, running.tls) for running in runnings}
    try:
        yield clients
    finally:
        for client in clients.values():
            client.close()


def _fetched(running: Running, path: str) -> str:
    with urllib.request.urlopen(f"{running.url}{path}", timeout=10, context=running.tls) as answer:
        text: str = answer.read().decode()
        return text


def _predicted(running: Running, body: bytes) -> int | str:
    """The prompt's cached tokens, as the router predicts them; what it says instead, where it refuses."""
    request = urllib.request.Request(f"{running.url}/v1/chat/completions", data=body)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=10, context=running.tls) as answer:
            return int(answer.headers["x-lorafleet-cached-tokens"])
    except urllib.error.HTTPError as exc:
        return exc.read().decode(errors="replace")
    except OSError as exc:
        return repr(exc)
