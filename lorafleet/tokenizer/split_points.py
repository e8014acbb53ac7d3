"""Where a text may be cut so that the pieces' token ids, joined, are the ids of the whole.

A fast tokenizer first takes its added tokens (`<|im_end|>`) out of the raw text, leftmost and longest first, and then
normalizes, splits and encodes what lies between them, each stretch alone. So right behind an added token nothing can
merge over the cut, provided that nothing in the tokenizer looks across it. What does is listed below; a tokenizer with
something that is not listed has no cuts.

Source: tokenizers 0.23 src/tokenizer/added_vocabulary.rs extract_and_normalize, pre_tokenizers/metaspace.rs.
"""

import re
from collections.abc import Mapping, Sequence
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


class _TokenizerModel(msgspec.Struct):
    """The vocabulary and merges, megabytes of them, are skipped unread."""

    type: str = ""
    dropout: float | None = None


class TokenizerFile(msgspec.Struct):
    """What of a tokenizer.json decides where texts may be cut and words begin."""

    model: _TokenizerModel
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SplitPoints:
    """The added tokens of one tokenizer; behind each a text may be cut.

    sure  those that are found wherever their letters stand, whatever stands around them; None: none are
    """

    added: re.Pattern[str]
    sure: re.Pattern[str] | None = None
    min_chars: int = 256
    """Shorter pieces cost more to look up than to encode."""

    @classmethod
    def of(cls, tokenizer_json: str) -> "SplitPoints | None":
        """From the text of a tokenizer.json; None where no cut is provably safe. Raises msgspec.DecodeError."""
        file = msgspec.json.decode(tokenizer_json, type=TokenizerFile)
        # A normalized token is looked for in the stretches between the raw ones, so it cannot cross a raw one.
        raw = [token.content for token in file.added_tokens if not token.normalized and token.content]
        # A single-word token asks for the characters around it, one with rstrip swallows the blanks behind it: a cut
        # would hide both. Dropout answers by chance.
        looks_across = any(token.single_word or token.rstrip for token in file.added_tokens)
        added = _any_of(raw)
        if added is None or looks_across or file.model.dropout or not _is_local(file.pre_tokenizer):
            return None
        return cls(added, _any_of([token for token in raw if _is_sure(token, raw)]))

    def pieces(self, text: str, *, sure: bool = False) -> list[str]:
        """`text` in pieces of `min_chars` or more that end behind an added token; the last is what remains.

        A text and its continuation share every piece but the last of the shorter one.

        sure  only behind tokens that would be found in any longer text as well
        """
        pieces, start = [], 0
        found = self.sure if sure else self.added
        for match in found.finditer(text) if found is not None else ():
            end = match.end()
            if end - start >= self.min_chars:
                pieces.append(text[start:end])
                start = end
        pieces.append(text[start:])
        return pieces

    def first_sure(self, text: str) -> int:
        """Where the first token ends that would be found in any longer text as well; 0: there is none."""
        match = self.sure.search(text) if self.sure is not None else None
        return match.end() if match is not None else 0


def _any_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    # Longest first makes an alternation leftmost-longest, as the tokenizer's own search is.
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def _is_sure(token: str, tokens: Sequence[str]) -> bool:
    """Whether no other match can take letters of this token: none begins before it and reaches into it, and none that
    begins with it is longer.
    """
    begins = [token[:length] for length in range(1, len(token) + 1)]
    return not any(
        (token in other and token != other) or any(other.endswith(begin) and begin != other for begin in begins)
        for other in tokens
    )


def _is_local(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_is_local(part) for part in pre_tokenizer.get("pretokenizers", ()))
    if kind == "Metaspace" and pre_tokenizer.get("prepend_scheme", "always") == "first":
        return False
    return kind in _LOCAL_PRE_TOKENIZERS
