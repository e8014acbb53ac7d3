"""Token ids of text from a cache of words: equal to the tokenizer's ids, about six times as fast.

A byte-level BPE tokenizer removes added tokens from a text, splits the rest with one regular expression, and encodes
each word alone. So a word has the same ids in every text, and the cache can keep them.

A text is looked up in three steps, each for what the one before did not know:

1. Text between two spaces that begin words, in any script: `str.split` is faster than a regular expression.
2. Its words, if it is ASCII: the tokenizer's Unicode classes are a few ranges there, and Python's `re` splits alike.
3. The rest is encoded by the tokenizer, in one call for a slice of text, and cached.

A long text is looked up slice by slice, so that an event loop can run between. A slice ends where a word ends.
The cache is built only for tokenizers whose every part is listed here and in `split_pattern`.

Source: tokenizers 0.23 tokenizer/added_vocabulary.rs.
"""

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, cast

from lorafleet.tokenizer.split_pattern import CUT, keeps_words_apart, split_pattern
from lorafleet.tokenizer.split_points import TokenizerFile, certain_tokens, longest_match_pattern

# What any Unicode version or Python counts as white space: one more than the tokenizer's never harms, since a space
# after it is then just not used.
SPACES: Final = tuple(" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2028\u2029\u202f\u205f\u3000") + tuple(
    map(chr, range(0x2000, 0x200C))
)
SLICE_CHARS: Final = 16_384
"""A slice's length. It is up to twice as long if no word ends before; without an end the rest of a stretch is whole."""
MAX_CACHE_BYTES: Final = 16 * 2**20
"""Of all caches of one tokenizer. English and code have some 60,000 words and pieces in it."""
_LONGEST_CACHED = 64
MAX_STRETCHES, _LONGEST_STRETCH = 1000, 16
# Below this length the expression is as fast as splitting at spaces.
_LEAST_SPLIT_CHARS = 96
# Unknown texts that are always encoded separately and cached, though the slice as a whole might take less time.
_LEARNED_PER_SLICE = 64
# A dict entry, by sys.getsizeof on CPython 3.11, whose table is on average three quarters full.
_ENTRY_BYTES = 120

Encode = Callable[[str], list[int]]
"""The tokenizer's encoding of a text, without special tokens."""


class PieceIds:
    """Ids of short texts, packed; bounded in bytes. When full, what was not used since it was half full is dropped.

    recent  the entries used or added since then
    """

    def __init__(self, max_bytes: int) -> None:
        self._half_bytes = max_bytes // 2
        self.recent: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}
        self._recent_bytes = self._older_bytes = 0

    def __len__(self) -> int:
        """How many texts are cached, those counted twice that are used again."""
        return len(self.recent) + len(self._older)

    @property
    def size_bytes(self) -> int:
        """Estimated memory of all entries."""
        return self._recent_bytes + self._older_bytes

    def get(self, text: str) -> bytes | None:
        """The ids of a text, marked as used; None if they are not cached."""
        ids = self.recent.get(text)
        if ids is None and (ids := self._older.get(text)) is not None:
            self.put(text, ids)
        return ids

    def put(self, text: str, ids: bytes) -> None:
        """Cache the ids of a text, unless it is long."""
        if len(text) > _LONGEST_CACHED or text in self.recent:
            return
        size_bytes = sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_BYTES
        if self._recent_bytes + size_bytes > self._half_bytes:
            self._older, self._older_bytes = self.recent, self._recent_bytes
            self.recent, self._recent_bytes = {}, 0
        self.recent[text] = ids
        self._recent_bytes += size_bytes


class SliceLookup:
    """The ids of one slice as far as they are cached, and the texts that the tokenizer must encode for the rest."""

    __slots__ = ("_holes", "_parts", "_text", "_unknown")

    def __init__(self, text: str) -> None:
        self._text = text
        self._parts: list[bytes | None] = []
        # Numbers of the parts that are not cached, and their texts.
        self._holes: list[tuple[int, str]] = []
        self._unknown: dict[str, None] = {}

    def add(self, ids: bytes) -> None:
        """Append ids."""
        self._parts.append(ids)

    def add_all(self, ids: Sequence[bytes | None]) -> None:
        """Append the ids of several texts, all of them known."""
        self._parts += ids

    def add_unknown(self, text: str) -> None:
        """Append a text that the tokenizer must encode."""
        self._holes.append((len(self._parts), text))
        self._parts.append(None)
        self._unknown[text] = None

    @property
    def chars(self) -> int:
        """The slice's length."""
        return len(self._text)

    @property
    def to_encode(self) -> list[str]:
        """The texts whose ids `ids` takes: the unknown ones. If they are most of the slice: the slice, and some more.

        Separately they take the tokenizer about twice as long. The few more are for the cache to learn.
        """
        if not self._unknown:
            return []
        unknown = list(self._unknown)
        if len(unknown) <= _LEARNED_PER_SLICE or 2 * sum(map(len, unknown)) <= len(self._text):
            return unknown
        return [self._text, *[text for text in unknown if len(text) <= _LONGEST_CACHED][:_LEARNED_PER_SLICE]]

    def ids(self, texts: Sequence[str], encoded: Sequence[bytes]) -> bytes:
        """The slice's ids, from those of the texts of `to_encode`."""
        if not texts:
            return b"".join(cast("list[bytes]", self._parts))
        if texts[0] is self._text:  # not a word of equal text
            return encoded[0]
        found = dict(zip(texts, encoded, strict=True))
        for at, text in self._holes:
            self._parts[at] = found[text]
        return b"".join(cast("list[bytes]", self._parts))


@dataclass(slots=True)
class WordCache:
    """One tokenizer's word pattern, and the ids of the texts seen so far, packed as unsigned 32-bit integers.

    split      pattern of one word of ASCII text
    added      pattern of the added tokens, whose ids are `added_ids`
    separator  an added token that matches between any two texts; None if there is none
    """

    split: re.Pattern[str]
    added: re.Pattern[str] | None
    added_ids: Mapping[str, bytes]
    separator: str | None = None
    # Words, and other texts that the tokenizer encoded.
    words: PieceIds = field(default_factory=lambda: PieceIds(MAX_CACHE_BYTES // 2))
    # Text between two spaces that begin words -> its ids, the first space included.
    spaced: PieceIds = field(default_factory=lambda: PieceIds(MAX_CACHE_BYTES // 2))
    # Added tokens, and short text between two of them, such as a chat template's turn marks.
    stretches: dict[str, bytes] = field(init=False)
    # What the stretch cache begins with: the added tokens, and the empty text that `split` finds between two of them.
    _fixed_stretches: Mapping[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Begin the stretch cache."""
        self._fixed_stretches = {**self.added_ids, "": b""}
        self.stretches = dict(self._fixed_stretches)

    @classmethod
    def from_file(cls, file: TokenizerFile, token_to_id: Callable[[str], int | None]) -> "WordCache | None":
        """A cache for a tokenizer; None if word ids would not be exact.

        token_to_id  the library's id of a token. The library renumbers added tokens where the file has gaps,
                     duplicates or clashes
        """
        tokens = [token for token in file.added_tokens if token.content]
        is_plain = not any(token.normalized or token.single_word or token.lstrip or token.rstrip for token in tokens)
        if not is_plain or file.model.type != "BPE" or file.model.dropout:
            return None
        if any(token_to_id(token.content) != token.id for token in tokens):
            return None
        split = split_pattern(file.pre_tokenizer)
        if split is None or not keeps_words_apart(file.normalizer):
            return None
        contents = [token.content for token in tokens]
        added = re.compile(f"({longest_match_pattern(contents)})") if tokens else None
        # Printable ASCII stands for itself among a byte-level model's tokens, so no other text has such a token's id.
        separators = (token for token in contents if token.isascii() and token.isprintable() and " " not in token)
        certain = frozenset(certain_tokens(contents))
        separator = next((token for token in separators if token in certain), None)
        return cls(split, added, {token.content: _packed([token.id]) for token in tokens}, separator)

    @property
    def size_bytes(self) -> int:
        """Estimated memory of the cached words and texts between spaces."""
        return self.words.size_bytes + self.spaced.size_bytes

    def slices(self, text: str) -> Iterable[list[str]]:
        """A text in slices that can be encoded alone, each in stretches: added tokens, and text without them."""
        stretches = [text] if self.added is None else self.added.split(text)
        return (stretches,) if len(text) <= SLICE_CHARS else self._cut_slices(stretches)

    def _cut_slices(self, stretches: Sequence[str]) -> Iterator[list[str]]:
        """The slices of a text that is longer than one, from its stretches."""
        taken: list[str] = []
        chars = 0
        for stretch in stretches:
            start = 0
            while chars + len(stretch) - start > SLICE_CHARS and stretch not in self.added_ids:
                target = start + SLICE_CHARS - chars
                cut = CUT.search(stretch, target, start + 2 * SLICE_CHARS)
                if cut is None:
                    break
                yield [*taken, stretch[start : cut.end()]]
                start, chars, taken = cut.end(), 0, []
            taken.append(stretch[start:])
            # Each stretch takes time, even a short one.
            chars += len(stretch) - start + _LONGEST_STRETCH
            if chars > SLICE_CHARS:
                yield taken
                chars, taken = 0, []
        yield taken

    def look_up(self, stretches: Sequence[str]) -> SliceLookup:
        """Look up one slice in the caches. Caches text whose words are all known."""
        found = list(map(self.stretches.get, stretches))
        lookup = SliceLookup("".join(stretches))
        found.append(None)
        at = 0
        while (unknown := found.index(None, at)) < len(stretches):
            lookup.add_all(found[at:unknown])
            self._look_up_stretch(stretches[unknown], lookup)
            at = unknown + 1
        lookup.add_all(found[at:-1])
        return lookup

    def encode_apart(self, texts: Sequence[str], encode: Encode) -> list[bytes]:
        """The ids of each of these texts, which `SliceLookup.to_encode` gave. Changes nothing: for any thread."""
        if not texts:
            return []
        if self.separator is None:
            return [_packed(encode(text)) for text in texts]
        # The slice itself may have separators in it.
        first, *others = texts
        found = [_packed(encode(first))]
        if others:
            ids, start = encode(self.separator.join(others)), 0
            [mark] = array("I", self.added_ids[self.separator])
            for _ in others[1:]:
                end = ids.index(mark, start)
                found.append(_packed(ids[start:end]))
                start = end + 1
            found.append(_packed(ids[start:]))
        return found

    def learn(self, texts: Sequence[str], encoded: Sequence[bytes]) -> None:
        """Cache the ids of short texts."""
        for text, ids in zip(texts, encoded, strict=True):
            self.words.put(text, ids)

    def _look_up_stretch(self, stretch: str, lookup: SliceLookup) -> None:
        """Look up a stretch that the stretch cache lacks. Caches its ids there, if it is short and its words known."""
        if len(stretch) > 2 * SLICE_CHARS:
            lookup.add_unknown(stretch)  # no word's end was found in it
        elif len(stretch) >= _LEAST_SPLIT_CHARS:
            self._look_up_spaced(stretch, lookup)
        else:
            ids = self._look_up_piece(stretch, lookup)
            if ids is not None and len(stretch) <= _LONGEST_STRETCH:
                if len(self.stretches) >= len(self._fixed_stretches) + MAX_STRETCHES:
                    self.stretches = dict(self._fixed_stretches)
                self.stretches[stretch] = ids

    def _look_up_spaced(self, stretch: str, lookup: SliceLookup) -> None:
        """Look up a long stretch by its text between spaces. Text that is not cached is looked up by its words."""
        texts = stretch.split(" ")
        count = len(texts)
        found = list(map(self.spaced.recent.get, texts))
        found[0] = None  # no space precedes it
        found.append(None)
        at = 0
        while (unknown := found.index(None, at)) < count:
            lookup.add_all(found[at:unknown])
            at = unknown + 1
            # After white space, a space may belong to the word before it.
            while at < count and (not texts[at - 1] or texts[at - 1].endswith(SPACES)):
                at += 1
            text = " ".join(texts[unknown:at])
            if not unknown:
                self._look_up_piece(text, lookup)
            elif (ids := self.spaced.get(text)) is not None:
                lookup.add(ids)
            else:
                ids = self._look_up_piece(" " + text, lookup)
                # So a known text is never the first half of a longer one: the next space begins a word.
                if ids is not None and text and not text.endswith(SPACES):
                    self.spaced.put(text, ids)
        lookup.add_all(found[at:count])

    def _look_up_piece(self, piece: str, lookup: SliceLookup) -> bytes | None:
        """Look up a piece that is encoded alone; its ids, None if the tokenizer must encode any of it."""
        if not piece.isascii():
            if len(piece) > _LONGEST_CACHED:
                self._look_up_cut(piece, lookup)
                return None
            ids = self.words.get(piece)
            if ids is None:
                lookup.add_unknown(piece)
            else:
                lookup.add(ids)
            return ids
        words = self.split.findall(piece)
        found = list(map(self.words.recent.get, words))
        if None not in found:
            ids = b"".join(cast("list[bytes]", found))
            lookup.add(ids)
            return ids
        found = list(map(self.words.get, words))
        for word, ids in zip(words, found, strict=True):
            if ids is None:
                lookup.add_unknown(word)
            else:
                lookup.add(ids)
        return None

    def _look_up_cut(self, piece: str, lookup: SliceLookup) -> None:
        """Look up a long piece that is not ASCII: its ASCII by words, the rest is the tokenizer's."""
        for is_ascii, parts in groupby(CUT.split(piece), str.isascii):
            text = "".join(parts)
            if is_ascii:
                self._look_up_piece(text, lookup)
            else:
                lookup.add_unknown(text)


def _packed(ids: list[int]) -> bytes:
    """Ids as bytes, 32 bits each."""
    return array("I", ids).tobytes()
