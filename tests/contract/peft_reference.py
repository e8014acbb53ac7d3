"""The log-probabilities that transformers and PEFT compute in float32, as a program of its own.

Each line on standard input is a question `{"adapters": {name: folder}, "texts": [[name or "", token ids], ...]}`. Each
answer is a line of JSON on standard output: per text one list, the log-probability of each token but the first.

    python -P -m tests.contract.peft_reference MODEL_FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


class PeftReference:
    """A base model in float32, and the adapters that were named so far."""

    def __init__(self, model: Path) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._adapted: PeftModel | None = None

    def load(self, name: str, folder: str) -> None:
        """Load an adapter, unless one of this name is loaded."""
        if self._adapted is None:
            self._adapted = PeftModel.from_pretrained(self._base, folder, adapter_name=name).eval()
        elif name not in self._adapted.peft_config:
            self._adapted.load_adapter(folder, adapter_name=name)

    def logprobs(self, name: str, tokens: list[int]) -> list[float]:
        """The log-probability of each token but the first, by this adapter; by the base model if `name` is empty."""
        if self._adapted is None:
            return self._logprobs(self._base, tokens)
        if not name:
            with self._adapted.disable_adapter():
                return self._logprobs(self._adapted, tokens)
        self._adapted.set_adapter(name)
        return self._logprobs(self._adapted, tokens)

    def _logprobs(self, model: torch.nn.Module, tokens: list[int]) -> list[float]:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, :-1].float()
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return [float(each) for each in found]


def main() -> None:
    torch.set_num_threads(1)
    reference = PeftReference(Path(sys.argv[1]))
    for line in sys.stdin:
        question = json.loads(line)
        for name, folder in question["adapters"].items():
            reference.load(name, folder)
        answer = [reference.logprobs(name, tokens) for name, tokens in question["texts"]]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
