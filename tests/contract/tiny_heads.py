"""A tiny model that pools, adapters for it as PEFT trains and saves them, and what transformers and PEFT compute.

    python -P -m tests.contract.tiny_heads KIND FOLDER COUNT

KIND is `classify` (8 classes), `score` (a cross-encoder) or `embed`. Writes FOLDER/tiny-qwen, FOLDER/adapters/NAME, and
FOLDER/expected.json: by adapter ("" is the base model) the numbers of each of `TEXTS`.
"""

import json
import sys
from pathlib import Path
from typing import Any

TEXTS = ("The order was late again.", "SELECT name FROM customers", "Read the contract before you sign it.")
QUERY = "Which customers ordered twice?"
CLASSES = 8


def make(kind: str, into: Path, count: int) -> None:
    """Write model, adapters and expected numbers."""
    import torch
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification, Qwen2Model

    from lorafleet.local.tiny_model import make_model

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(make_model(into / "words"))
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=4096,
        max_position_embeddings=2048,
        pad_token_id=0,
        num_labels=1 if kind == "score" else CLASSES,
    )
    base = (Qwen2Model if kind == "embed" else Qwen2ForSequenceClassification)(config).eval()
    base.save_pretrained(into / "tiny-qwen")
    tokenizer.save_pretrained(into / "tiny-qwen")

    def numbers(model: Any) -> list[list[float]]:
        """The class shares, score or vector of each text."""
        found = []
        for text in TEXTS:
            ids = tokenizer(QUERY, text) if kind == "score" else tokenizer(text)
            with torch.inference_mode():
                output = model(input_ids=torch.tensor([ids["input_ids"]]))
            if kind == "embed":
                found.append(torch.nn.functional.normalize(output.last_hidden_state[0, -1], dim=0).tolist())
            else:
                logits = output.logits[0]
                found.append((logits.sigmoid() if kind == "score" else logits.softmax(-1)).tolist())
        return found

    expected = {"": numbers(base)}
    task = TaskType.FEATURE_EXTRACTION if kind == "embed" else TaskType.SEQ_CLS
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type=task)
    adapted = get_peft_model(base, lora).eval()
    for number in range(count):
        torch.manual_seed(1 + number)
        for name, weight in adapted.named_parameters():
            if "modules_to_save" in name or "lora_" in name:
                torch.nn.init.normal_(weight, std=0.3 if "modules_to_save" in name else 0.2)
        adapted.save_pretrained(into / "adapters" / f"head-{number}")
        expected[f"head-{number}"] = numbers(adapted)
    (into / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
