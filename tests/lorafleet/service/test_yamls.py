"""YAML of settings, key files and `apply`: a mapping has each key once."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.service.yamls import InvalidYaml, parse_yaml

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
