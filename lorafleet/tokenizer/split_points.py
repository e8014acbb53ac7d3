"""Split points of a text: the joined token ids of the pieces equal the ids of the whole text.

A fast tokenizer first removes its added tokens (`<|im_end|>`) from the raw text, leftmost and longest first. It then
normalizes, splits and encodes each stretch between them alone. So no merge crosses the end of an added token, unless a
part of the tokenizer looks across it. Only tokenizers whose every part is listed below have split points.

Source: tokenizers 0.23 src/tokenizer/added_vocabulary.rs extract_and_normalize, pre_tokenizers/metaspace.rs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Final

import msgspec

# Each sees one stretch and not its place in the text. Metaspace is checked further: "first" depends on offset 0.
_LOCAL_PRE_TOKENIZERS: Final = frozenset(
    [
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "Metaspace",
        "Punctuation",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    ]
)


class AddedToken(msgspec.Struct):
    content: str
    id: int = 0
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


class _TokenizerModel(msgspec.Struct):
    """The model section; its vocabulary and merges, megabytes of them, are skipped."""

    type: str = ""
    dropout: float | None = None


class TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that decide where texts may be split and words begin."""

    model: _TokenizerModel
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, tokenizer_json: str) -> "TokenizerFile":
        """These parts of the text of a tokenizer.json. Raises msgspec.DecodeError."""
        return msgspec.json.decode(tokenizer_json, type=cls)


@dataclass(frozen=True, slots=True)
class SplitPoints:
    """The added tokens of one tokenizer; a text may be split after each.

    added  pattern of all of them
    sure   pattern of those that match wherever their letters occur, whatever text surrounds them; None if none do
    """

    added: re.Pattern[str]
    sure: re.Pattern[str] | None = None
    min_chars: int = 256
    """Shorter pieces cost more to look up than to encode."""

    @classmethod
    def from_file(cls, file: TokenizerFile) -> "SplitPoints | None":
        """The split points of a tokenizer; None if none is safe."""
        # Normalized tokens are searched between the raw ones, so none crosses a raw one.
        raw = [token.content for token in file.added_tokens if not token.normalized and token.content]
        # A single-word token depends on the characters around it, one with rstrip takes the blanks after it: a split
        # would hide both. Dropout encodes by chance.
        looks_across = any(token.single_word or token.rstrip for token in file.added_tokens)
        added = _pattern_of(raw)
        if added is None or looks_across or file.model.dropout or not _splits_locally(file.pre_tokenizer):
            return None
        return cls(added, _pattern_of(certain_tokens(raw)))

    def pieces(self, text: str, *, sure: bool = False) -> list[str]:
        """`text` in pieces of `min_chars` or more that end after an added token; the last piece is the remainder.

        A text and its continuation share every piece but the last of the shorter one.

        sure  split only after tokens that would also match in any longer text
        """
        pieces, start = [], 0
        pattern = self.sure if sure else self.added
        for match in pattern.finditer(text) if pattern is not None else ():
            end = match.end()
            if end - start >= self.min_chars:
                pieces.append(text[start:end])
                start = end
        pieces.append(text[start:])
        return pieces

    def first_certain_end(self, text: str) -> int:
        """The end of the first token that would also match in any longer text; 0 if there is none."""
        match = self.sure.search(text) if self.sure is not None else None
        return match.end() if match is not None else 0


def _pattern_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern of these tokens, the longest first; None without tokens."""
    return re.compile(longest_match_pattern(tokens)) if tokens else None


def longest_match_pattern(tokens: Iterable[str]) -> str:
    """Regex source for the longest of these tokens that begins at a place, as the tokenizer's own search finds it.

    A tree of common beginnings: some tokenizers add thousands of tokens, and one after the other would be tried.
    """
    tails: dict[str, list[str]] = {}
    is_end = False
    for token in tokens:
        if token:
            tails.setdefault(token[0], []).append(token[1:])
        else:
            is_end = True
    branches = []
    for first, some in tails.items():
        shared = commonprefix(some)  # noqa: RUF071  (of characters, not of paths)
        branches.append(re.escape(first + shared) + longest_match_pattern([tail[len(shared) :] for tail in some]))
    if not branches:
        return ""
    if len(branches) == 1 and not is_end:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if is_end else ''}"


def certain_tokens(tokens: Sequence[str]) -> list[str]:
    """The tokens of which no other can take letters: by overlapping their beginning, or by being longer."""
    lengths = frozenset(map(len, tokens))
    within: set[str] = set()
    ends: set[str] = set()
    for token in tokens:
        ends.update(token[start:] for start in range(1, len(token)))
        for length in lengths:
            if length < len(token):
                within.update(token[start : start + length] for start in range(len(token) - length + 1))
    return [
        token
        for token in tokens
        if token not in within and not any(token[:length] in ends for length in range(1, len(token) + 1))
    ]


def _splits_locally(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer splits a stretch without regard to its place in the text."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_splits_locally(part) for part in pre_tokenizer.get("pretokenizers", ()))
    if kind == "Metaspace" and pre_tokenizer.get("prepend_scheme", "always") == "first":
        return False
    return kind in _LOCAL_PRE_TOKENIZERS
