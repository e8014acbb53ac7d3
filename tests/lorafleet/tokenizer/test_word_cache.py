"""The ids of a text through the word cache are the tokenizer's own, in every script and length."""

import json
import sys
import tracemalloc
from array import array
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lorafleet.tokenizer import encoding, word_cache
from lorafleet.tokenizer.encoding import ThreadWork, run_steps, steps_through_cache
from lorafleet.tokenizer.split_points import TokenizerFile
from lorafleet.tokenizer.word_cache import SLICE_CHARS, PieceIds, WordCache
from tests.lorafleet.tokenizer.split_patterns import PATTERNS, tokenizer
from tests.properties import examples


def cache_of(tokenizer_json: str, token_to_id) -> WordCache | None:
    return WordCache.from_file(TokenizerFile.from_json(tokenizer_json), token_to_id)


def made(name: str) -> WordCache:
    """A new cache for this tokenizer."""
    found = cache_of(tokenizer(name).to_str(), tokenizer(name).token_to_id)
    assert found is not None
    return found


# Used by all examples: what one text has taught the cache, another one uses.
CACHES = {name: made(name) for name in PATTERNS}

# What splits are about: all of ASCII, of which Python takes \x1c to \x1f for spaces, every kind of white space, marks,
# letters of several scripts, surrogate pairs, and the special tokens, whole and in parts.
bits = st.sampled_from([
    "'s", "'LL", " ", "  ", "\t", "\n", "\r\n", "\x0b", "\x1c", "a", "Zz", " the", "1", "123", "4567", "...", " (", "_",
    "<|im_start|>", "<|im_end|>", "<|im_end|>x", "<|im_", "end|>", "<tool>", "<to", "\x00", "\x7f", "é", "e\u0301",
    " für", "größe,", "“hello”", "don’t", "🙂", "🙂\u200d↔️", "今天", "，", "。今天", "\u3000", "\xa0", "\u2028", "\x85",
    "\u0301", " \u0301", "'ſ", "가", "ᆨ", "й", "ﬁ", "½", "٣", "か\u3099", "\n/", "\u200b", "\ufeff", "o'clock", "x" * 70,
    "=" * 80,
])  # fmt: skip
texts = (
    st.text(st.characters(max_codepoint=127), max_size=30)
    | st.lists(bits, max_size=12).map("".join)
    | st.lists(bits | st.text(max_size=5), max_size=60).map("".join)
)
# Long enough that the text is split at spaces first.
BEFORE = "fox " * 64


def own_ids(name, text):
    return tokenizer(name).encode(text, add_special_tokens=False).ids


def cached_ids(name, text, cache=None):
    [ids] = run_steps(steps_through_cache([text], cache or CACHES[name], lambda part: own_ids(name, part)))
    return ids.tolist()


@pytest.mark.parametrize("name", PATTERNS)
@given(texts)
@settings(max_examples=examples(300))
def test_the_ids_of_a_text_are_the_tokenizers_own(name, text):
    assert cached_ids(name, text) == own_ids(name, text)


@pytest.mark.parametrize("name", PATTERNS)
@given(texts)
@settings(max_examples=examples(300))
def test_the_ids_of_a_longer_text_are_the_tokenizers_own(name, text):
    for long in (BEFORE + text, f"{BEFORE}{text} fox", f"{text} {BEFORE}"):
        assert cached_ids(name, long) == own_ids(name, long)


@pytest.mark.parametrize("name", PATTERNS)
@given(st.lists(texts, max_size=4).map("".join), st.integers(20, 90))
@settings(max_examples=examples(300))
def test_the_ids_of_a_text_in_slices_are_the_tokenizers_own(name, text, slice_chars):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_cache, "SLICE_CHARS", slice_chars)
        assert "".join("".join(stretches) for stretches in CACHES[name].slices(text)) == text
        assert cached_ids(name, text) == own_ids(name, text)


@pytest.mark.parametrize("name", PATTERNS)
def test_three_ascii_characters_are_split_as_the_tokenizer_splits_them(name):
    for text in map("".join, product("aB1 \n\t\x1c'.s/", repeat=3)):
        for whole in (text, f"{BEFORE}{text} fox"):
            assert cached_ids(name, whole) == own_ids(name, whole), repr(whole)


def test_a_pattern_converted_from_tiktoken_gives_the_same_ids():
    other = tokenizer("llama 3", inverted=True)
    cache = cache_of(other.to_str(), other.token_to_id)
    text = f"{BEFORE}it’s 12345 things,\n\n  hadn't I?"
    assert cached_ids("llama 3", text, cache) == other.encode(text, add_special_tokens=False).ids


class Library:
    """The tokenizer, and the texts that it was asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return own_ids(self.name, text)


def encoded(cache: WordCache, text: str, library: Library) -> list[int]:
    [ids] = run_steps(steps_through_cache([text], cache, library))
    return ids.tolist()


def test_the_tokenizer_gets_only_the_pieces_between_spaces_that_are_not_ascii():
    cache, library = made("qwen 2"), Library("qwen 2")
    text = " ".join(["the quick brown fox jumps over the lazy dog"] * 700)
    encoded(cache, text, library)
    library.asked.clear()
    quoted = text[:15_000] + " it’s naïve, " + text[15_000:]
    assert encoded(cache, quoted, library) == own_ids("qwen 2", quoted)
    asked = "".join(library.asked)
    assert "it’s" in asked
    assert "naïve," in asked
    assert len(asked) < 100
    library.asked.clear()
    assert encoded(cache, quoted, library) == own_ids("qwen 2", quoted)
    assert not library.asked


def test_the_tokenizer_gets_only_the_words_that_are_not_ascii_of_a_text_without_spaces():
    cache, library = made("qwen 2"), Library("qwen 2")
    text = ",".join(['{"name":"fox","id":"a7"}'] * 600)
    encoded(cache, text, library)
    library.asked.clear()
    accented = text[:7_002] + "é" + text[7_003:]
    assert encoded(cache, accented, library) == own_ids("qwen 2", accented)
    assert 0 < sum(map(len, library.asked)) < 50


def test_a_slice_of_mostly_unknown_text_is_encoded_as_a_whole_and_taught_in_part():
    cache, library = made("qwen 2"), Library("qwen 2")
    text = "".join(f" w{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(400))
    assert encoded(cache, text, library) == own_ids("qwen 2", text)
    assert library.asked[0] == text
    assert len(cache.words) == 64
    for _ in range(6):
        library.asked.clear()
        encoded(cache, text, library)
    assert library.asked == []


def test_a_long_text_is_encoded_in_steps_of_a_slice():
    cache, library = made("qwen 2"), Library("qwen 2")
    text = "the quick brown fox jumps over the lazy dog. " * 5000
    encoded(cache, text, library)
    library.asked.clear()
    turns = list(steps_through_cache([text], cache, library))
    assert set(turns) == {None}
    assert len(turns) >= len(text) // (2 * SLICE_CHARS)
    assert encoded(cache, text, library) == own_ids("qwen 2", text)


def test_new_text_of_many_words_is_encoded_in_a_thread():
    steps = steps_through_cache([BEFORE + "今天天气很好，" * 800], made("qwen 2"), Library("qwen 2"))
    work = next(steps)
    assert isinstance(work, ThreadWork)
    assert work.chars > encoding.INLINE_CHARS
    assert steps.send(work.run()) is None
    with pytest.raises(StopIteration):
        next(steps)


@pytest.mark.parametrize("text", ["a" * 70_000, "今" * 70_000, "7" * 70_000, " " * 70_000, "<|im_end|>" * 8_000])
def test_text_in_which_no_word_ends_has_the_tokenizers_ids(text):
    assert cached_ids("llama 3", text, made("llama 3")) == own_ids("llama 3", text)


def test_slices_are_no_longer_than_two_where_words_end():
    cache = made("qwen 2")
    for text in ("word " * 40_000, "今天天气很好，" * 30_000, '{"id":"a7"},' * 20_000, "<|im_end|>\n" * 20_000):
        lengths = [sum(map(len, stretches)) for stretches in cache.slices(text)]
        assert sum(lengths) == len(text)
        assert max(lengths) <= 2 * SLICE_CHARS


def test_text_between_spaces_is_split_once_in_a_long_text():
    cache, library = made("qwen 2"), Library("qwen 2")
    text = BEFORE + "it's  (done);\n  twice, (done);"
    for _ in range(2):
        assert encoded(cache, text, library) == own_ids("qwen 2", text)
    # What follows white space goes with what comes before it: by itself it may be another word.
    assert cache.spaced.recent.keys() == {"fox", "it's", " (done);\n  twice,", "(done);"}


def test_short_texts_between_markers_are_split_once(monkeypatch):
    monkeypatch.setattr(word_cache, "MAX_STRETCHES", 10)
    cache, library = made("qwen 2"), Library("qwen 2")
    for n in range(40):
        text = f"<|im_start|>user\n{n}<|im_end|>\n<|im_start|>assistant\n" + "long enough to be no mark"
        for _ in range(2):
            assert encoded(cache, text, library) == own_ids("qwen 2", text)
        assert {f"user\n{n}", "<|im_end|>"} <= cache.stretches.keys()
        assert len(cache.stretches) <= len(cache.added_ids) + 11
    assert not any(len(stretch) > 16 for stretch in cache.stretches)


def test_the_cache_bounds_its_bytes_and_keeps_what_is_used():
    cache = PieceIds(100_000)
    ids = array("I", [1, 2]).tobytes()
    cache.put("often", ids)
    for n in range(20_000):
        cache.put(f"word {n}", ids)
        assert cache.get("often") == ids
        assert cache.size_bytes <= 100_000
    kept = [entry for text in (f"word {n}" for n in range(20_000)) if (entry := cache.recent.get(text))]
    assert 50_000 > len(kept) * (sys.getsizeof("word 10000") + sys.getsizeof(ids)) > 5_000
    cache.put("z" * 1000, ids)
    assert cache.get("z" * 1000) is None


def test_the_cache_counts_the_bytes_that_it_takes():
    tracemalloc.start()
    try:
        before, cache = tracemalloc.get_traced_memory()[0], PieceIds(2_000_000)
        for n in range(30_000):
            cache.put(f"word {n}" if n % 2 else f"größe{n}", array("I", [n] * (n % 4 + 1)).tobytes())
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * taken < cache.size_bytes < 2 * taken
    assert taken < 2_500_000


def changed(**changes):
    """Arguments of `cache_of` for a tokenizer with the file's own numbers."""
    file = json.loads(tokenizer("qwen 2").to_str()) | changes
    return json.dumps(file), {token["content"]: token["id"] for token in file["added_tokens"]}.get


TOKEN = {"id": 1, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"added_tokens": [TOKEN | {"normalized": True}]},
        {"added_tokens": [TOKEN | {"single_word": True}]},
        {"added_tokens": [TOKEN | {"lstrip": True}]},
        {"added_tokens": [TOKEN | {"rstrip": True}]},
        {"model": {"type": "Unigram"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
    ],
    ids=str,
)
def test_a_tokenizer_with_further_steps_has_no_word_cache(changes):
    assert cache_of(*changed()) is not None
    assert cache_of(*changed(**changes)) is None


@pytest.mark.parametrize("added", [[], [TOKEN | {"content": "é"}], [TOKEN, TOKEN | {"content": "x><", "id": 2}]])
def test_words_are_encoded_one_by_one_without_a_token_to_separate_them(added):
    file, numbers = changed(added_tokens=added)
    cache, asked = cache_of(file, numbers), []
    assert cache.separator is None

    def encode(text):
        asked.append(text)
        return [len(text)]

    assert [array("I", ids).tolist() for ids in cache.encode_apart(["ab", "c"], encode)] == [[2], [1]]
    assert asked == ["ab", "c"]


@pytest.mark.parametrize(
    "added",
    [
        [{"content": "<new>", "id": 5000}],
        [{"content": "<new>", "id": 3}],
        [{"content": "the", "id": 504}],
        [{"content": "<new>", "id": 504}, {"content": "<new>", "id": 505}],
    ],
    ids=["behind a hole", "with the number of another", "a word already", "twice"],
)
def test_a_tokenizer_renumbered_by_its_library_has_no_word_cache(added):
    file = json.loads(tokenizer("qwen 2").to_str())
    file["added_tokens"] += [TOKEN | {"special": False} | token for token in added]
    library = Tokenizer.from_str(json.dumps(file))
    assert any(library.token_to_id(token["content"]) != token["id"] for token in added)
    assert cache_of(json.dumps(file), library.token_to_id) is None
