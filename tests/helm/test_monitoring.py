"""Alerts, panels and triggers ask for metrics that exist, with labels that those have; each alert has a runbook."""

import json
import re
from random import Random
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from orchestrator.metrics import OrchestratorMetrics
from router.telemetry.metrics import RouterMetrics
from tests.helm.rendering import CHART, VALUES, containers, helm_template, of_kind, one, pod_templates, secret
from tests.test_docs import DOCS
from workers.agent import heartbeat
from workers.config import AgentTimers, WorkerSettings
from workers.metrics import WorkerMetrics

# What Prometheus adds to each series of a ServiceMonitor's or PodMonitor's target.
TARGET = {"namespace", "service", "pod", "job"}
BY_PROMETHEUS = TARGET | {"le", "__name__"}
NEED_KEY = [f"LORAFLEET_{service}_METRICS_NEED_KEY" for service in ("ROUTER", "ORCHESTRATOR", "WORKERS")]


def known() -> dict[str, set[str]]:
    """Each series name -> its own labels; `up` is Prometheus' own."""
    found: dict[str, set[str]] = {"up": set()}
    for metrics in (RouterMetrics, OrchestratorMetrics, WorkerMetrics):
        for family in metrics().registry.collect():
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            found |= {family.name + suffix: set() for suffix in suffixes}
    for line in (DOCS / "metrics.md").read_text().splitlines():
        if line.startswith("| `lora"):
            names, labels = line.split("|")[1:3]
            for name in re.findall(r"`(\w+)`", names):
                own = set(re.findall(r"\w+", labels))
                for suffix in ("", "_total", "_bucket", "_sum", "_count"):
                    if name + suffix in found or suffix == "":
                        found[name + suffix] = own
    return found


def asked(expression: str) -> list[tuple[str, set[str]]]:
    """(metric, labels that it is filtered by) of a PromQL expression; a name by pattern counts as each it could be."""
    series = [(name, body) for name, body in re.findall(r"\b(lora\w*|up)\s*\{([^}]*)\}", expression)]
    for body in re.findall(r"[^\w]\{([^}]*__name__[^}]*)\}", expression):
        pattern = re.search(r'__name__=~"([^"]+)"', body)[1]
        series += [(name, body) for name in known() if re.fullmatch(pattern, name)]
    assert series or "lora" not in expression, expression
    return [(name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", body))) for name, body in series]


def grouped(expression: str) -> set[str]:
    return {label.strip() for labels in re.findall(r"\bby\s*\(([^)]*)\)", expression) for label in labels.split(",")}


def alerts(case: str = "everything") -> list[dict]:
    rule = one(case, "PrometheusRule", "fleet-lorafleet")
    return rule["spec"]["groups"][0]["rules"]


def panels() -> list[tuple[str, str]]:
    board = json.loads(one("everything", "ConfigMap", "fleet-lorafleet-dashboard")["data"]["lorafleet.json"])
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", ())]


def triggers() -> list[tuple[str, str]]:
    return [
        (f"{item['metadata']['name']}/{trigger['name']}", trigger["metadata"]["query"])
        for item in of_kind("everything", "ScaledObject") for trigger in item["spec"]["triggers"]
    ]  # fmt: skip


def expressions() -> list[tuple[str, str]]:
    return [(rule["alert"], rule["expr"]) for rule in alerts()] + panels() + triggers()


def test_every_metric_that_is_asked_for_exists_and_has_the_labels_that_it_is_filtered_and_grouped_by():
    metrics, wrong = known(), []
    for what, expression in expressions():
        have = set(BY_PROMETHEUS)
        for name, labels in asked(expression):
            if name not in metrics:
                wrong.append(f"{what}: {name}")
                continue
            have |= metrics[name]
            wrong += [
                f"{what}: {name} has no label {label}" for label in sorted(labels - metrics[name] - BY_PROMETHEUS)
            ]
        wrong += [f"{what}: grouped by {label}" for label in sorted(grouped(expression) - have)]
    assert wrong == []


def test_every_expression_is_of_this_release_alone():
    for what, expression in expressions():
        for name, labels in asked(expression):
            assert "namespace" in labels, (what, name)
        assert expression.count("(") == expression.count(")"), what
        assert "$fleet" not in expression
        assert "$processes" not in expression


def test_an_alert_is_of_the_targets_of_this_releases_monitors():
    """As the Prometheus Operator names them (0.80, promcfg.go): a Service's name, or namespace/name of a PodMonitor."""
    services = {item["metadata"]["name"] for item in of_kind("everything", "ServiceMonitor")}
    jobs = services | {f"ml/{item['metadata']['name']}" for item in of_kind("everything", "PodMonitor")}
    assert services <= {item["metadata"]["name"] for item in of_kind("everything", "Service")}
    assert len(jobs) == 3
    for rule in alerts():
        for pattern in re.findall(r'job=~"([^"]+)"', rule["expr"]):
            assert all(re.fullmatch(pattern, job) for job in jobs)
            assert not re.fullmatch(pattern, "other-lorafleet-router")
        assert rule["expr"].count("job=~") == len(re.findall(r"\{[^}]*\}", rule["expr"]))


def test_alerts_without_monitors_are_of_the_namespace():
    worked, said = helm_template("--set", "monitoring.alerts.enabled=true")
    assert worked, said
    assert 'lorafleet_router_replicas{namespace="ml",state="ready"}' in said
    assert "job=" not in said


def test_without_an_orchestrator_no_alert_asks_for_one():
    about = re.compile(r"lorafleet_orchestrator_|lorafleet_pool_|lora_evictions|catalog_age|heartbeat")
    left = {rule["alert"] for rule in alerts("found")}
    assert left == {rule["alert"] for rule in alerts() if not about.search(rule["expr"])}


def test_a_service_that_is_gone_is_missed():
    rules = {rule["alert"]: rule["expr"] for rule in alerts()}
    assert "or absent(lorafleet_router_replicas{" in rules["LorafleetNoReplica"]
    assert "or absent(lorafleet_orchestrator_leading{" in rules["LorafleetNoLeader"]


def test_an_alert_about_a_state_that_lasts_waits_for_it_in_a_new_series_too():
    """A circuit's series begins with its first opening, and the least of one sample is that sample."""
    assert "circuit_open{" not in generate_latest(RouterMetrics().registry).decode()
    for rule in alerts():
        assert "for" in rule or "increase(" in rule["expr"], rule["alert"]


@pytest.mark.parametrize("answer_s", [0.0, AgentTimers().heartbeat_answer_s], ids=["refused", "no answer"])
async def test_heartbeats_that_always_fail_fail_often_enough_for_their_alert(answer_s, monkeypatch):
    """A worker sends them ever more rarely. Ten minutes pass at once."""
    now, failed_at = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 600:
            raise EOFError

    class Failing(heartbeat.HeartbeatSender):
        async def _post_heartbeat(self, **_) -> None:
            nonlocal now
            now += answer_s
            raise TimeoutError

    context = SimpleNamespace(
        settings=WorkerSettings(orchestrator_url="http://orchestrator:8080", engine_url="http://127.0.0.1:8100"),
        timers=AgentTimers(),
        metrics=SimpleNamespace(heartbeat_failures=SimpleNamespace(inc=lambda: failed_at.append(now))),
    )
    agent = SimpleNamespace(context=context, inventory=SimpleNamespace(version=1), end_warming=lambda: None)
    monkeypatch.setattr(heartbeat, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(EOFError):
        await Failing(agent, None, own=None, rng=Random(1), agents=None).run()
    (rule,) = (rule["expr"] for rule in alerts() if rule["alert"] == "LorafleetHeartbeatsFail")
    least, minutes = float(rule.rpartition("> ")[2]), int(re.search(r"\[(\d+)m\]", rule)[1])
    assert sum(at > 600 - minutes * 60 for at in failed_at) / (minutes * 60) > least


def test_labels_that_an_alerts_words_show_are_left_by_its_expression():
    for rule in alerts():
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        by = grouped(rule["expr"])
        whole = not re.match(r"(sum|max|min)\b", rule["expr"])
        have = set().union(*(known()[name] for name, _ in asked(rule["expr"])), TARGET) if whole else by
        assert shown <= have, rule["alert"]


def test_every_alert_has_a_paragraph_in_the_guide_and_links_to_it():
    guide = (DOCS / "kubernetes.md").read_text()
    headings = set(re.findall(r"^#+ (Lorafleet\w+)$", guide, re.MULTILINE))
    names = {rule["alert"] for rule in alerts()}
    assert names == headings
    assert len(names) == len(alerts())
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"https://docs.example.com/kubernetes#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in {"critical", "warning"}


def test_panels_have_titles_of_their_own_and_do_not_overlap():
    board = json.loads((CHART / "files" / "dashboard.json").read_text())
    titles = [panel["title"] for panel in board["panels"]]
    assert len(titles) == len(set(titles))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize("case", sorted(VALUES.keys() - {"everything", "found", "tls"}))
def test_what_needs_the_prometheus_operator_or_keda_is_off_unless_asked_for(case):
    assert not of_kind(case, "ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute")


def test_metrics_that_need_a_key_get_the_one_that_monitors_bring():
    tokens, pods = secret("everything", "fleet-lorafleet-tokens"), pod_templates("everything")
    for monitor in of_kind("everything", "ServiceMonitor", "PodMonitor"):
        for endpoint in monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["authorization"]["credentials"]["name"] == "fleet-lorafleet-tokens"
            assert endpoint["authorization"]["credentials"]["key"] in tokens
    assert told_of_metrics(pods) == dict.fromkeys(NEED_KEY, "true")


def told_of_metrics(pods) -> dict[str, str]:
    """What the services' environment says of a key for their metrics."""
    return {
        entry["name"]: entry["value"]
        for _, pod in pods
        for container in containers(pod["spec"])
        for entry in container.get("env", ())
        if entry["name"].endswith("_METRICS_NEED_KEY")
    }


def test_metrics_that_are_opened_need_no_key_anywhere():
    assert told_of_metrics(pod_templates("numbers")) == dict.fromkeys(NEED_KEY, "false")


def test_a_pools_trigger_is_its_wait_itself_and_its_slots_wanted_over_those_there():
    scaled = one("everything", "ScaledObject", "fleet-lorafleet-h100-r16")["spec"]
    assert [trigger["metricType"] for trigger in scaled["triggers"]] == ["Value", "Value"]
    where = 'namespace="ml",service="fleet-lorafleet-orchestrator",pool="h100-r16"'
    assert [trigger["metadata"]["query"] for trigger in scaled["triggers"]] == [
        f"max(lorafleet_pool_queue_wait_seconds{{{where}}})",
        f"max(lorafleet_pool_slots_wanted{{{where}}}) / clamp_min(max(lorafleet_pool_slots{{{where}}}), 1)",
    ]
