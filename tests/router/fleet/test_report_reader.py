"""A report that is read in parts is the report that a whole validation gives."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from router.fleet.report_reader import ReportReader, is_same_but_load
from workers.wire import Metadata

SHAPE = {"block_size": 16, "total_kv_blocks": 9, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 9}
MODEL = {"name": "m", "base_model": "m", "runtime_config": SHAPE}
PLAIN = {"instance_id": "w0", "model": MODEL, "transport": {"engine_url": "http://e"}, "agent_boot_id": "a"}
LORA = {"lora_id": "a/v1", "digest": "d" * 64, "engine_name": "a/v1@dddddddddddd", "state": "ready", "rank": 8}
LORA |= {"location": "device", "base_model": "m", "loaded_at": "2026-01-01T00:00:00Z"}
AGES = st.sampled_from([0, 0.25, 3, None, "7"])
LOADS = st.fixed_dictionaries(
    {},
    optional={
        "running": st.integers(0, 3),
        "kv_usage": st.sampled_from([0.0, 0.5]),
        "read_age_s": st.floats(0, 9),
        "still_s": st.one_of(st.none(), st.floats(0, 9)),
        "of_a_later_agent": st.booleans(),
    },
)
LORAS = st.fixed_dictionaries(
    {},
    optional={
        "max_loras": st.integers(0, 2),
        "list_age_s": AGES,
        "loaded_loras": st.lists(st.sampled_from([LORA, LORA | {"lora_id": "b"}, LORA | {"rank": 16}]), max_size=2),
        "refusal": st.sampled_from(["", "no LoRA"]),
    },
)
REPORTS = st.fixed_dictionaries(
    {
        "instance_id": st.sampled_from(["w0", "w1"]),
        "model": st.sampled_from([MODEL, MODEL | {"base_model": "other"}]),
        "transport": st.just({"engine_url": "http://e"}),
        "agent_boot_id": st.sampled_from(["a", "b"]),
    },
    optional={"lora": LORAS, "load": LOADS, "state": st.sampled_from(["ready", "draining"]), "zone": st.just("z")},
)


@settings(max_examples=300)
@given(st.lists(st.one_of(REPORTS, st.none()), min_size=2, max_size=6))
def test_each_report_is_as_if_it_had_been_validated_as_a_whole(reports):
    reader, body = ReportReader(), b""
    for report in reports:
        # None: the same report again.
        body = body if report is None else json.dumps(report).encode()
        if not body:
            continue
        assert reader.read(body) == Metadata.model_validate_json(body)


@given(REPORTS, LOADS, AGES)
def test_a_report_with_another_load_and_list_age_shares_all_else_with_the_one_before(report, load, age):
    reader = ReportReader()
    later = report | {"load": load, "lora": report.get("lora", {}) | {"list_age_s": age}}
    one, other = (reader.read(json.dumps(each).encode()) for each in (report | {"lora": later["lora"]}, later))
    assert is_same_but_load(one, other) or isinstance(age, str)


@given(REPORTS, REPORTS)
def test_reports_that_differ_in_more_than_load_never_pass_for_the_same(one, other):
    reader = ReportReader()
    before, now = (reader.read(json.dumps(each).encode()) for each in (one, other))
    if is_same_but_load(before, now):
        same_load = before.model_copy(
            update={"load": now.load, "lora": before.lora.model_copy(update={"list_age_s": now.lora.list_age_s})}
        )
        assert same_load == now


@pytest.mark.parametrize(
    "bad",
    [b"", b"[]", b'{"instance_id": "w0"', b'{"instance_id": "w0"}', b'{"lora": 3}', b"\xff", b'{"lora": []}'],
)
def test_what_is_no_report_is_refused_before_and_behind_a_good_one(bad):
    reader = ReportReader()
    good = json.dumps(PLAIN).encode()
    for body in (bad, good, bad, good):
        if body is bad:
            with pytest.raises(ValidationError):
                reader.read(body)
        else:
            assert reader.read(body) == Metadata.model_validate_json(body)


def test_a_load_that_is_none_is_refused_behind_a_good_one():
    reader = ReportReader()
    report = PLAIN | {"load": {"running": 1}}
    reader.read(json.dumps(report).encode())
    with pytest.raises(ValidationError):
        reader.read(json.dumps(report | {"load": {"running": "many"}}).encode())
