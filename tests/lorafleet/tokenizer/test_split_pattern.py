"""Words end where the split patterns are said to end them, in every script; other patterns are left alone."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.tokenizer import word_cache
from lorafleet.tokenizer.split_pattern import CUT, keeps_words_apart, split_pattern
from tests.lorafleet.tokenizer.split_patterns import PATTERNS, QWEN, tokenizer
from tests.properties import examples

# Unicode's letters and symbols, but for tags and private use.
_ASSIGNED = 0x33480
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern, **changes):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | changes


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


def ids(name, text):
    return tokenizer(name).encode(text, add_special_tokens=False).ids


# Both sides of a cut: letters and digits of several scripts, marks, every white space, apostrophes, symbols.
sides = st.lists(
    st.text(max_size=4)
    | st.sampled_from([
        "a", "Z", "7", "é", "e\u0301", "й", "и\u0306", "字", "か\u3099", "한", "ᆨ", "\u0301", " ", "  ", "\n", "\r\n",
        "\t", "\x0b", "\x1c", "\x85", "\xa0", "\u2028", "\u3000",
        "\u200b", "'", "'s", "'LL", "'ſ", "’", ".", ",\n", "/", "，",
        "。", "🙂", "🙂\u200d↔️", "½", "٣", "Ⅷ", "ǅ", "ʰ", "the", "12345",
    ]),
    max_size=8,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
@given(before=sides, after=sides, at=st.sampled_from(["a", "Z", "7", "é", "字", "ん", "가", "я"]), data=st.data())
@settings(max_examples=examples(300))
def test_the_ids_around_a_cut_are_the_ids_of_the_whole(name, before, after, at, data):
    joined, apart = ["'", "'s", "\u0301", "x"], [".", ",", " ", "\n", "\t", "/", '"', "_", "\x1c", "\x7f", "，", "）"]
    follower = data.draw(st.sampled_from([*joined, *apart]))
    text = before + at + follower + after
    cut = len(before + at)
    if CUT.match(text, cut):
        assert ids(name, text[:cut]) + ids(name, text[cut:]) == ids(name, text)
    else:
        assert follower in joined


@pytest.mark.parametrize("name", PATTERNS)
@given(before=sides, after=sides)
@settings(max_examples=examples(300))
def test_the_ids_around_a_space_that_begins_a_word_are_the_ids_of_the_whole(name, before, after):
    if before and not before.endswith(word_cache.SPACES):
        assert ids(name, before) + ids(name, " " + after) == ids(name, f"{before} {after}")


def test_normalization_changes_nothing_at_a_cut():
    everything = [chr(code) for code in range(_ASSIGNED) if not 0xD800 <= code < 0xE000]
    letters = [char for char in everything if CUT.match(char + ".", 1)]
    followers = [char for char in everything if CUT.match("a" + char, 1)]
    assert {"a", "ü", "字", "7"} <= set(letters)
    assert {unicodedata.category(char)[0] for char in letters} == {"L", "N"}
    assert all(unicodedata.is_normalized(form, char) for form in ("NFC", "NFKC") for char in letters)
    for form in ("NFC", "NFKC"):
        for char in [*followers, " "]:
            # A character that composes with none before it keeps what is before it as it is.
            assert unicodedata.combining(unicodedata.normalize(form, char)[0]) == 0
            assert all(unicodedata.normalize(form, letter + char)[0] == letter for letter in letters[::500])


def test_no_visible_character_normalizes_to_white_space_at_its_end():
    for code in range(_ASSIGNED):
        if not 0xD800 <= code < 0xE000 and not chr(code).endswith(word_cache.SPACES):
            assert not unicodedata.normalize("NFKC", chr(code)).endswith(word_cache.SPACES), hex(code)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_listed_family_is_recognized(name):
    assert split_pattern(json.loads(tokenizer(name).to_str())["pre_tokenizer"]) is not None


def test_a_pattern_converted_from_tiktoken_is_recognized():
    assert split_pattern(sequence(split(QWEN, behavior="Removed", invert=True), BYTES)) is not None


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        None,
        {"type": "Metaspace"},
        {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True},
        sequence(split(QWEN), split(QWEN), BYTES),
        sequence(split(QWEN, behavior="Removed"), BYTES),
        sequence(split(QWEN, invert=True), BYTES),
        sequence(split(QWEN, behavior="MergedWithNext"), BYTES),
        # Text that no alternative matches is one word, spaces included.
        sequence(split(r" ?\p{L}+"), BYTES),
        sequence(split(QWEN.removesuffix(r"|\s+")), BYTES),
        sequence(split(QWEN.replace(r"|\p{N}|", "|")), BYTES),
        # Alternatives that nobody has read: one crosses spaces, one looks behind.
        sequence(split(QWEN + r"|\p{L}+ \p{L}+"), BYTES),
        sequence(split(r"(?<=a)b|" + QWEN), BYTES),
        sequence(split("["), BYTES),
    ],
    ids=str,
)
def test_an_unknown_way_to_split_has_no_pattern(pre_tokenizer):
    assert split_pattern(pre_tokenizer) is None


@pytest.mark.parametrize(
    ("normalizer", "kept"),
    [
        (None, True),
        ({"type": "NFC"}, True),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}]}, True),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "_"}]}, False),
        ({"type": "Lowercase"}, False),
        ({"type": "NFD"}, False),
    ],
)
def test_only_normalizers_that_change_nothing_at_a_cut_are_accepted(normalizer, kept):
    assert keeps_words_apart(normalizer) is kept


def test_nfd_would_join_an_accent_with_the_symbol_after_it():
    from tokenizers import Tokenizer, normalizers

    other = Tokenizer.from_str(tokenizer("llama 3").to_str())
    other.normalizer = normalizers.NFD()
    words = [word for word, _ in other.pre_tokenizer.pre_tokenize_str(other.normalizer.normalize_str("é,"))]
    assert len(words) == 2
    assert len(words[1]) > len(",")
