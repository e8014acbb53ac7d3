"""The metrics of vLLM that lorafleet reads, with names, labels and buckets of vLLM 0.32 v1/metrics/loggers.py."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest

from lorafleet.sim.settings import SimSettings
from lorafleet.sim.timing import EngineBatch, EngineJob, EngineStep, FinishReason

SECONDS: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                  960.0, 1920.0, 7680.0)  # fmt: skip
FIRST_TOKEN_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_GAP_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                      40.0, 80.0)  # fmt: skip
TOKENS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)

COUNTERS: Final = {
    "vllm:prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "vllm:prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "vllm:num_preemptions": "Cumulative number of preemption from the engine.",
    "vllm:prompt_tokens": "Number of prefill tokens processed.",
    "vllm:prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "vllm:generation_tokens": "Number of generation tokens processed.",
}
HISTOGRAMS: Final = {
    "vllm:request_prompt_tokens": ("Number of prefill tokens processed.", TOKENS),
    "vllm:request_generation_tokens": ("Number of generation tokens processed.", TOKENS),
    "vllm:request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        TOKENS,
    ),
    "vllm:iteration_tokens_total": ("Histogram of number of tokens per engine_step.", TOKENS),
    "vllm:time_to_first_token_seconds": ("Histogram of time to first token in seconds.", FIRST_TOKEN_S),
    "vllm:inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", TOKEN_GAP_S),
    "vllm:request_time_per_output_token_seconds": (
        "Histogram of time_per_output_token_seconds per request.",
        TOKEN_GAP_S,
    ),
    "vllm:e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", SECONDS),
    "vllm:request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", SECONDS),
    "vllm:request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", SECONDS),
    "vllm:request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", SECONDS),
    "vllm:request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", SECONDS),
}


class SimMetrics:
    """The metrics of one sim, in two registries of their own.

    Counters and histograms change with steps and requests only. Their text is kept until the next change, because
    writing some three hundred lines takes 5 ms, and tests read `/metrics` many times a second.
    """

    def __init__(self, settings: SimSettings, *, started_at: float | None = None) -> None:
        """`started_at`: Unix time of the engine's start; None: that of this process."""
        self._counted, self._live = CollectorRegistry(), CollectorRegistry()
        self._counted_text: bytes | None = None
        # process_start_time_seconds shows a restart.
        if started_at is None:
            ProcessCollector(registry=self._live)
        else:
            Gauge("process_start_time_seconds", "Start time in Unix time.", registry=self._live).set(started_at)
        PlatformCollector(registry=self._live)
        own = {"model_name": settings.served_model_name[0], "engine": "0"}
        names = list(own)
        self._counters = {
            name: Counter(name, text, names, registry=self._counted).labels(**own) for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, names, registry=self._counted, buckets=buckets).labels(**own)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            [*names, "finished_reason"],
            registry=self._counted,
        )
        self._success = {
            finish_reason: success.labels(**own, finished_reason=finish_reason.value) for finish_reason in FinishReason
        }
        self._gauges = {
            name: Gauge(name, text, names, registry=self._live).labels(**own)
            for name, text in {
                "vllm:num_requests_running": "Number of requests in model execution batches.",
                "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
                "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
            }.items()
        }
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            [*names, "reason"],
            registry=self._live,
        )
        self._waiting = {reason: by_reason.labels(**own, reason=reason) for reason in ("capacity", "deferred")}
        if settings.has_connector:
            fetches = "vllm:num_requests_kv_fetch_by_stage"
            by_stage = Gauge(fetches, "Number of requests by KV load stage.", [*names, "stage"], registry=self._live)
            for stage in ("waiting_to_start", "in_progress", "completed_waiting"):
                by_stage.labels(**own, stage=stage).set(0)
        self._loras = Gauge(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            ["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
            registry=self._counted,
        )
        self._batch: EngineBatch
        self._frozen_values: tuple[float, ...] | None = None
        self._max_loras = str(settings.max_loras) if settings.enable_lora else ""
        info = {
            "block_size": str(settings.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(settings.caches_prefixes),
            "kv_cache_size_tokens": str(settings.num_gpu_blocks * settings.block_size),
            "num_gpu_blocks": str(settings.num_gpu_blocks),
            "num_gpu_blocks_override": str(settings.num_gpu_blocks),
            "prefix_caching_hash_algo": "sha256",
            "engine": "0",
        }
        text = "Information of the LLMEngine CacheConfig"
        Gauge("vllm:cache_config_info", text, list(info), registry=self._live).labels(**info).set(1)

    def watch_batch(self, batch: EngineBatch) -> None:
        """Connect the gauges to `batch`; during `frozen_gauges` they keep their values."""
        self._batch = batch
        for i, gauge in enumerate((*self._gauges.values(), *self._waiting.values())):
            gauge.set_function(partial(self._gauge_value, i))

    @contextmanager
    def frozen_gauges(self) -> Iterator[None]:
        """Keep the gauges' values during the block, as vLLM does during a load; afterwards they are live again."""
        self._frozen_values = self._gauge_values()
        try:
            yield
        finally:
            self._frozen_values = None

    def _gauge_value(self, i: int) -> float:
        """The value of gauge number `i` now, or the frozen one."""
        return (self._frozen_values or self._gauge_values())[i]

    def _gauge_values(self) -> tuple[float, ...]:
        """The values of all gauges, in their order."""
        batch = self._batch
        waiting, deferred = len(batch.waiting), batch.deferred
        return len(batch.running), waiting, batch.pool.usage, waiting - deferred, deferred

    def page(self) -> bytes:
        """All metrics now, as the text of `GET /metrics`."""
        if self._counted_text is None:
            self._counted_text = generate_latest(self._counted)
        return self._counted_text + generate_latest(self._live)

    def count_step(self, step: EngineStep, jobs: Sequence[EngineJob]) -> None:
        """Count a finished step, and a token of each of `jobs`, the jobs that got one; shows the step's adapters."""
        self._counted_text = None
        self._histograms["vllm:iteration_tokens_total"].observe(step.prefill_tokens + step.decoding)
        self._counters["vllm:generation_tokens"].inc(len(jobs))
        for job in jobs:
            if job.produced == 1:
                self._count_first_token(job)
            else:
                self._histograms["vllm:inter_token_latency_seconds"].observe(job.gap_s)
        if self._max_loras:
            adapters = sorted({getattr(job.adapter, "name", "") for job, _ in step.work} - {""})
            # Both labels are always equal, and old series stay, as in vLLM 0.32.
            both = ",".join(adapters)
            self._loras.labels(self._max_loras, both, both).set_to_current_time()

    def count_finished(self, job: EngineJob) -> None:
        """Count a finished request by its reason; observe its sizes and durations if it has produced a token."""
        assert job.finish_reason is not None
        self._counted_text = None
        self._success[job.finish_reason].inc()
        self._counters["vllm:num_preemptions"].inc(job.preemptions)
        if job.scheduled_at is None or job.first_token_at is None or job.last_token_at is None:
            return
        decode_s = job.last_token_at - job.first_token_at
        for name, value in {
            "vllm:request_prompt_tokens": job.prompt_tokens,
            "vllm:request_generation_tokens": job.produced,
            "vllm:request_prefill_kv_computed_tokens": job.prompt_tokens - job.cached_tokens,
            "vllm:e2e_request_latency_seconds": job.last_token_at - job.arrived_at,
            "vllm:request_queue_time_seconds": job.scheduled_at - job.arrived_at,
            "vllm:request_inference_time_seconds": job.last_token_at - job.scheduled_at,
            "vllm:request_prefill_time_seconds": job.first_token_at - job.scheduled_at,
            "vllm:request_decode_time_seconds": decode_s,
            "vllm:request_time_per_output_token_seconds": decode_s / max(1, job.produced - 1),
        }.items():
            self._histograms[name].observe(value)

    def _count_first_token(self, job: EngineJob) -> None:
        """Count the prompt of a job that has just got its first token, and observe the time to it."""
        assert job.first_token_at is not None
        self._histograms["vllm:time_to_first_token_seconds"].observe(job.first_token_at - job.arrived_at)
        self._counters["vllm:prompt_tokens"].inc(job.prompt_tokens)
        self._counters["vllm:prompt_tokens_cached"].inc(job.cached_tokens)
        self._counters["vllm:prefix_cache_queries"].inc(job.prompt_tokens)
        self._counters["vllm:prefix_cache_hits"].inc(job.cached_tokens)
