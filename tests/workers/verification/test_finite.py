"""NaN, infinity and numbers beyond float16 are found in weights of every dtype, however the bytes are cut."""

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from workers.core.errors import SourceError
from workers.verification.finite import LARGEST, FiniteCheck, ModuleChange
from workers.verification.tensors import TensorHeader

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


def number(raw: bytes, dtype: str) -> float:
    """One number, decoded as the formats are defined."""
    if dtype in {"F64", "F32", "F16"}:
        return struct.unpack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], raw)[0]
    if dtype == "BF16":
        return number(b"\0\0" + raw, "F32")
    if dtype == "F8_E5M2":
        return number(b"\0" + raw, "F16")
    sign, exponent, fraction = raw[0] >> 7, raw[0] >> 3 & 15, raw[0] & 7
    if (exponent, fraction) == (15, 7):
        return math.nan
    size = math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9)
    return -size if sign else size


def is_refused(raw: bytes, dtype: str, scale: float) -> bool:
    value = number(raw, dtype)
    return not math.isfinite(value) or abs(value) * max(1.0, scale) >= LARGEST


def check(tensors: list[tuple[str, bytes]], *, scale=1.0, cuts=(), half="B") -> str:
    """The message of the refusal of tensors (dtype, bytes); "" if there is none. `cuts`: where reads end."""
    headers = {
        f"t{number}.lora_{half}.weight": TensorHeader(dtype, (len(data) // WIDTHS.get(dtype, 1),))
        for number, (dtype, data) in enumerate(tensors)
    }
    content = b"\xff" * 21 + b"".join(data for _, data in tensors)
    values = FiniteCheck(len(content), headers, scale)
    ends = sorted({cut % (len(content) + 1) for cut in cuts} | {len(content)})
    for begin, end in zip([0, *ends], ends, strict=False):
        values.feed(content[begin:end])
    values.feed(b"\xff" * 9)  # the file has grown since its header was read
    try:
        values.require_finite()
    except SourceError as exc:
        return f"{exc.code}: {exc}"
    return ""


values_of = st.sampled_from(sorted(WIDTHS)).flatmap(
    lambda dtype: st.tuples(
        st.just(dtype),
        st.lists(
            st.one_of(
                st.binary(min_size=WIDTHS[dtype], max_size=WIDTHS[dtype]),
                # Near infinity, the limit and zero, where rules differ by one bit.
                st.tuples(
                    st.binary(min_size=WIDTHS[dtype], max_size=WIDTHS[dtype]),
                    st.sampled_from([0x00, 0x40, 0x47, 0x7B, 0x7C, 0x7E, 0x7F, 0x80, 0xC7, 0xFB, 0xFF]),
                ).map(lambda pair: (pair[0] + bytes([pair[1]]))[1:]),
            ),
            max_size=20,
        ).map(b"".join),
    )
)


@settings(max_examples=examples(1000), deadline=None)
@given(
    st.lists(values_of, max_size=4), st.lists(st.integers(0, 500), max_size=6), st.sampled_from([1.0, 0.25, 16.0, 3e5])
)
def test_every_refused_value_is_counted_once_however_the_reads_are_cut(tensors, cuts, scale):
    refused = [
        sum(is_refused(data[at : at + WIDTHS[dtype]], dtype, scale) for at in range(0, len(data), WIDTHS[dtype]))
        for dtype, data in tensors
    ]
    nan_or_inf = sum(
        not math.isfinite(number(data[at : at + WIDTHS[dtype]], dtype))
        for dtype, data in tensors
        for at in range(0, len(data), WIDTHS[dtype])
    )
    message = check(tensors, scale=scale, cuts=cuts)
    assert bool(message) == any(refused)
    if message:
        assert message.startswith("weights_not_finite: ")
        first = next(index for index, count in enumerate(refused) if count)
        assert f"in {sum(map(bool, refused))} of its tensors, the first is 't{first}.lora_B.weight'" in message
        assert (f"{nan_or_inf} NaN or infinite" in message) == bool(nan_or_inf)
        too_large = sum(refused) - nan_or_inf
        assert (f"{too_large} values of 65520 or more" in message) == bool(too_large)


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
def test_a_value_is_refused_exactly_where_float16_rounds_it_to_infinity(dtype):
    last_kept, first_refused = {
        "F64": (struct.pack("<d", math.nextafter(LARGEST, 0)), struct.pack("<d", LARGEST)),
        "F32": (b"\xff\xef\x7f\x47", b"\x00\xf0\x7f\x47"),
        "F16": (b"\xff\x7b", b"\x00\x7c"),
        "BF16": (b"\x7f\x47", b"\x80\x47"),
        "F8_E4M3": (b"\x7e", b"\x7f"),
        "F8_E5M2": (b"\x7b", b"\x7c"),
    }[dtype]
    for sign in (0, 0x80):
        kept, refused = (raw[:-1] + bytes([raw[-1] | sign]) for raw in (last_kept, first_refused))
        assert check([(dtype, kept * 3)]) == ""
        assert "3 " in check([(dtype, refused * 3)])


def test_the_scale_counts_for_lora_b_alone():
    large = struct.pack("<f", 10_000.0)
    assert check([("F32", large)], scale=6.0) == ""
    assert "lora_B times the config's scale 7" in check([("F32", large)], scale=7.0)
    assert check([("F32", large)], scale=7.0, half="A") == ""


def test_bytes_of_integers_are_finite_whatever_they_are():
    assert check([("I8", b"\x7f" * 8), ("U8", b"\xff" * 8), ("F16", b"\x00\x3c")]) == ""


def test_a_large_tensor_of_refused_values_alone_is_counted_whole():
    assert "100000 NaN" in check([("BF16", b"\xc0\x7f" * 100_000)], cuts=range(0, 200_000, 65_537))


def change_of(dtype: str, size: float, *, scale: float = 2.0) -> ModuleChange:
    """The change by a pair of one module, rank 8 and 64 inputs, whose numbers are all of this size."""
    packed = struct.pack({"F64": "<d", "F16": "<e"}.get(dtype, "<f"), size)
    raw = packed[2:] if dtype == "BF16" else packed
    names = [f"base_model.model.layers.0.q_proj.lora_{half}.weight" for half in "AB"]
    headers = dict(zip(names, (TensorHeader(dtype, (8, 64)), TensorHeader(dtype, (64, 8))), strict=True))
    data = raw * (2 * 8 * 64)
    values = FiniteCheck(len(data), headers, scale)
    for begin in range(0, len(data), 1001):
        values.feed(data[begin : begin + 1001])
    values.require_finite()
    return values.largest_change()


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_change_is_measured_against_ordinary_weights_and_has_its_module(dtype):
    # scale 2, and the root of 8 x 64: 45 times as large as the square of one number
    assert change_of(dtype, 2.0) == ModuleChange(181.0, "layers.0.q_proj")
    assert change_of(dtype, 2.0, scale=1.0).size == pytest.approx(90.5)
    assert change_of(dtype, 0.0) == ModuleChange()
