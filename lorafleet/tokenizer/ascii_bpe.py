"""Text -> token ids by a table of words: for ASCII exactly what the tokenizer makes of it, in a sixth of the time.

A byte-level BPE tokenizer takes its added tokens out of a text, splits what lies between with one regular expression,
and encodes each word apart. So a word has the same ids wherever it stands, and a text is the ids of its words. What
takes the tokenizer's time, the splitting with Unicode's classes of letters and the merging, needs no repeating: for
ASCII those classes are a few ranges, which Python's own `re` splits by as well, and most words were seen before.
Where a word never goes on behind a space, what stands between two spaces has the same ids wherever it stands, too:
`str.split` finds that in a tenth of the time of `re`, which is then left with what was not seen before.

A tokenizer with anything that is not listed here has no such table.

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

# What they leave as it is: ASCII.
_HARMLESS_NORMALIZERS: Final = frozenset(["NFC", "NFD", "NFKC", "NFKD"])
# ByteLevel's own, where `use_regex` is true.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4's, with one digit a word (Qwen) or three (Llama 3).
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By these a space behind anything but white space begins a word: only white space matches one that is not its first
# character. And none looks back, so what is cut there is split as before. Each matches every character there is.
_SPACE_BEGINS: Final = frozenset([_GPT2, _GPT4 % "", _GPT4 % "{1,3}"])
# Oniguruma's classes, for ASCII. Python's own \s has \x1c to \x1f besides.
_SPACE = r" \t\n\r\x0b\x0c"
_SPACES: Final = tuple(" \t\n\r\x0b\x0c")
_CLASSES: Final = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9", r"\s": _SPACE}
_ESCAPED = re.compile(r"\\[pP]\{\w+\}|\\.", re.DOTALL)
_KEPT_ESCAPES: Final = frozenset([r"\r", r"\n", r"\t", r"\\", r"\'", r"\-", r"\[", r"\]", r"\/", r"\."])

# Splitting holds Python's lock: so much takes about a millisecond.
MAX_CHARS: Final = 32_768
_MAX_WORDS = 50_000
_LONGEST_WORD = 64
_MAX_WHOLE, _SHORT = 1000, 16
# A shorter text is as soon split by the expression.
_LONG = 96
# A word that is not known takes the tokenizer some 3 us by itself: of a text with many the rest is learned later.
_LEARNED_AT_ONCE = 64


@dataclass(slots=True)
class AsciiBpeCache:
    """One tokenizer's words: how to split by, and their ids so far, packed as unsigned 32-bit integers.

    cuts_at_spaces  a space behind anything but white space begins a word, and there is nothing that is no word
    """

    split: re.Pattern[str]
    added: re.Pattern[str] | None
    added_ids: Mapping[str, bytes]
    cuts_at_spaces: bool = False
    _known: dict[str, bytes] = field(default_factory=dict)
    # Added tokens, and what stands between two of them where that is short: the marks of a chat template's turns.
    _whole: dict[str, bytes] = field(init=False)
    # What stands between two spaces that begin words, and the ids of that with the first of them.
    _spaced: dict[str, bytes] = field(default_factory=dict)
    _learnable: int = 0

    def __post_init__(self) -> None:
        self._whole = dict(self.added_ids)

    @classmethod
    def of(cls, tokenizer_json: str, token_to_id: Callable[[str], int | None]) -> "AsciiBpeCache | None":
        """From the text of a tokenizer.json; None where words would not be exact. Raises msgspec.DecodeError.

        token_to_id  what the library made of that text: it numbers added tokens anew where the file has holes, has one
                     twice, or has another token under its number
        """
        file = msgspec.json.decode(tokenizer_json, type=TokenizerFile)
        pattern = _split_by(file.pre_tokenizer)
        tokens = [token for token in file.added_tokens if token.content]
        is_plain = not any(token.normalized or token.single_word or token.lstrip or token.rstrip for token in tokens)
        if pattern is None or not is_plain or file.model.type != "BPE" or file.model.dropout:
            return None
        if any(token_to_id(token.content) != token.id for token in tokens):
            return None
        split = _for_ascii(pattern)
        if split is None or not _is_harmless(file.normalizer):
            return None
        # Longest first makes an alternation leftmost-longest, as the tokenizer's own search is.
        longest_first = sorted((token.content for token in tokens), key=len, reverse=True)
        added = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if tokens else None
        added_ids = {token.content: _packed([token.id]) for token in tokens}
        return cls(split, added, added_ids, pattern in _SPACE_BEGINS)

    def ids(self, text: str, encode: Callable[[str], list[int]]) -> "array[int] | None":
        """The ids of a text; None when the tokenizer itself must be asked.

        encode  the tokenizer's own, without special tokens around it; called for words that are not known yet
        """
        if len(text) > MAX_CHARS or not text.isascii():
            return None
        self._learnable = _LEARNED_AT_ONCE
        stretches = [text] if self.added is None else self.added.split(text)
        found = list(map(self._whole.get, stretches))
        for at, ids in enumerate(found):
            if ids is None:
                found[at] = self._of_stretch(stretches[at], encode)
                if found[at] is None:
                    return None
        return array("I", b"".join(cast("list[bytes]", found)))

    def _of_stretch(self, stretch: str, encode: Callable[[str], list[int]]) -> bytes | None:
        if self.cuts_at_spaces and len(stretch) >= _LONG:
            return self._between_spaces(stretch, encode)
        ids = self._word_by_word(stretch, encode)
        if ids is not None and len(stretch) <= _SHORT:
            if len(self._whole) - len(self.added_ids) > _MAX_WHOLE:
                self._whole = dict(self.added_ids)
            self._whole[stretch] = ids
        return ids

    def _between_spaces(self, stretch: str, encode: Callable[[str], list[int]]) -> bytes | None:
        spaced, texts = self._spaced, stretch.split(" ")
        count = len(texts)
        found = list(map(spaced.get, texts))
        found[0] = None  # no space stands before it
        found.append(None)
        pieces: list[bytes | None] = []
        at = 0
        while (unknown := found.index(None, at)) < count:
            pieces += found[at:unknown]
            at = unknown + 1
            # Behind white space a space may belong to what came before it.
            while at < count and (not texts[at - 1] or texts[at - 1].endswith(_SPACES)):
                at += 1
            text = " ".join(texts[unknown:at])
            ids = spaced.get(text) if unknown else None
            if ids is None:
                ids = self._word_by_word(" " + text if unknown else text, encode)
                if ids is None:
                    return None
                if unknown and 0 < len(text) < _LONGEST_WORD and not text.endswith(_SPACES):
                    if len(spaced) > _MAX_WORDS:
                        spaced.clear()
                    spaced[text] = ids
            pieces.append(ids)
        pieces += found[at:count]
        return b"".join(cast("list[bytes]", pieces))

    def _word_by_word(self, text: str, encode: Callable[[str], list[int]]) -> bytes | None:
        words = self.split.findall(text)
        # What no alternative matches is a word to the tokenizer, and none to `findall`. The well-known ones match all.
        if not self.cuts_at_spaces and len("".join(words)) != len(text):
            return None
        try:
            return b"".join(map(self._known.__getitem__, words))
        except KeyError:
            return self._learned(words, encode)

    def _learned(self, words: list[str], encode: Callable[[str], list[int]]) -> bytes | None:
        """The ids of these words with those that were unknown; None: too many of them to learn at once."""
        known = self._known
        if len(known) > _MAX_WORDS:
            known.clear()
        new = {word for word in words if word not in known}
        found: dict[str, bytes] = {}
        for word in list(new)[: self._learnable]:
            # By itself it must be one word, too: behind other text it may have been cut otherwise.
            if self.split.findall(word) != [word]:
                return None
            found[word] = _packed(encode(word))
        self._learnable -= len(found)
        known.update((word, ids) for word, ids in found.items() if len(word) <= _LONGEST_WORD)
        if len(found) < len(new):
            return None
        return b"".join([found[word] if word in found else known[word] for word in words])


def _packed(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def _is_harmless(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(_is_harmless(part) for part in normalizer.get("normalizers", ()))
    return normalizer.get("type") in _HARMLESS_NORMALIZERS


def _split_by(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The one regular expression that a byte-level tokenizer splits by; None for any other tokenizer."""
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


def _for_ascii(pattern: str) -> re.Pattern[str] | None:
    """The expression as Python has it, equal for ASCII text; None if it has anything that may mean something else."""
    translated, position, in_class = [], 0, False
    while position < len(pattern):
        escaped = _ESCAPED.match(pattern, position)
        if escaped is None:
            char = pattern[position]
            if char in ("[&~" if in_class else ".^$"):
                return None  # sets within sets; and what these mean depends on who reads them
            in_class = in_class != (char == ("]" if in_class else "["))
            translated.append(char)
            position += 1
            continue
        said, position = escaped[0], escaped.end()
        if said in _CLASSES:
            translated.append(_CLASSES[said] if in_class else f"[{_CLASSES[said]}]")
        elif said == r"\S" and not in_class:
            translated.append(f"[^{_SPACE}]")
        elif said in _KEPT_ESCAPES:
            translated.append(said)
        else:
            return None
    ours = "".join(translated)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            split = re.compile(ours)
    except (re.error, FutureWarning):
        return None
    # `{1,3}+` is possessive to Python alone.
    return None if split.groups or split.match("") or "}+" in ours else split
