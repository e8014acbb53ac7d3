"""Which adapter's bytes answered: the sim's text follows from adapter and prompt, so it can be computed beforehand."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from lorafleet.sim.__main__ import _model_config
from lorafleet.sim.settings import parse_settings
from lorafleet.sim.text import TextGenerator
from lorafleet.tokenizer.chat import ChatTokenizer

BASE, UNKNOWN = -1, -2
"""Values of an answer that comes from the base model, and from none of the known bytes."""


class ExpectedAnswers:
    """The answers of each of the adapters' folders, by number."""

    def __init__(self, model: Path, contents: Sequence[Path]) -> None:
        settings = parse_settings(("--model", str(model)))
        config = _model_config(model)
        self._generator = TextGenerator(
            ChatTokenizer.from_dir(model),
            vocabulary=int(config["vocab_size"]),
            eos=config.get("eos_token_id", 0),
            seed=settings.sim_seed,
            natural_tokens=settings.sim_response_tokens,
        )
        self._digests = {number: _text_digest(folder) for number, folder in enumerate(contents)} | {BASE: b""}

    def content_of(self, text: str, prompt: Sequence[int], max_tokens: int) -> int:
        """Number of the bytes that give this answer; BASE or UNKNOWN otherwise."""
        for number, digest in self._digests.items():
            if self.text(digest, prompt, max_tokens) == text:
                return number
        return UNKNOWN

    def text(self, digest: bytes, prompt: Sequence[int], max_tokens: int) -> str:
        reply = self._generator.reply(digest, prompt, choice=0, max_tokens=max_tokens, ignore_eos=True, stops=())
        return "".join(reply.pieces)


def _text_digest(folder: Path) -> bytes:
    """As the sim computes it from the files that it loads."""
    digest = hashlib.sha256((folder / "adapter_config.json").read_bytes())
    digest.update(hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).digest())
    return digest.digest()
