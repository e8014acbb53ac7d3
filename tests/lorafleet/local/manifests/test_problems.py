"""The small texts that the rules share: quantities, names and labels."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.local.manifests.problems import (
    exactly_one,
    is_label,
    is_label_key,
    is_label_value,
    is_subdomain,
    quantity,
)

UNITS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


@given(number=st.decimals(0, 10**6, places=3), unit=st.sampled_from(sorted(UNITS)))
def test_a_quantity_is_its_number_times_its_unit(number, unit):
    assert quantity(f"{number}{unit}") == number * Decimal(10) ** UNITS[unit]


@pytest.mark.parametrize(
    ("text", "number"), [("1Ki", 1024), ("2Gi", 2 * 1024**3), (4, 4), (0.5, Decimal("0.5")), ("1e3", 1000), (".5", 0.5)]
)
def test_quantities_of_other_forms(text, number):
    assert quantity(text) == Decimal(str(number))


@pytest.mark.parametrize("text", ["4Gib", "4GB", "", "Gi", "1 Gi", "-", None, "four"])
def test_what_is_no_quantity_has_no_number(text):
    assert quantity(text) is None


@pytest.mark.parametrize("text", ["a", "a-1", "9"])
def test_labels_of_dns(text):
    assert is_label(text)
    assert is_subdomain(f"{text}.example")
    assert not is_label(f"{text}.example")


@pytest.mark.parametrize("text", ["A", "-a", "a-", "a_b", "a" * 64, ""])
def test_what_is_no_label_of_dns(text):
    assert not is_label(text)


def test_labels_have_values_that_may_be_empty_and_keys_with_a_domain():
    assert is_label_value("")
    assert is_label_value("L40S_1.x")
    assert not is_label_value("NVIDIA L40S")
    assert is_label_key("nvidia.com/gpu.product")
    assert not is_label_key("/gpu")
    assert not is_label_key("NVIDIA/gpu")


def test_none_and_two_of_fields_that_exclude_one_another_are_told_apart():
    (none,) = exactly_one(("a",), {}, ("x", "y"), "x: 1")
    (two,) = exactly_one(("a",), {"x": 1, "y": {}}, ("x", "y"), "x: 1")
    assert (none.found, two.found) == ("none", "x and y")
    assert list(exactly_one(("a",), {"x": 1, "y": None}, ("x", "y"), "x: 1")) == []
