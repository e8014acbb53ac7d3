"""Token ids of ASCII text from a cache of words: equal to the tokenizer's ids, about six times as fast.

A byte-level BPE tokenizer removes added tokens from a text, splits the rest with one regular expression, and encodes
each word alone. So a word has the same ids in every text, and the cache can keep them.
For ASCII the Unicode classes in that expression are a few ranges, so Python's own `re` splits alike.
Where a space always begins a word, `str.split` finds known text between two spaces faster than `re` does.

The cache is built only for tokenizers whose every part is listed here.

Source: tokenizers 0.23 pre_tokenizers/{split,byte_level,sequence}.rs, tokenizer/added_vocabulary.rs.
"""

import re
import warnings
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec

from lorafleet.tokenizer.split_points import TokenizerFile

# Normalizers that do not change ASCII.
_ASCII_KEEPING_NORMALIZERS: Final = frozenset(["NFC", "NFD", "NFKC", "NFKD"])
# ByteLevel's own, where `use_regex` is true.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4's, with one digit a word (Qwen) or three (Llama 3).
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# With these patterns a space begins a word, unless white space precedes it. They have no look-behind, so a text cut
# at such a space splits alike. Each pattern matches every character.
_SPACE_BEGINS_WORD: Final = frozenset([_GPT2, _GPT4 % "", _GPT4 % "{1,3}"])
# Oniguruma's classes, for ASCII. Python's own \s has \x1c to \x1f besides.
_SPACE = r" \t\n\r\x0b\x0c"
_SPACES: Final = tuple(" \t\n\r\x0b\x0c")
_CLASSES: Final = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9", r"\s": _SPACE}
_ESCAPED = re.compile(r"\\[pP]\{\w+\}|\\.", re.DOTALL)
_KEPT_ESCAPES: Final = frozenset([r"\r", r"\n", r"\t", r"\\", r"\'", r"\-", r"\[", r"\]", r"\/", r"\."])

# Splitting holds Python's lock; this many characters take about a millisecond.
MAX_CHARS: Final = 32_768
MAX_WORDS = 50_000
_LONGEST_WORD = 64
MAX_STRETCHES, _LONGEST_STRETCH = 1000, 16
# Below this length the expression is as fast as splitting at spaces.
_LEAST_SPLIT_CHARS = 96
# The tokenizer takes about 3 us for one word. A text with more unknown words goes to the tokenizer whole.
_LEARNED_PER_TEXT = 64


@dataclass(slots=True)
class AsciiBpeCache:
    """One tokenizer's word pattern, and the ids of the words seen so far, packed as unsigned 32-bit integers.

    split             pattern of one word
    added             pattern of the added tokens, whose ids are `added_ids`
    splits_at_spaces  a space begins a word unless white space precedes it, and every character is part of a word
    """

    split: re.Pattern[str]
    added: re.Pattern[str] | None
    added_ids: Mapping[str, bytes]
    splits_at_spaces: bool = False
    word_cache: dict[str, bytes] = field(default_factory=dict)
    # Added tokens, and short text between two of them, such as a chat template's turn marks.
    stretch_cache: dict[str, bytes] = field(init=False)
    # Text between two spaces that begin words -> its ids, the first space included.
    spaced_cache: dict[str, bytes] = field(default_factory=dict)
    _words_to_learn: int = 0

    def __post_init__(self) -> None:
        """Begin the stretch cache with the added tokens."""
        self.stretch_cache = dict(self.added_ids)

    @classmethod
    def from_json(cls, tokenizer_json: str, token_to_id: Callable[[str], int | None]) -> "AsciiBpeCache | None":
        """A cache for the text of a tokenizer.json; None if word ids would not be exact. Raises msgspec.DecodeError.

        token_to_id  the library's id of a token. The library renumbers added tokens where the file has gaps,
                     duplicates or clashes
        """
        file = msgspec.json.decode(tokenizer_json, type=TokenizerFile)
        pattern = _split_pattern_of(file.pre_tokenizer)
        tokens = [token for token in file.added_tokens if token.content]
        is_plain = not any(token.normalized or token.single_word or token.lstrip or token.rstrip for token in tokens)
        if pattern is None or not is_plain or file.model.type != "BPE" or file.model.dropout:
            return None
        if any(token_to_id(token.content) != token.id for token in tokens):
            return None
        split = _ascii_pattern(pattern)
        if split is None or not _keeps_ascii(file.normalizer):
            return None
        # Longest first makes an alternation leftmost-longest, as the tokenizer's own search is.
        longest_first = sorted((token.content for token in tokens), key=len, reverse=True)
        added = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if tokens else None
        added_ids = {token.content: _packed([token.id]) for token in tokens}
        return cls(split, added, added_ids, pattern in _SPACE_BEGINS_WORD)

    def ids(self, text: str, encode: Callable[[str], list[int]]) -> "array[int] | None":
        """The ids of a text; None if the tokenizer must encode it. Unknown words are encoded and cached.

        encode  the tokenizer's encoding without special tokens; called for words that are not cached yet
        """
        if len(text) > MAX_CHARS or not text.isascii():
            return None
        self._words_to_learn = _LEARNED_PER_TEXT
        stretches = [text] if self.added is None else self.added.split(text)
        found = list(map(self.stretch_cache.get, stretches))
        for at, ids in enumerate(found):
            if ids is None:
                found[at] = self._stretch_ids(stretches[at], encode)
                if found[at] is None:
                    return None
        return array("I", b"".join(cast("list[bytes]", found)))

    def _stretch_ids(self, stretch: str, encode: Callable[[str], list[int]]) -> bytes | None:
        """The ids of text without added tokens, cached if short; None if the tokenizer must encode it."""
        if self.splits_at_spaces and len(stretch) >= _LEAST_SPLIT_CHARS:
            return self._ids_between_spaces(stretch, encode)
        ids = self._ids_by_word(stretch, encode)
        if ids is not None and len(stretch) <= _LONGEST_STRETCH:
            if len(self.stretch_cache) - len(self.added_ids) > MAX_STRETCHES:
                self.stretch_cache = dict(self.added_ids)
            self.stretch_cache[stretch] = ids
        return ids

    def _ids_between_spaces(self, stretch: str, encode: Callable[[str], list[int]]) -> bytes | None:
        """The ids of a long stretch, from cached text between spaces; None if the tokenizer must encode it.

        Only unknown text is split by the pattern, and then cached; a full cache is cleared.
        """
        spaced, texts = self.spaced_cache, stretch.split(" ")
        count = len(texts)
        found = list(map(spaced.get, texts))
        found[0] = None  # no space precedes it
        found.append(None)
        pieces: list[bytes | None] = []
        at = 0
        while (unknown := found.index(None, at)) < count:
            pieces += found[at:unknown]
            at = unknown + 1
            # After white space, a space may belong to the word before it.
            while at < count and (not texts[at - 1] or texts[at - 1].endswith(_SPACES)):
                at += 1
            text = " ".join(texts[unknown:at])
            ids = spaced.get(text) if unknown else None
            if ids is None:
                ids = self._ids_by_word(" " + text if unknown else text, encode)
                if ids is None:
                    return None
                if unknown and 0 < len(text) < _LONGEST_WORD and not text.endswith(_SPACES):
                    if len(spaced) > MAX_WORDS:
                        spaced.clear()
                    spaced[text] = ids
            pieces.append(ids)
        pieces += found[at:count]
        return b"".join(cast("list[bytes]", pieces))

    def _ids_by_word(self, text: str, encode: Callable[[str], list[int]]) -> bytes | None:
        """The ids of a text, word by word; None if the tokenizer must encode it. Caches unknown words."""
        words = self.split.findall(text)
        # Text that no alternative matches is a word to the tokenizer, but missing from `findall`.
        if not self.splits_at_spaces and len("".join(words)) != len(text):
            return None
        try:
            return b"".join(map(self.word_cache.__getitem__, words))
        except KeyError:
            return self._learn_ids(words, encode)

    def _learn_ids(self, words: list[str], encode: Callable[[str], list[int]]) -> bytes | None:
        """Encode and cache the unknown ones of these words; the ids of all, or None if too many are unknown.

        Uses up `_words_to_learn`. A full cache is cleared first.
        """
        known = self.word_cache
        if len(known) > MAX_WORDS:
            known.clear()
        new = {word for word in words if word not in known}
        found: dict[str, bytes] = {}
        for word in list(new)[: self._words_to_learn]:
            # The word alone must split into one word, too: after other text the pattern may cut differently.
            if self.split.findall(word) != [word]:
                return None
            found[word] = _packed(encode(word))
        self._words_to_learn -= len(found)
        known.update((word, ids) for word, ids in found.items() if len(word) <= _LONGEST_WORD)
        if len(found) < len(new):
            return None
        return b"".join([found[word] if word in found else known[word] for word in words])


def _packed(ids: list[int]) -> bytes:
    """Ids as bytes, 32 bits each."""
    return array("I", ids).tobytes()


def _keeps_ascii(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether a normalizer leaves ASCII unchanged."""
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(_keeps_ascii(part) for part in normalizer.get("normalizers", ()))
    return normalizer.get("type") in _ASCII_KEEPING_NORMALIZERS


def _split_pattern_of(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The one regular expression by which a byte-level tokenizer splits; None for any other tokenizer."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get("use_regex", True):
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """The expression in Python's syntax, equal for ASCII text; None if any part could mean something else."""
    translated, position, in_class = [], 0, False
    while position < len(pattern):
        escaped = _ESCAPED.match(pattern, position)
        if escaped is None:
            char = pattern[position]
            if char in ("[&~" if in_class else ".^$"):
                return None  # nested sets; and anchors, which differ between engines
            in_class = in_class != (char == ("]" if in_class else "["))
            translated.append(char)
            position += 1
            continue
        escape, position = escaped[0], escaped.end()
        if escape in _CLASSES:
            translated.append(_CLASSES[escape] if in_class else f"[{_CLASSES[escape]}]")
        elif escape == r"\S" and not in_class:
            translated.append(f"[^{_SPACE}]")
        elif escape in _KEPT_ESCAPES:
            translated.append(escape)
        else:
            return None
    python_pattern = "".join(translated)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            split = re.compile(python_pattern)
    except (re.error, FutureWarning):
        return None
    # `{1,3}+` is possessive in Python only.
    return None if split.groups or split.match("") or "}+" in python_pattern else split
