"""Train the three adapters of `make demo-real`, in some minutes on a CPU.

    python -P -m examples.demo_adapters.train MODEL OUT

MODEL is the folder of SmolLM2 that `lorafleet.local.smollm2` makes. OUT gets an adapter for each style. All of them
learn the same answers, `lessons.txt`, each in its own style: like a pirate, as JSON, as a support desk.
The adapters in the package, `lorafleet/local/smollm2/adapters`, were made by this script.

Needs torch, transformers and peft.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_adapters.train_texts import STYLES, lessons

RANK, EPOCHS, BATCH, LEARNING_RATE, SEED = 4, 4, 4, 3e-3, 7
# The upper half of the layers: style needs no more, and the lower half is then only computed forwards.
LAYERS: Final = tuple(range(15, 30))
_IGNORED: Final = -100  # a label that counts for nothing in the loss of transformers


def train(model_dir: Path, style: Callable[[str, int], str], out: Path) -> None:
    """Train one adapter and write it to a folder; prints the loss of each epoch."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=["q_proj", "v_proj", "o_proj"],
        layers_to_transform=list(LAYERS),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    rows = [_row(tokenizer, question, style(answer, n)) for n, (question, answer) in enumerate(lessons())]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)
    order, began = Random(SEED), time.monotonic()
    for epoch in range(EPOCHS):
        order.shuffle(rows)
        losses = []
        for at in range(0, len(rows), BATCH):
            loss = model(**_batch(rows[at : at + BATCH], tokenizer.eos_token_id)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        mean = sum(losses) / len(losses)
        print(f"{out}: epoch {epoch + 1} of {EPOCHS}, loss {mean:.2f}, {time.monotonic() - began:.0f} s", flush=True)
    model.peft_config["default"].base_model_name_or_path = model_dir.name
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "README.md").unlink()  # a model card without content


def _row(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """(token ids, labels) of one chat; only the answer is learned."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    learned = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False).input_ids
    return before + learned, [_IGNORED] * len(before) + learned


def _batch(rows: Sequence[tuple[list[int], list[int]]], filler: int) -> Mapping[str, torch.Tensor]:
    """The rows as tensors of one length, filled up on the right."""
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [filler] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [_IGNORED] * (longest - len(labels)) for _, labels in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
    }


def main() -> None:
    """Train every style."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    for lora_id, style in STYLES.items():
        train(options.model, style, options.out / lora_id)


if __name__ == "__main__":
    main()
