"""A table of metrics makes each row's metric once an instance, and forgets a label's series in all of them."""

from prometheus_client import generate_latest

from lorafleet.telemetry.fast_metrics import Counter, Gauge
from lorafleet.telemetry.metric_table import MetricTable, bare_counter, metric


class _Metrics(MetricTable):
    answers = metric(Counter, "answers", "Answers by code.", "worker", "code")
    blocks = metric(Gauge, "blocks", "Blocks.", "worker")
    tokens = bare_counter("tokens", "Tokens.")


def test_each_instance_counts_for_itself() -> None:
    one, other = _Metrics(), _Metrics()
    one.tokens.inc(3)
    assert b"tokens_total 3.0" in generate_latest(one.registry)
    assert b"tokens_total 0.0" in generate_latest(other.registry)


def test_a_forgotten_worker_has_no_series_in_any_metric_and_another_keeps_its_own() -> None:
    metrics = _Metrics()
    for worker in ("w0", "w1"):
        metrics.answers.labels(worker, 200).inc()
        metrics.blocks.labels(worker).set(5)
    metrics.forget("worker", "w0")
    page = generate_latest(metrics.registry).decode()
    assert 'worker="w0"' not in page
    assert 'answers_total{code="200",worker="w1"} 1.0' in page
    assert 'blocks{worker="w1"} 5.0' in page
