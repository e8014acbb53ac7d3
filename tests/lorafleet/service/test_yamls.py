"""YAML of settings, key files and `apply`: a mapping has each key once, and JSON is JSON."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.service.yamls import InvalidYaml, parse_json_or_yaml, parse_yaml

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
)


@given(_VALUES)
def test_what_has_each_key_once_is_read_as_it_was_written(value):
    assert parse_yaml(yaml.safe_dump(value)) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys: [{sha256: a}]\nkeys: []\n", r"found the key 'keys' twice\n.*line 2, column 1"),
        ("adapters:\n- lora_id: a\n  source: /a\n  source: /b\n", r"found the key 'source' twice\n.*line 4, column 3"),
        ("{1: a, 2: b, 1: c}", "found the key '1' twice"),
    ],
)
def test_a_key_that_is_written_twice_is_refused_with_its_line(text, says):
    with pytest.raises(InvalidYaml, match=says):
        parse_yaml(text)


def test_merged_mappings_may_have_the_same_keys():
    text = "a: &a {x: 1, y: 1}\nb: &b {x: 2, <<: *a}\nc: {<<: *a, <<: *b, x: 3}\nd: {<<: [*a, *b]}\ne: {1: a, '1': b}\n"
    assert parse_yaml(text) == yaml.safe_load(text)


@given(_VALUES.map(lambda value: json.loads(json.dumps({"": value}))), st.sampled_from([None, 2, "\t"]), st.booleans())
def test_json_is_read_as_json_in_every_layout(value, indent, is_ascii):
    assert parse_json_or_yaml(json.dumps(value, indent=indent, ensure_ascii=is_ascii)) == value


def test_what_is_no_json_is_read_as_yaml():
    assert parse_json_or_yaml("a: [1, b]\n") == {"a": [1, "b"]}
    assert parse_json_or_yaml('{"a": 1e3}') == {"a": 1000.0}


@pytest.mark.parametrize(
    "text", ['{"a": [{"b": 1, "b": 2}]}', "[" * 100_000, f'{{"a": {"9" * 5000}}}', "{a", '{"a": 1']
)
def test_json_with_a_fault_is_refused(text):
    with pytest.raises(InvalidYaml):
        parse_json_or_yaml(text)
