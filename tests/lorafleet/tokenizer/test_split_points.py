"""Pieces encoded apart give the ids of the whole, on real tokenizers of every family; or there are no pieces."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.split_points import SplitPoints, TokenizerFile, certain_tokens, longest_match_pattern
from tests.properties import examples

CORPUS = [
    "the quick brown fox  jumps over 12 lazy dogs",
    "user assistant system\n\n naïve café 東京 <tool>",
    "a b c " * 9,
]
# Whole and broken markers, blanks that rstrip would swallow, marks that NFC merges with the letter before them.
FRAGMENTS = [
    "<|im_end|>", "<|im_start|>", "<|im_end|>\n<|im_start|>", "<|im_", "end|>", "<tool_call>", "<|im_end|><x>", "<|",
    "e", "\u0301", "\u0301\u0323", "가", "ᆨ", " ", "   ", "\n", "\n\n \t", "\u3000", "the fox", "user", "DON'T", "12345",
    "東京", "🙂‍↔️", "\x00", "\u200d", "ﬁ", "_", "<s>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=25).map("".join)


def split_points_of(tokenizer_json: str) -> SplitPoints | None:
    return SplitPoints.from_file(TokenizerFile.from_json(tokenizer_json))


def build(model, trainer, *, normalizer=None, pre_tokenizer=None, added=(), post=None) -> str:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.add_tokens(list(added) or [AddedToken(t, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    if post is not None:
        tokenizer.post_processor = post
    return tokenizer.to_str()


def bpe(**parts) -> str:
    return build(models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"]), **parts)


def raw(*contents: str, **traits) -> list[AddedToken]:
    return [AddedToken(content, normalized=False, **traits) for content in contents]


FAMILIES = {
    "byte level, overlapping markers": lambda: bpe(
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
        added=raw("<|im_end|>", "<|im_end|><x>", "<|im_start|>", "  ", "\n"),
    ),
    "a normalized marker beside a raw one": lambda: bpe(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        added=[*raw("<|im_end|>"), AddedToken("user", normalized=True), AddedToken("<|im_start|>", normalized=True)],
    ),
    "llama 2's prepended blank": lambda: bpe(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "metaspace before every stretch": lambda: bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "a marker that takes the blanks before it": lambda: bpe(
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), added=raw("<|im_end|>", " ", lstrip=True)
    ),
    "unigram": lambda: build(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>"),
        normalizer=normalizers.NFKC(),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"),
    ),
    "wordpiece": lambda: build(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"]),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    ),
}


@pytest.fixture(scope="module", params=["tiny model", *FAMILIES])
def family(request, tmp_path_factory) -> tuple[Tokenizer, SplitPoints]:
    if request.param == "tiny model":
        text = (make_model(tmp_path_factory.mktemp("cuts") / "tiny-qwen") / "tokenizer.json").read_text()
    else:
        text = FAMILIES[request.param]()
    cuts = split_points_of(text)
    assert cuts is not None
    return Tokenizer.from_str(text), cuts


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@settings(max_examples=examples(300))
@given(text=TEXTS, min_chars=st.sampled_from([1, 20]))
def test_the_ids_of_the_pieces_are_the_ids_of_the_whole(family, text, min_chars):
    tokenizer, cuts = family
    pieces = replace(cuts, min_chars=min_chars).pieces(text)
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in ids(tokenizer, piece)] == ids(tokenizer, text)


@settings(max_examples=examples(100))
@given(text=TEXTS, more=TEXTS)
def test_a_continuation_shares_every_whole_piece(text, more):
    cuts = split_points_of(FAMILIES["llama 2's prepended blank"]())
    whole = replace(cuts, min_chars=20).pieces(text + "<|im_end|>" + more)
    before = replace(cuts, min_chars=20).pieces(text)
    # A marker that the end of the text had broken off may become whole: only the last piece may differ.
    assert whole[: len(before) - 1] == before[:-1]


@settings(max_examples=examples(300))
@given(before=TEXTS, after=TEXTS, data=st.data())
def test_a_text_is_split_after_every_certain_token(family, before, after, data):
    tokenizer, cuts = family
    markers = [token for token in FRAGMENTS if cuts.sure is not None and cuts.sure.fullmatch(token)]
    marker = data.draw(st.sampled_from(markers)) if markers else ""
    whole = before + marker + after
    if marker:
        assert ids(tokenizer, before + marker) + ids(tokenizer, after) == ids(tokenizer, whole)
        assert 0 < cuts.first_certain_end(whole) <= len(before + marker)


@pytest.mark.parametrize(
    ("tokens", "sure"),
    [
        (["<a>", "<b>"], {"<a>", "<b>"}),
        (["<a>", "<a>x"], {"<a>x"}),
        (["<a>", "x<"], {"x<"}),
        (["<a>", "x<a>y"], {"x<a>y"}),
        (["<a>", "<"], {"<a>"}),
        (["  "], set()),
    ],
)
def test_a_token_is_certain_if_no_other_overlaps_it(tokens, sure):
    cuts = split_points_of(bpe(added=raw(*tokens)))
    found = {token for token in tokens if cuts.sure.fullmatch(token)}
    assert found == sure


few_letters = st.text("<a|", min_size=1, max_size=5)


@given(tokens=st.lists(few_letters, min_size=1, max_size=8, unique=True), text=st.text("<a|b", max_size=30))
def test_the_longest_token_is_found_at_each_place(tokens, text):
    one_by_one = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    assert re.findall(longest_match_pattern(tokens), text) == re.findall(one_by_one, text)


@given(tokens=st.lists(few_letters, max_size=8, unique=True))
def test_a_token_is_certain_unless_another_could_take_letters_of_it(tokens):
    def can_take(other, token):
        begins = [token[:length] for length in range(1, len(token) + 1)]
        return (token in other and token != other) or any(other.endswith(b) and b != other for b in begins)

    assert certain_tokens(tokens) == [one for one in tokens if not any(can_take(other, one) for other in tokens)]


def test_thousands_of_added_tokens_are_read_and_searched_at_once():
    file = json.loads(bpe())
    token = file["added_tokens"][-1]
    many = [f"<unused{n}>" for n in range(6000)] + ["\n" * n for n in range(1, 30)] + ["z" * 3000]
    file["added_tokens"] += [token | {"id": 1000 + n, "content": content} for n, content in enumerate(many)]
    cuts = split_points_of(json.dumps(file))
    assert len(cuts.pieces("some words <b>and</b> <unused59> more\n\n\n" * 10_000)) > 500


LOOKS_ACROSS = {
    "metaspace at the start only": lambda: bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "a marker that swallows blanks behind it": lambda: bpe(added=raw("<|im_end|>", rstrip=True)),
    "a marker that asks for its neighbours": lambda: bpe(added=[*raw("<|im_end|>"), *raw("e", single_word=True)]),
    "no raw marker": lambda: bpe(added=[AddedToken("<|im_end|>", normalized=True, special=False)]),
}


@pytest.mark.parametrize("name", LOOKS_ACROSS)
def test_a_tokenizer_that_looks_across_tokens_has_no_split_points(name):
    text = LOOKS_ACROSS[name]()
    if name == "no raw marker":
        # The special <unk> is raw, so there is one; without it there is nothing left to cut behind.
        file = json.loads(text)
        file["added_tokens"] = [token for token in file["added_tokens"] if token["normalized"]]
        text = json.dumps(file)
    assert split_points_of(text) is None


def test_such_a_tokenizer_gives_other_ids_in_pieces():
    tokenizer = Tokenizer.from_str(LOOKS_ACROSS["metaspace at the start only"]())
    apart = ids(tokenizer, "the<|im_end|>") + ids(tokenizer, "fox")
    assert apart != ids(tokenizer, "the<|im_end|>fox")


def test_an_unknown_pre_tokenizer_and_dropout_have_no_split_points():
    file = json.loads(bpe(pre_tokenizer=pre_tokenizers.ByteLevel()))
    assert split_points_of(json.dumps(file)) is not None
    assert (
        split_points_of(json.dumps(file | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "New"}]}}))
        is None
    )
    assert split_points_of(json.dumps(file | {"model": file["model"] | {"dropout": 0.1}})) is None


def test_special_tokens_around_a_prompt_are_never_repeated_for_its_pieces(tmp_path):
    from lorafleet.tokenizer.chat import ChatTokenizer

    frame = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    framed = ChatTokenizer.from_files({"tokenizer.json": bpe(post=frame)})
    text = "the fox <|im_end|>" * 40
    assert framed.pieces(text, add_special_tokens=True) == [text]
    assert len(framed.pieces(text, add_special_tokens=False)) > 1
