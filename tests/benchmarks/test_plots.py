"""Plots are drawn from a benchmark's rows alone, and the same rows give the same bytes."""

import pytest

from benchmarks.plots import PLOTS

ROWS = [
    {"what": f"C={capacity} load={load:g} routers=1 reports=1s {policy}: {what}", "value": value + load + capacity}
    for capacity in (750, 2000)
    for load in (0.5, 1.0)
    for policy, value in (("kv_lora", 1.0), ("Dynamo KV cost", 2.0))
    for what in ("mean TTFT", "hits of central LRU", "ttft_p99_s")
]
ROWS += [
    {"what": "C=4000 load=1 routers=1 reports=1s kv_lora: hits of central LRU", "value": 5.0},
    {"scene": "conversation", "policy": "kv_lora", "seed": 1, "completion_mean_s": 0.0},
    *(
        {"scene": scene, "policy": policy, "seed": seed, "completion_mean_s": 10.0 * seed}
        for scene in ("agents 1", "agents pauses 4")
        for policy in ("kv_lora", "Dynamo KV cost")
        for seed in (1, 2)
    ),
]


def test_lines_are_the_contenders_over_load_and_over_cache_size():
    over_load, over_size, over_pauses = PLOTS
    assert over_load.lines(ROWS)["kv_lora"] == {0.5: 751.5, 1.0: 752.0}
    assert over_size.lines(ROWS)["Dynamo KV cost"] == {750.0: 753.0, 2000.0: 2003.0}
    assert over_size.lines(ROWS)["kv_lora"] == {750.0: 752.0, 2000.0: 2002.0, 4000.0: 5.0}
    assert over_pauses.lines(ROWS)["kv_lora"] == {1.0: 15.0, 4.0: 15.0}
    assert over_load.lines([]) == {}


def test_same_rows_give_the_same_svg(tmp_path):
    pytest.importorskip("matplotlib")
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        for plot in PLOTS:
            plot.draw(ROWS, folder)
    for plot in PLOTS:
        drawn = (tmp_path / "one" / plot.file).read_bytes()
        assert drawn == (tmp_path / "two" / plot.file).read_bytes()
        assert b"Dynamo KV cost" in drawn
