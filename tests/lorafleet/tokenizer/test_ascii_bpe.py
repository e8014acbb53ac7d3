"""The ids of a text by its words are the tokenizer's own, or none are given."""

import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lorafleet.tokenizer import ascii_bpe
from lorafleet.tokenizer.ascii_bpe import MAX_CHARS, AsciiBpeCache
from tests.properties import examples

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen": QWEN,
    "llama 3": QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "gpt 2": None,
    # Matches letters only; the tokenizer takes the rest for words.
    "letters": r" ?\p{L}+",
}
CORPUS = [
    "It's what they'll say: I'd've done 12345 things, hadn't I?\n\n",
    "def main(argv):\n    return {'a': argv[0], \"b\": 0x1F}\t# tabs\r\n",
    "the quick brown fox jumps over the lazy dog  and then   some",
] * 20


def built(name):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pattern = SPLITS[name]
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if pattern is None
        else pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|im_end|>x"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


TOKENIZERS = {name: built(name) for name in SPLITS}
WORDS = {
    name: AsciiBpeCache.from_json(tokenizer.to_str(), tokenizer.token_to_id) for name, tokenizer in TOKENIZERS.items()
}

# What splits are about, and everything that ASCII has, \x1c to \x1f among it, which Python takes for spaces.
ascii_texts = st.text(st.characters(max_codepoint=127), max_size=30)
bits = st.sampled_from([
    "'s", "'LL", " ", "  ", "\t", "\n", "\r\n", "\x0b", "\x1c", "a", "Zz", " the", "1", "123", "4567", "...", " (", "_",
    "<|im_start|>", "<|im_end|>", "<|im_end|>x", "<|im_", "end|>", "<tool>", "<to", "\x00", "\x7f",
])  # fmt: skip
texts = ascii_texts | st.lists(bits, max_size=12).map("".join)
# A prefix long enough that the text is split at spaces first.
BEFORE = "fox " * 64


def cached_and_own_ids(name, text):
    def encode(word):
        return TOKENIZERS[name].encode(word, add_special_tokens=False).ids

    return WORDS[name].ids(text, encode), encode(text)


@pytest.mark.parametrize("name", SPLITS)
@given(texts)
@settings(max_examples=examples(400))
def test_the_ids_of_a_text_are_the_tokenizers_own(name, text):
    found, own = cached_and_own_ids(name, text)
    assert found is None or list(found) == own


@pytest.mark.parametrize("name", SPLITS)
@given(texts)
@settings(max_examples=examples(400))
def test_the_ids_of_a_long_text_are_the_tokenizers_own(name, text):
    for long in (BEFORE + text, f"{BEFORE}{text} fox", f"{text} {BEFORE}"):
        found, own = cached_and_own_ids(name, long)
        assert found is None or list(found) == own


@pytest.mark.parametrize("name", ["qwen", "llama 3", "gpt 2"])
def test_three_ascii_characters_are_split_as_the_tokenizer_splits_them(name):
    for text in map("".join, product("a1 \n\r\t\x0b\x1c\x1f'.s", repeat=3)):
        for whole in (text, f"{BEFORE}{text} fox"):
            found, own = cached_and_own_ids(name, whole)
            assert found is not None
            assert list(found) == own, repr(whole)


def test_text_between_spaces_is_split_once_in_a_long_text():
    words = AsciiBpeCache.from_json(TOKENIZERS["qwen"].to_str(), TOKENIZERS["qwen"].token_to_id)

    def encode(word):
        return TOKENIZERS["qwen"].encode(word, add_special_tokens=False).ids

    text = BEFORE + "it's  (done);\n  twice, (done);"
    assert list(words.ids(text, encode)) == encode(text)
    # What follows white space goes with what comes before it: by itself it may be another word.
    assert words.spaced_cache.keys() == {"fox", "it's", " (done);\n  twice,", "(done);"}


def test_short_texts_between_markers_are_split_once(monkeypatch):
    monkeypatch.setattr(ascii_bpe, "MAX_STRETCHES", 10)
    words = AsciiBpeCache.from_json(TOKENIZERS["qwen"].to_str(), TOKENIZERS["qwen"].token_to_id)

    def encode(word):
        return TOKENIZERS["qwen"].encode(word, add_special_tokens=False).ids

    for n in range(40):
        text = f"<|im_start|>user\n{n}<|im_end|>\n<|im_start|>assistant\n" + "long enough to be no mark"
        assert list(words.ids(text, encode)) == encode(text)
        assert {"\n", f"user\n{n}", "<|im_end|>"} & words.stretch_cache.keys() >= {f"user\n{n}", "<|im_end|>"}
        assert len(words.stretch_cache) <= len(words.added_ids) + 11
    assert not any(len(stretch) > 16 for stretch in words.stretch_cache)


def test_text_without_a_word_match_is_left_to_the_tokenizer():
    assert cached_and_own_ids("letters", "fine words")[0] is not None
    assert cached_and_own_ids("letters", "fine, words")[0] is None


@pytest.mark.parametrize("text", ["naïve", "a\u0130", "x" * (MAX_CHARS + 1)])
def test_text_beyond_ascii_or_too_long_is_left_to_the_tokenizer(text):
    assert cached_and_own_ids("qwen", text)[0] is None


def test_many_new_words_are_learned_in_several_calls():
    words = AsciiBpeCache.from_json(TOKENIZERS["qwen"].to_str(), TOKENIZERS["qwen"].token_to_id)
    learned = []

    def encode(word):
        learned.append(word)
        return TOKENIZERS["qwen"].encode(word, add_special_tokens=False).ids

    text = "".join(f" w{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(200))
    tries = 1
    while words.ids(text, encode) is None:
        tries += 1
    assert (tries, len(learned)) == (4, 200)
    learned.clear()
    assert list(words.ids(text, encode)) == TOKENIZERS["qwen"].encode(text, add_special_tokens=False).ids
    assert learned == []


def test_the_cache_bounds_words_and_their_length(monkeypatch):
    monkeypatch.setattr(ascii_bpe, "MAX_WORDS", 50)
    words = AsciiBpeCache.from_json(TOKENIZERS["qwen"].to_str(), TOKENIZERS["qwen"].token_to_id)

    def encode(word):
        return TOKENIZERS["qwen"].encode(word, add_special_tokens=False).ids

    for n in range(300):
        text = f" word{'abcdefghij'[n % 10] * (n // 10 + 1)}"
        assert list(words.ids(text, encode)) == encode(text)
        assert len(words.word_cache) <= 51
    long = " " + "z" * 1000
    assert list(words.ids(long, encode)) == encode(long)
    assert long not in words.word_cache


def changed(**changes):
    """Arguments of `AsciiBpeCache.from_json` for a tokenizer with the file's own numbers."""
    file = json.loads(TOKENIZERS["qwen"].to_str()) | changes
    return json.dumps(file), {token["content"]: token["id"] for token in file["added_tokens"]}.get


def split(pattern, **changes):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | changes


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TOKEN = {"id": 1, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "_"}]}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(QWEN), split(QWEN), BYTES]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(QWEN, behavior="Removed"), BYTES]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(QWEN, invert=True), BYTES]}},
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
    assert AsciiBpeCache.from_json(*changed()) is not None
    assert AsciiBpeCache.from_json(*changed(**changes)) is None


@pytest.mark.parametrize(
    "pattern",
    [
        r"\w+", r"\p{Lu}+", r"\P{L}", r".+", r"^a|\s", r"a$", r"(a)|b", r"[[:alpha:]]+", r"[a&&b]", r"a*", r"a{1,2}+",
        "[", r"[\S]", r"\bx", r"[a--b]",
    ],
)  # fmt: skip
def test_a_pattern_with_another_meaning_in_python_has_no_word_cache(pattern):
    assert (
        AsciiBpeCache.from_json(*changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [split(pattern), BYTES]}))
        is None
    )


@pytest.mark.parametrize(
    "added",
    [
        [{"content": "<new>", "id": 5000}],
        [{"content": "<new>", "id": 3}],
        [{"content": "the", "id": 404}],
        [{"content": "<new>", "id": 404}, {"content": "<new>", "id": 405}],
    ],
    ids=["behind a hole", "with the number of another", "a word already", "twice"],
)
def test_a_tokenizer_renumbered_by_its_library_has_no_word_cache(added):
    file = json.loads(TOKENIZERS["qwen"].to_str())
    file["added_tokens"] += [TOKEN | {"special": False} | token for token in added]
    library = Tokenizer.from_str(json.dumps(file))
    assert any(library.token_to_id(token["content"]) != token["id"] for token in added)
    assert AsciiBpeCache.from_json(json.dumps(file), library.token_to_id) is None
