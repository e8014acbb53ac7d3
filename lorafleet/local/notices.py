"""What `lorafleet up` prints: settings in force, adapters of earlier runs, workers, addresses, and incidents."""

# ruff: noqa: T201  (people and scripts read this on standard output)

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from lorafleet.local import demo
from lorafleet.local.options import SERVICES, FleetOptions, prefix_of, unknown_variables
from lorafleet.service.failure import printable
from lorafleet.service.loops import backoff_s

_MOST_NAMED = 5
_NEWEST = 50
_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 0.2, 5.0
# The stream has a comment at least so often: `keep_alive_s` of the orchestrator, with time to spare.
_SILENCE_S = 60.0


def startup_notices(options: FleetOptions, environment: Mapping[str, str]) -> list[str]:
    """A line for each settings source besides the flags of `up`, and for variables that nothing reads."""
    lines = []
    prefixes = {prefix_of(service) for service in SERVICES}
    if names := sorted(name for name in environment if name.startswith(tuple(prefixes))):
        lines.append(f"settings from the environment: {', '.join(names)}")
    lines += [
        f"settings file of the {service}: {path}"
        for service in SERVICES
        if (path := options.options_of(service).config)
    ]
    if names := unknown_variables(environment):
        known_prefixes = " or ".join(sorted(prefixes))
        lines.append(f"no service reads {', '.join(names)}; settings begin with {known_prefixes}")
    return [*lines, *_gpu_notices(options)]


def _gpu_notices(options: FleetOptions) -> list[str]:
    """The line that says which GPUs the workers have, where --devices does not."""
    visible = ",".join(options.visible_gpus)
    if options.devices and visible:
        each = ", ".join(f"w{number}: {names}" for number, names in enumerate(options.devices))
        return [f"GPUs of each worker: {each}; visible are {visible}, and --devices and --workers choose others"]
    if options.workers > 1 and visible:
        return [
            f"all {options.workers} workers start on the same GPUs ({visible}), of which vLLM takes most of the memory;"
            " start fewer with --workers, or give each a part: -- --gpu-memory-utilization 0.4"
        ]
    return []


def earlier_adapter_notices(registered: Mapping[str, str | None], now: Collection[str], base_model: str) -> list[str]:
    """A line for adapters registered in earlier runs, and one for those of another base model.

    registered  lora_id -> base model, None if it is not known yet
    now         lora_ids of this run
    """
    others = {lora_id: base for lora_id, base in registered.items() if lora_id not in now}
    foreign = [lora_id for lora_id, base in others.items() if base not in (None, base_model)]
    lines = []
    if others_here := sorted(others.keys() - set(foreign)):
        lines.append(f"{len(others_here)} more are registered from earlier runs: {_first_names(others_here)}")
    if foreign:
        bases = ", ".join(sorted({str(others[lora_id]) for lora_id in foreign}))
        lines.append(
            f"{len(foreign)} from earlier runs are for base model {bases} and cannot be served by {base_model}:"
            f" {_first_names(foreign)}; `lorafleet adapters rm NAME` removes one; --state-dir keeps fleets apart"
        )
    return lines


def _first_names(names: Collection[str]) -> str:
    """The first few names, and `...` if there are more."""
    shown = sorted(names)[:_MOST_NAMED]
    return ", ".join(shown) + (", ..." if len(names) > _MOST_NAMED else "")


def held_back_notice(worker: str, state: str, command: str) -> str:
    """The line for a worker that an earlier run cordoned or drained, with the command that ends that.

    command  `lorafleet` with the flags that reach this fleet
    """
    undo = f"to undo that: {command} workers uncordon {worker}"
    if state == "cordoned":
        return f"{worker}: cordoned since an earlier run: it gets no adapters; {undo}"
    return f"{worker}: drained since an earlier run: it takes no requests; {undo}"


def starting_status(engine: str, now: str) -> str:
    """The status of a worker that is not up yet; `now` is its state, with a reason if there is one."""
    reason = now.splitlines()[0].removeprefix("starting").removeprefix(": ")
    return f"starting {engine} ({reason})" if reason else f"starting {engine}"


def print_ready(
    router: str,
    orchestrator: str,
    logs: Path,
    base_model: str,
    lora_ids: Sequence[str],
    *,
    has_keys: bool,
    ca: Path | None = None,
) -> None:
    """Print the line `ready router=... orchestrator=...`, then addresses and commands to paste."""
    print(f"ready router={router} orchestrator={orchestrator}")
    rows = [
        ("router", f"{router}/v1", "base URL for OpenAI clients"),
        ("models", f"{router}/v1/models", "the base model and the adapters"),
        ("console", f"{orchestrator}/ui", "the fleet in a browser: traffic, adapters, workers, decisions"),
        ("orchestrator", f"{orchestrator}/docs", "REST API: adapters, placements, workers, policy"),
        ("metrics", f"{router}/metrics", f"Prometheus{', with a key of scope metrics' if has_keys else ''}"),
        ("logs", str(logs), "one file for each process"),
    ]
    width = max(len(address) for _, address, _ in rows)
    for name, address, purpose in rows:
        print(f"  {name:<13} {address:<{width}}  {purpose}")
    if ca is not None:
        print("\nFor the command line, in this shell:")
        print(f"  export LORAFLEET_TLS_CA={ca} LORAFLEET_URL_ROUTER={router} LORAFLEET_URL_ORCHESTRATOR={orchestrator}")
    print("\nTry:")
    for line in curl_lines(router, base_model, lora_ids, has_keys=has_keys, ca=ca):
        print(f"  {line}")
    print(flush=True)


def curl_lines(
    router: str, base_model: str, lora_ids: Sequence[str], *, has_keys: bool, ca: Path | None = None
) -> list[str]:
    """Commands to paste: a request to the base model, one to an adapter, and the explanation of a routing decision."""
    key = ' -H "authorization: Bearer $KEY"' if has_keys else ""
    trusted = "" if ca is None else f" --cacert {ca}"
    script = demo.script_for(lora_ids)
    adapters = script.lora_ids[:1]

    def line(path: str, model: str, extra_fields: str = "") -> str:
        """A curl command that POSTs the demo's question for a model."""
        message = f'"messages": [{{"role": "user", "content": "{script.question}"}}]'
        body = f'{{"model": "{model}", {message}{extra_fields}}}'
        return f"curl -s{trusted} {router}{path}{key} -H 'content-type: application/json' -d '{body}'"

    return [
        *(
            line("/v1/chat/completions", model, f', "max_tokens": {script.max_tokens}')
            for model in (base_model, *adapters)
        ),
        line("/v1/route", *(adapters or [base_model])),
    ]


class IncidentPrinter:
    """Follows the orchestrator's events, and prints each incident once, oldest first."""

    def __init__(
        self, url: str, make_client: Callable[[], httpx.AsyncClient], say: Callable[[str], None], *, since: datetime
    ) -> None:
        """`since`: incidents before this time are not printed."""
        self._url = url
        self._make_client = make_client
        self._say = say
        self._since = since
        self._last_id = 0

    async def run(self) -> None:
        """Print incidents until cancelled; an orchestrator that is away is asked again."""
        failures = 0
        async with self._make_client() as client:
            client.timeout = httpx.Timeout(10, read=_SILENCE_S)
            while True:
                with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                    async for _ in self._news(client):
                        await self._print_new(client)
                        failures = 0
                failures += 1
                await asyncio.sleep(backoff_s(failures, _FIRST_BACKOFF_S, _MOST_BACKOFF_S))

    async def _news(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        """One item once the orchestrator's events are followed, and one after each incident. Raises httpx.HTTPError."""
        async with client.stream("GET", f"{self._url}/v1/events") as events:
            events.raise_for_status()
            yield None
            async for line in events.aiter_lines():
                if line == "event: incident":
                    yield None

    async def _print_new(self, client: httpx.AsyncClient) -> None:
        """Print the incidents that have not been. Raises httpx.HTTPError, ValueError, KeyError."""
        asked: dict[str, str | int] = {"kind": "incident", "limit": _NEWEST, "since": self._since.isoformat()}
        answer = await client.get(f"{self._url}/v1/history", params=asked)
        answer.raise_for_status()
        new = [item for item in answer.json()["data"] if item["id"] > self._last_id]
        for item in sorted(new, key=lambda item: item["id"]):
            self._last_id = item["id"]
            for line in incident_lines(item):
                self._say(line)


def incident_lines(item: Mapping[str, Any]) -> list[str]:
    """An incident in a line, and the next step in another if there is one. A cause may hold an engine's own words."""
    at = datetime.fromisoformat(item["at"]).astimezone(UTC)
    what = item["kind"].replace("_", " ")
    cause = printable(str(item["body"].get("cause", "")).partition("\n")[0])
    lines = [f"{at:%H:%M:%S} {printable(item['subject'] or 'fleet')}: {what}{f': {cause}' if cause else ''}"]
    return lines + ([f"         next: {item['next_step']}"] if item["next_step"] else [])
