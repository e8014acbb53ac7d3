"""Prometheus' and Grafana's files of a fleet without Kubernetes."""

import json
import re

import yaml

from lorafleet.cli.context import FleetAddress
from lorafleet.cli.local.monitoring import scrape_targets
from lorafleet.local.monitoring import ScrapeTarget, monitoring_files

FLEET = FleetAddress("http://127.0.0.1:8080", "https://router.example", "")
WORKERS = [
    {"id": "w0", "agent_url": "http://[::1]:8090"},
    {"id": "agentless", "agent_url": ""},
]


def files(**options) -> dict:
    targets = scrape_targets(FLEET, WORKERS)
    return dict(monitoring_files(targets, router_processes=4, credentials_file=None, **options))


def test_every_process_with_metrics_is_scraped_under_its_name():
    assert scrape_targets(FLEET, WORKERS) == [
        ScrapeTarget("router.example:443", "router", "https"),
        ScrapeTarget("127.0.0.1:8080", "orchestrator"),
        ScrapeTarget("[::1]:8090", "w0"),
    ]
    jobs = {job["job_name"]: job for job in yaml.safe_load(files()["prometheus.yml"])["scrape_configs"]}
    assert {name: job["scheme"] for name, job in jobs.items()} == {"lorafleet": "http", "lorafleet-https": "https"}
    plain = jobs["lorafleet"]["static_configs"]
    assert plain[1] == {"targets": ["[::1]:8090"], "labels": {"pod": "w0"}}
    assert "authorization" not in jobs["lorafleet"]


def test_a_fleet_with_keys_is_scraped_with_one():
    written = monitoring_files([ScrapeTarget("a:1", "router")], router_processes=1, credentials_file="/etc/metrics.key")
    [job] = yaml.safe_load(written["prometheus.yml"])["scrape_configs"]
    assert job["authorization"] == {"credentials_file": "/etc/metrics.key"}


def test_alerts_are_of_the_jobs_that_are_scraped():
    [group] = yaml.safe_load(files()["alerts.yml"])["groups"]
    assert len(group["rules"]) > 20
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert "$fleet" not in rule["expr"]
        assert "$pods" not in rule["expr"]
        assert "namespace" not in rule["expr"]
        assert rule["expr"].count('job=~"lorafleet.*"') == len(re.findall(r"\{[^}]*\}", rule["expr"]))
    assert '"{{ $value }} of 4 processes' in files()["alerts.yml"].replace("'", '"')


def test_the_dashboard_covers_series_without_a_namespace():
    board = json.loads(files()["dashboard.json"])
    [namespace] = [variable for variable in board["templating"]["list"] if variable["name"] == "namespace"]
    assert namespace["includeAll"] is True
    assert namespace["allValue"] == ".*"
    assert namespace["current"]["value"] == "$__all"
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert all('namespace=~"$namespace"' in expression for expression in expressions)
    assert not any('namespace="' in expression for expression in expressions)
