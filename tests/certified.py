"""Acceptance files with what the sim computes."""

import hashlib
from pathlib import Path

from lorafleet.client.certify import write_acceptance
from lorafleet.sim.text import prompt_logprobs

PROMPTS = [[(7 * place + start) % 250 + 3 for place in range(40)] for start in (1, 2)]


def sim_digest(folder: Path) -> bytes:
    """What the sim draws an adapter's answers by."""
    weights = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).digest()
    return hashlib.sha256((folder / "adapter_config.json").read_bytes() + weights).digest()


def certify(folder: Path, *, of: Path | None = None, template: str = "") -> str:
    """Write the sim's numbers with the adapter `of`, default: its own, beside an adapter; the file's digest."""
    digest = sim_digest(of or folder)
    path = write_acceptance(
        folder,
        PROMPTS,
        lambda prompt: prompt_logprobs(digest, prompt),
        lambda prompt: prompt_logprobs(b"", prompt),
        chat_template=template,
    )
    return hashlib.sha256(path.read_bytes()).hexdigest()
