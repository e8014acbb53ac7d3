"""Small tokenizers with the split patterns of real ones, as their tokenizer.json files have them."""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"]
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "qwen 2": QWEN,
    "qwen 3.5": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "llama 3": QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "gpt 4o": "|".join(part + _SUFFIX for part in _CASED) + r"|\p{N}{1,3}" + _SLASHED,
    "mistral's tekken": "|".join(_CASED) + r"|\p{N}" + _SLASHED,
    "gpt 2": None,
}
_CORPUS = [
    "It's what they'll say: I'd've done 12345 things, hadn't I?\n\n",
    "def main(argv):\n    return {'a': argv[0], \"b\": 0x1F}\t# tabs\r\n",
    "the quick brown fox jumps over the lazy dog  and then   some",
    "für größere Straßen, naïve “quotes”. 今天天气很好，我们去散步。",
] * 20


@cache
def tokenizer(name: str, *, inverted: bool = False) -> Tokenizer:
    """A small trained tokenizer with the pattern of this name; `inverted` as files converted from tiktoken have it."""
    built = Tokenizer(models.BPE())
    built.normalizer = normalizers.NFC() if name.startswith("qwen") else None
    pattern = PATTERNS[name]
    behavior = "removed" if inverted else "isolated"
    built.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if pattern is None
        else pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=inverted),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    built.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|im_end|>x"])
    built.add_tokens([AddedToken("<tool>", normalized=False)])
    return built
