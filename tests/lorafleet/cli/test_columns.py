"""Which columns a list of workers has."""

import re

import pytest

from lorafleet.cli import tables
from lorafleet.cli.resources import WORKERS
from tests.lorafleet.cli.answers import READY_WORKERS, printed


def test_a_worker_whose_pod_ends_differs_from_a_drained_one(capsys: pytest.CaptureFixture[str]) -> None:
    worker = {"base_model": "tiny", "adapters": [], "capacity": {}, "agent_url": "", "engine_url": ""}
    w0 = worker | {"id": "w0", "state": "draining", "zone": "eu-1a", "node": "n7", "is_terminating": True}
    w1 = worker | {"id": "w1", "state": "draining", "zone": "eu-1b", "node": "n8"}
    tables.show(tables.listing(WORKERS.view, [w0, w1]))
    rows = [re.split(" {2,}", line)[:4] for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["worker", "state", "zone", "node"],
        ["w0", "draining, pod ends", "eu-1a", "n7"],
        ["w1", "draining", "eu-1b", "n8"],
    ]


def test_zone_and_node_are_columns_only_where_a_worker_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*workers: dict[str, object]) -> set[str]:
        return {"zone", "node"} & set(printed(tables.listing(WORKERS.view, workers), 200, monkeypatch)[0].split())

    assert names(*READY_WORKERS) == set()
    refusing = READY_WORKERS[0] | {"refusal": "its KV connector"}
    assert "takes no adapters" not in "".join(printed(tables.listing(WORKERS.view, READY_WORKERS), 200, monkeypatch))
    lines = printed(tables.listing(WORKERS.view, [refusing, READY_WORKERS[1]]), 200, monkeypatch)
    assert lines[0].endswith("takes no adapters")
    assert [line.endswith("its KV connector") for line in lines[1:]] == [True, False]
    assert names(READY_WORKERS[0], READY_WORKERS[1] | {"zone": "eu-1a"}) == {"zone"}
