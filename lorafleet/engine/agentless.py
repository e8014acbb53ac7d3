"""Reads a stock vLLM without an agent over its own HTTP API, and builds the report that an agent would send.

Nothing reads the adapter files of such an engine, so the reports have no digest, and an adapter is identified by the
engine's name for it. If a name gets another path, the engine counts as a new boot, because its cached blocks no longer
belong to that name. Its process start stays the same, see `process_boot_id`.
"""

import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any
from urllib.parse import urlsplit

from lorafleet.engine.metrics_page import SERVER_INFO, EngineMetrics, parse_metrics, transfer_config
from lorafleet.engine.rates import EngineRates
from lorafleet.identity import AdapterLocation, lora_id_of
from lorafleet.kv.connectors import ConnectorVerdict, EngineSalt, apply_setting, verdict_of_running_engine
from lorafleet.kv.sources import KvEventEndpoints, kv_event_endpoints
from lorafleet.service.loops import backoff_s
from lorafleet.service.network.urls import is_http, without_secrets
from workers.wire import Load, LoraCapacity, LoraInfo, Metadata, ModelCard, RuntimeConfig, Transport, WorkerAdapter

AGENTLESS_BOOT_ID = "none"

Get = Callable[[str], Awaitable[bytes]]
"""GETs a path and returns the body; raises `StatusRefused` for an answer that is not 200, OSError for none."""

# vLLM does not report it; its default is 256, on large GPUs 1,024. Too low a number makes requests wait for nothing.
_MAX_NUM_SEQS = 256
# Errors of parsing answers in an unexpected form.
_PARSE_ERRORS = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
_FIRST_RETRY_S, _MOST_RETRY_S = 1.0, 300.0
"""Pauses between questions about its configuration that an engine does not answer, each of which delays a report."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class StatusRefused(ConnectionError):
    """An answer whose HTTP status is not 200, such as the 404 of an engine that does not have the path."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class AgentlessEngine:
    """Polls one engine. Adapters are read only from vLLM: other engines answer for names they do not have."""

    def __init__(
        self,
        worker_id: str,
        url: str,
        get: Get,
        *,
        zone: str = "",
        node: str = "",
        kv_events: tuple[str, ...] = (),
        kv_replay: tuple[str, ...] = (),
        salt: EngineSalt = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        kv_events, kv_replay  its event sockets; empty asks the engine
        salt                  the operator's setting for its KV connector
        """
        self.worker_id = worker_id
        self.url = url.rstrip("/")
        self._get = get
        self._location = {"zone": zone, "node": node}
        self._given_sockets = (kv_events, kv_replay)
        self._salt: EngineSalt = salt
        self._connector: Mapping[str, Any] | None = None
        self._is_connector_asked = self._is_kv_asked = False
        self._unanswered, self._ask_again_at = 0, -inf
        self._clock = clock
        self._load = EngineLoad()
        self._started_at: float | None = None
        self._kv = Transport(engine_url=self.url)
        self._paths: Mapping[str, str] = {}
        self._path_changes = 0

    async def report(self) -> Metadata:
        """Poll the engine, update its learned rates and path changes, and return the report.

        raises  OSError if it cannot be reached, ValueError for answers unlike vLLM's
        """
        try:
            return await self._report()
        except _PARSE_ERRORS as exc:
            raise ValueError(f"{self.url} does not answer as vLLM does: {exc!r}") from exc

    async def _report(self) -> Metadata:
        """Read health, models and metrics, add them to the learned state, and build the report.

        Raises ValueError if the engine lists no base model, and the errors of the requests.
        """
        await self._get("/health")
        models = _parse_models(await self._get("/v1/models"), self.url)
        metrics = parse_metrics((await self._get("/metrics")).decode())
        base = next((model for model in models if not model.get("parent")), None)
        if base is None:
            raise ValueError(f"{self.url}/v1/models lists no base model")
        dialect = str(base.get("owned_by") or "unknown")
        paths = {str(m["id"]): str(m.get("root") or "") for m in models if m.get("parent") and dialect == "vllm"}
        await self._update_state(metrics, paths)
        now = self._clock()
        self._load.add(metrics, now)
        name = str(base["id"])
        return Metadata(
            instance_id=self.worker_id,
            **self._location,
            model=ModelCard(
                name=name,
                base_model=name,
                path=str(base.get("root") or "") if dialect == "vllm" else "",
                runtime_config=_runtime_config(base, metrics),
            ),
            transport=self._kv.model_copy(update={"dialect": dialect}),
            lora=_lora_info(name, paths, metrics, self._connector_verdict(metrics)),
            load=self._load.current(now),
            agent_boot_id=AGENTLESS_BOOT_ID,
            engine_boot_id=f"{metrics.started_at:.2f}" + (f"+{self._path_changes}" if self._path_changes else ""),
        )

    async def _update_state(self, metrics: EngineMetrics, paths: Mapping[str, str]) -> None:
        """Add adapter paths and count changed ones; after a restart forget all and ask for the configuration again."""
        if metrics.started_at != self._started_at:
            self._load, self._paths, self._path_changes = EngineLoad(), {}, 0
            self._kv, self._connector = Transport(engine_url=self.url), None
            self._is_kv_asked = self._is_connector_asked = False
            self._unanswered, self._ask_again_at = 0, -inf
            self._started_at = metrics.started_at
        await self._ask_for_configuration()
        self._path_changes += any(self._paths.get(name, path) != path for name, path in paths.items())
        # Unloaded names are kept, since their blocks outlive the unload (vLLM 0.32, seen running).
        self._paths = {**self._paths, **paths}

    async def _ask_for_configuration(self) -> None:
        """Ask for the event sockets and the KV connector, once a start. No answer in time: a later report asks again.

        Otherwise an engine that was slow once would get no adapters, or have its cache estimated, until it restarts.
        """
        if self._clock() < self._ask_again_at:
            return
        if not self._is_kv_asked:
            with suppress(OSError):
                self._kv, self._is_kv_asked = await self._event_transport(), True
        if not self._is_connector_asked:
            with suppress(OSError):
                self._connector, self._is_connector_asked = await self._transfer_config(), True
        if not (self._is_kv_asked and self._is_connector_asked):
            self._unanswered += 1
            self._ask_again_at = self._clock() + backoff_s(self._unanswered, _FIRST_RETRY_S, _MOST_RETRY_S)

    def _connector_verdict(self, metrics: EngineMetrics) -> ConnectorVerdict:
        """The verdict on the engine's KV connector, after the operator's setting."""
        found = verdict_of_running_engine(
            self._connector,
            offloading=metrics.offloading,
            has_connector=metrics.has_connector,
            has_answered=self._is_connector_asked,
        )
        return apply_setting(self._salt, found)

    async def _get_if_there(self, path: str) -> bytes | None:
        """The body at this path; None where the engine says that it has no such path. Raises OSError for no answer."""
        try:
            return await self._get(path)
        except StatusRefused as exc:
            if exc.status >= 500:
                raise
            return None

    async def _transfer_config(self) -> Mapping[str, Any] | None:
        """Ask the engine for its KV transfer config, an expensive answer; None if unknown. Raises OSError for none."""
        info = await self._get_if_there(SERVER_INFO)  # only the development mode has it
        return None if info is None else transfer_config(info)

    async def _event_transport(self) -> Transport:
        """The configured KV event sockets, else those that the engine reports when asked.

        Without any its cache is estimated. Raises OSError for no answer.

        source  vLLM 0.32 entrypoints/serve/instrumentator/basic.py: rank -> KVEventsConfig, ports resolved
        """
        events, replay = self._given_sockets
        found = KvEventEndpoints(events, replay if len(replay) == len(events) else ())
        if not events:
            sources = await self._get_if_there("/kv_event_sources")
            with suppress(ValueError, *_PARSE_ERRORS):  # an older vLLM, or another engine
                ranks = json.loads(sources or "{}")
                configs = [dict(ranks[rank]) for rank in sorted(ranks, key=int)]
                found = kv_event_endpoints(urlsplit(self.url).hostname or "", configs)
        return Transport(engine_url=self.url, kv_events=found.events, kv_replay=found.replay, kv_topic=found.topic)


class EngineLoad:
    """The last metrics of one engine, and the rates learned from all of them; agents use it for their own engine.

    read_at   time of the last metrics
    moved_at  when the metrics last changed, as they do when the engine computes; None if they never did
    """

    def __init__(self) -> None:
        self.rates = EngineRates()
        self._scrape = EngineMetrics()
        self.read_at: float | None = None
        self.moved_at: float | None = None
        self._answered_at: float | None = None  # the engine, before its metrics were read

    def begin(self, at_s: float) -> None:
        """Start again, with an engine that answered at `at_s` and whose metrics are not read yet."""
        self.forget_reading()
        self.rates, self._answered_at = EngineRates(), at_s

    @property
    def has_work(self) -> bool:
        """Whether requests ran or waited in the engine by the last metrics."""
        return self._scrape.running + self._scrape.waiting > 0

    def add(self, metrics: EngineMetrics, at_s: float) -> None:
        """Replace the last metrics by those read at `at_s`, note when they changed, and update the learned rates."""
        if self.read_at is not None and metrics != self._scrape:
            self.moved_at = at_s
        self._scrape, self.read_at = metrics, at_s
        self.rates.add(replace(metrics, at_s=at_s))

    def forget_reading(self) -> None:
        """Forget the last metrics of an engine that is gone, and their times; learned rates stay."""
        self._scrape, self.read_at, self.moved_at = EngineMetrics(), None, None

    def current(self, now: float, *, load_seconds: float = 0.0) -> Load:
        """The load for a report: last metrics and learned rates. `load_seconds`: measured time of an adapter load."""
        metrics, rates = self._scrape, self.rates
        answered_at = self._answered_at if self.read_at is None else self.read_at
        return Load(
            running=metrics.running,
            waiting=metrics.waiting,
            waiting_for_slot=metrics.waiting_for_slot,
            kv_usage=metrics.kv_usage,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_tokens_per_s=rates.decode_tokens_per_s,
            token_s=rates.decode_step.token_s,
            sequence_s=rates.decode_step.sequence_s,
            context_token_s=rates.decode_step.context_token_s,
            inter_token_s=rates.inter_token_s,
            mean_output_tokens=rates.mean_output_tokens,
            mean_request_s=rates.mean_request_s,
            load_seconds=load_seconds,
            read_age_s=0.0 if answered_at is None else now - answered_at,
            still_s=None if self.read_at is None or self.moved_at is None else self.read_at - self.moved_at,
        )


def engines_by_id(entries: Iterable[str]) -> dict[str, str]:
    """Worker id -> URL, from `url` or `id=url`; without an id it is host and port.

    raises  ValueError naming the invalid entry
    """
    found: dict[str, str] = {}
    for name in entries:
        id_, equals, url = name.rpartition("=")
        is_url = is_http(url)
        id_ = id_ or (urlsplit(url).netloc if is_url and not equals else "")
        if is_url and not equals and not _ID.fullmatch(id_):
            example = "v6" if "[" in id_ else "w0"
            raise ValueError(
                f"engines: {url!r} needs an id, because {id_!r} cannot be one (letters, digits and .:_-, at most 100):"
                f" give it as {example}={url}"
            )
        if not is_url or not _ID.fullmatch(id_):
            raise ValueError(
                f"engines: {without_secrets(name)!r} must be http://host:port or id=http://host:port,"
                " the id of letters, digits and .:_-"
            )
        if id_ in found:
            raise ValueError(f"engines: {id_!r} is named twice; give one of them another id, as id={url}")
        found[id_] = url.rstrip("/")
    return found


def process_boot_id(engine_boot_id: str) -> str:
    """The part of an engine boot id that changes only with the engine's process."""
    return engine_boot_id.partition("+")[0]


def has_start_time(engine_boot_id: str) -> bool:
    """Whether the boot id changes with every start; some engines' /metrics have no start time."""
    return not engine_boot_id.startswith("0.00")


def _parse_models(body: bytes, url: str) -> list[Mapping[str, Any]]:
    """The models in an answer of `/v1/models`; raises ValueError."""
    try:
        return [dict(item) for item in json.loads(body)["data"] if isinstance(item["id"], str)]
    except (ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"{url}/v1/models is no list of models: {body[:100]!r}") from exc


def _runtime_config(base: Mapping[str, Any], metrics: EngineMetrics) -> RuntimeConfig:
    """The engine's sizes for the report; its batch size is assumed, since vLLM does not report it."""
    return RuntimeConfig(
        block_size=metrics.block_size,
        total_kv_blocks=metrics.total_kv_blocks,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=0,
        max_model_len=int(base.get("max_model_len") or 0),
        caches_prefixes=metrics.caches_prefixes,
    )


def _lora_info(
    base_model: str, paths: Mapping[str, str], metrics: EngineMetrics, verdict: ConnectorVerdict
) -> LoraInfo:
    """The report's part on adapters: those that the engine lists, or the reason for taking none."""
    refusal = verdict.refusal
    # With more adapters than slots vLLM does not report which are on the device.
    location: AdapterLocation = "host" if 0 < metrics.max_loras < len(paths) else "device"
    loaded = tuple(
        WorkerAdapter(
            lora_id=lora_id_of(name),
            digest="",
            engine_name=name,
            state="failed" if refusal else "ready",
            location=location,
            base_model=base_model,
            path=path,
            error=refusal or None,
        )
        for name, path in sorted(paths.items())
    )
    return LoraInfo(
        enabled=False,  # the fleet loads no adapters there
        max_loras=metrics.max_loras,
        loaded_loras=loaded,
        list_age_s=0.0,
        refusal=refusal,
        is_salted=verdict.separation == "salted",
        capacity=LoraCapacity(max_loras=metrics.max_loras, loaded_count=len(loaded), device_slots=metrics.max_loras),
    )
