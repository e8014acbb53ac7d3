"""Prometheus and Grafana for a fleet without Kubernetes: what to scrape, the alerts, the dashboard.

The alerts and the dashboard are the chart's own files.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from lorafleet.local.chart import chart_folder

JOB = "lorafleet"
_SCRAPE_EVERY = "15s"


class ScrapeTarget(NamedTuple):
    """A process to scrape, `host:port`, and its name in alerts and panels."""

    address: str
    name: str
    scheme: str = "http"


def monitoring_files(
    targets: Sequence[ScrapeTarget], *, router_processes: int, credentials_file: str | None
) -> Mapping[str, str]:
    """The files by name: `prometheus.yml`, `alerts.yml`, `dashboard.json`.

    router_processes  processes of each router, which an alert counts
    credentials_file  where Prometheus reads a key with the scope `metrics`; None: the fleet needs no key
    """
    assets = chart_folder() / "files"
    return {
        "prometheus.yml": _as_yaml(_prometheus_config(targets, credentials_file)),
        "alerts.yml": _as_yaml(_alert_rules((assets / "alerts.yaml").read_text(encoding="utf-8"), router_processes)),
        "dashboard.json": (assets / "dashboard.json").read_text(encoding="utf-8"),
    }


def _prometheus_config(targets: Sequence[ScrapeTarget], credentials_file: str | None) -> Mapping[str, Any]:
    """Prometheus' configuration. The label `pod`, as a cluster has it, names each process."""
    key = {} if credentials_file is None else {"authorization": {"credentials_file": credentials_file}}
    return {
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {
                "job_name": JOB if scheme == "http" else f"{JOB}-{scheme}",
                "scheme": scheme,
                "scrape_interval": _SCRAPE_EVERY,
                **key,
                "static_configs": [
                    {"targets": [target.address], "labels": {"pod": target.name}}
                    for target in targets
                    if target.scheme == scheme
                ],
            }
            for scheme in sorted({target.scheme for target in targets})
        ],
    }


def _alert_rules(alerts: str, router_processes: int) -> Mapping[str, Any]:
    """The alerts as a rule file, for the series of our jobs."""
    filled = alerts
    for name, value in (("$fleet", f'job=~"{JOB}.*"'), ("$processes", str(router_processes)), ("$pods", ".*")):
        filled = filled.replace(name, value)
    rules = [{field: value for field, value in rule.items() if field != "of"} for rule in yaml.safe_load(filled)]
    return {"groups": [{"name": JOB, "rules": rules}]}


def _as_yaml(value: Mapping[str, Any]) -> str:
    """A value as YAML, its keys in their order."""
    return yaml.safe_dump(value, sort_keys=False, width=120)
