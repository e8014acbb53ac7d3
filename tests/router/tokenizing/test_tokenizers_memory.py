"""Memory of long prompts: what encoding them took is given back, and what is kept is bounded and counted."""

import asyncio
import gc
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lorafleet.tokenizer import word_cache
from lorafleet.tokenizer.chat import ChatTokenizer
from router.tokenizing.tokenizers import Tokenizers
from tests.lorafleet.tokenizer.split_patterns import tokenizer
from tests.serving import client_of

BASE = "base"
RULES = "You answer in SQL. Tables: customers(id, name), orders(id, customer, total).\n"


def resident_mb() -> float:
    """Memory of this process in the machine's."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def encode_all(tokenizers: Tokenizers, texts: list[str]) -> int:
    """Encode prompts at once; how many tokens they have."""
    found = [tokenizers.ids({"prompt": text}, base_model=BASE, engine_url="") for text in texts]
    return sum(len(tokens.ids or ()) for tokens in await asyncio.gather(*found))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
async def test_memory_of_texts_that_the_library_gets_whole_is_given_back():
    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    letters.train_from_iterator([RULES], trainers.BpeTrainer(vocab_size=60))
    async with client_of() as client:
        # Each thread has a heap of its own, and glibc keeps what was freed in it.
        tokenizers = Tokenizers(client, threads=4)
        tokenizers.adopt(BASE, ChatTokenizer.from_files({"tokenizer.json": letters.to_str()}))
        before = resident_mb()
        assert await encode_all(tokenizers, [f"{n} {RULES * 6000}" for n in range(4)]) > 400_000
        assert resident_mb() - before < 40
        tokenizers.close()


async def test_all_that_is_kept_of_prompts_is_bounded_and_counted(monkeypatch):
    monkeypatch.setattr(word_cache, "MAX_CACHE_BYTES", 400_000)
    async with client_of() as client:
        tokenizers = Tokenizers(client, cache_bytes=100_000)
        tokenizers.adopt(BASE, ChatTokenizer.from_files({"tokenizer.json": tokenizer("qwen 2").to_str()}))
        for n in range(12):
            words = [f"größe{n}x{at} naïve-{at % 97} word{'abcdefghij'[at % 10]}{at // 10}" for at in range(2_000)]
            await encode_all(tokenizers, [f"{' '.join(words)}<|im_end|>今天天气{n}很好。" * 2])
            assert tokenizers.cache_bytes < 100_000 + 400_000
        assert tokenizers.cache_bytes > 200_000
        tokenizers.close()
