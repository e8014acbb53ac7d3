"""Where a text may be cut so that the pieces' token ids, joined, are the ids of the whole.

A fast tokenizer first takes its added tokens (`<|im_end|>`) out of the raw text, leftmost and longest first, and then
normalizes, splits and encodes what lies between them, each stretch alone. So right behind an added token nothing can
merge over the cut, provided that nothing in the tokenizer looks across it. What does is listed below; a tokenizer with
something that is not listed has no cuts.

Source: tokenizers 0.23 src/tokenizer/added_vocabulary.rs extract_and_normalize, pre_tokenizers/metaspace.rs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

# They see one stretch at a time and nothing of where it stood. Metaspace is looked at apart: "first" asks for offset 0.
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


class _Model(msgspec.Struct):
    """The vocabulary and merges, megabytes of them, are skipped unread."""

    type: str = ""
    dropout: float | None = None


class TokenizerFile(msgspec.Struct):
    """What of a tokenizer.json decides where texts may be cut and words begin."""

    model: _Model
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cuts:
    """The added tokens of one tokenizer; behind each a text may be cut."""

    added: re.Pattern[str]
    min_chars: int = 256
    """Shorter pieces cost more to look up than to encode."""

    @classmethod
    def of(cls, tokenizer_json: str) -> "Cuts | None":
        """From the text of a tokenizer.json; None where no cut is provably safe. Raises msgspec.DecodeError."""
        file = msgspec.json.decode(tokenizer_json, type=TokenizerFile)
        # A normalized token is looked for in the stretches between the raw ones, so it cannot cross a raw one.
        raw = [token.content for token in file.added_tokens if not token.normalized and token.content]
        # A single-word token asks for the characters around it, one with rstrip swallows the blanks behind it: a cut
        # would hide both. Dropout answers by chance.
        looks_across = any(token.single_word or token.rstrip for token in file.added_tokens)
        if not raw or looks_across or file.model.dropout or not _is_local(file.pre_tokenizer):
            return None
        # Longest first makes an alternation leftmost-longest, as the tokenizer's own search is.
        return cls(re.compile("|".join(map(re.escape, sorted(raw, key=len, reverse=True)))))

    def pieces(self, text: str) -> list[str]:
        """`text` in pieces of `min_chars` or more that end behind an added token; the last is what remains.

        A text and its continuation share every piece but the last of the shorter one.
        """
        pieces, start = [], 0
        for match in self.added.finditer(text):
            end = match.end()
            if end - start >= self.min_chars:
                pieces.append(text[start:end])
                start = end
        pieces.append(text[start:])
        return pieces


def _is_local(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_is_local(part) for part in pre_tokenizer.get("pretokenizers", ()))
    if kind == "Metaspace" and pre_tokenizer.get("prepend_scheme", "always") == "first":
        return False
    return kind in _LOCAL_PRE_TOKENIZERS
