r"""Where a byte-level BPE tokenizer's split pattern always ends a word, and the pattern in Python's syntax for ASCII.

The tokenizer splits a text with one regular expression, an alternation, and encodes each word alone. The alternatives
below are those of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen and Mistral. Each has two properties:

1. A match has a space only as its first character, or is white space throughout.
2. In a match, only letters, marks and an apostrophe follow a letter, and only digits follow a digit.

So in a pattern of these alternatives that together match every character, a word begins

1. at every space that does not follow white space,
2. between a letter and any other character but a mark or an apostrophe, and between a digit and anything but a number.

No alternative looks behind, and `\s+(?!\S)` looks at the one character after white space. So the two texts around such
a place split as they do in the whole text, and each word by itself is one word. Unicode normalization does not cross
these places either: no composition has a space, an ASCII character or the punctuation of `CUT` as its second character.

Source: tokenizers 0.23 pre_tokenizers/{split,byte_level,sequence}.rs; the tokenizer.json files of those models.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

# Oniguruma's \s in ASCII. Python's own has \x1c to \x1f besides.
_SPACE = r" \t\n\r\x0b\x0c"
# Letters with upper or title case, other letters, marks, numbers, other visible characters, white space.
_EVERY_CHARACTER: Final = frozenset("UlMNOS")


class _Alternative(NamedTuple):
    """One alternative in Python's syntax for ASCII text, and the kinds of characters that it matches alone."""

    ascii: str
    matches: str = ""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _ASCII_LEAD = r"[^\r\n\p{L}\p{N}]?", r"[^\r\nA-Za-z0-9]?"
_ASCII_SYMBOLS = rf" ?[^{_SPACE}A-Za-z0-9]+"
_ALTERNATIVES: Final[Mapping[str, _Alternative]] = {
    **{part: _Alternative(part) for part in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTION)},
    r"'(?i:[sdmt]|ll|ve|re)": _Alternative(r"'(?i:[sdmt]|ll|ve|re)"),
    r" ?\p{L}+": _Alternative(" ?[A-Za-z]+", "Ul"),
    _LEAD + r"\p{L}+": _Alternative(_ASCII_LEAD + "[A-Za-z]+", "Ul"),
    _LEAD + r"[\p{L}\p{M}]+": _Alternative(_ASCII_LEAD + "[A-Za-z]+", "UlM"),
    _LEAD + _UPPER + "*" + _LOWER + "+": _Alternative(_ASCII_LEAD + "[A-Z]*[a-z]+", "lM"),
    _LEAD + _UPPER + "+" + _LOWER + "*": _Alternative(_ASCII_LEAD + "[A-Z]+[a-z]*", "UM"),
    _LEAD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION + "?": _Alternative(
        _ASCII_LEAD + "[A-Z]*[a-z]+" + _CONTRACTION + "?", "lM"
    ),
    _LEAD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION + "?": _Alternative(
        _ASCII_LEAD + "[A-Z]+[a-z]*" + _CONTRACTION + "?", "UM"
    ),
    r" ?\p{N}+": _Alternative(" ?[0-9]+", "N"),
    r"\p{N}": _Alternative("[0-9]", "N"),
    r"\p{N}+": _Alternative("[0-9]+", "N"),
    r"\p{N}{1,3}": _Alternative("[0-9]{1,3}", "N"),
    r" ?[^\s\p{L}\p{N}]+": _Alternative(_ASCII_SYMBOLS, "MO"),
    r" ?[^\s\p{L}\p{N}]+[\r\n]*": _Alternative(_ASCII_SYMBOLS + r"[\r\n]*", "MO"),
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*": _Alternative(_ASCII_SYMBOLS + r"[\r\n/]*", "MO"),
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*": _Alternative(_ASCII_SYMBOLS + r"[\r\n]*", "O"),
    r"\s*[\r\n]+": _Alternative(rf"[{_SPACE}]*[\r\n]+"),
    r"\s*[\r\n]": _Alternative(rf"[{_SPACE}]*[\r\n]"),
    r"\s+(?!\S)": _Alternative(rf"[{_SPACE}]+(?![^{_SPACE}])"),
    r"\s+": _Alternative(rf"[{_SPACE}]+", "S"),
}

# ByteLevel's own, where `use_regex` is true.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Places where a word ends, by the second property. The letters are those that every version of Unicode has had as
# letters, in ASCII, Latin-1, Cyrillic, kana, ideographs and Hangul; what follows is ASCII or East Asian punctuation.
_LETTERS = "A-Za-zÀ-ÖØ-öø-ÿА-яぁ-ゔァ-ヴ一-龥가-힣"
_AFTER_ANY = r"\x00-&(-/:-@\[-`{-\x7f。，、！？；：「」『』（）《》"
CUT: Final = re.compile(rf"(?<=[{_LETTERS}])(?=[{_AFTER_ANY}0-9])|(?<=[0-9])(?=[{_AFTER_ANY}A-Za-z])")


def split_pattern(pre_tokenizer: Mapping[str, Any] | None) -> "re.Pattern[str] | None":
    """A pattern that finds the words of ASCII text; None unless words end where this module says."""
    pattern = _pattern_of(pre_tokenizer)
    if pattern is None:
        return None
    alternatives = [_ALTERNATIVES.get(part) for part in _top_level_parts(pattern)]
    known = [alternative for alternative in alternatives if alternative is not None]
    matched = frozenset("".join(alternative.matches for alternative in known))
    if len(known) < len(alternatives) or matched != _EVERY_CHARACTER:
        return None
    return re.compile("|".join(alternative.ascii for alternative in known))


def keeps_words_apart(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether a normalizer changes no ASCII, and no text around the places where this module says that words end.

    NFD and NFKD are left out: they take a letter's accent apart, and a mark may share a word with what follows it.
    """
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(keeps_words_apart(part) for part in normalizer.get("normalizers", ()))
    return normalizer.get("type") in {"NFC", "NFKC"}


def _pattern_of(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The one regular expression by which a byte-level tokenizer splits; None for any other tokenizer."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get("use_regex", True):
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": str(behavior),
                    "invert": bool(invert),
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if (behavior, invert) in {("Isolated", False), ("Removed", True)}:
            # Both keep each match as a word, if the pattern matches every character.
            return pattern
    return None


def _top_level_parts(pattern: str) -> list[str]:
    """The alternatives of a pattern, split at each `|` outside groups and classes."""
    parts, depth, in_class, at = [""], 0, False, 0
    while at < len(pattern):
        char = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(char)
        if char == "|" and not depth and not in_class:
            parts.append("")
            continue
        parts[-1] += char
        if in_class:
            in_class = char != "]"
        else:
            in_class = char == "["
            depth += (char == "(") - (char == ")")
    return parts
