"""TRL's own client and rollout worker against a fleet, in a process of their own: what AsyncGRPOTrainer does each sync.

    python -m tests.e2e.trl_cycle URL MODEL SHELF     # prints one JSON object of what the client saw

Imported by nothing: TRL brings torch, transformers and warnings that a test run would take for errors.
"""

import json
import os
import queue
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.patience import patience

MAX_STALENESS = 1
SYNCS = 3
NAME = "trl-policy"


def reward_of_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(one))) for one in completions]


def main(url: str, model_dir: str, shelf: Path) -> None:
    import requests
    import torch
    from accelerate import Accelerator
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen2_5_chat_template
    from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter, select_adapter_sync
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    accelerator = Accelerator(cpu=True)  # before anything is logged
    client = VLLMClient(url, server_timeout=60)
    client.wait_for_server_ready()
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), lora)
    limits = SimpleNamespace(max_staleness=MAX_STALENESS)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = qwen2_5_chat_template  # TRL parses answers of the templates that it knows alone
    seen: dict[str, Any] = {
        "syncs_adapters": select_adapter_sync(client.get_server_info(), model, limits),
        "max_model_len": client.get_max_model_len(),
        "samples": [],
        "served": [],
    }
    rows = [{"prompt": [{"role": "user", "content": f"Count to {number}."}]} for number in range(3, 40)]
    worker = AsyncRolloutWorker(
        model_name="tiny-qwen",
        lora_name=NAME,
        dataset=Dataset.from_list(rows),
        reward_funcs=[reward_of_length],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        vllm_server_url=url,
        num_generations=2,
        max_inflight_tasks=4,
        queue_maxsize=4,
        max_tokens=8,
    )

    def served(version: int) -> str:
        body = {"model": f"{NAME}-v{version}", "prompt": [300, 301, 302], "max_tokens": 1}
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
        return answer.headers["x-lorafleet-adapter"].partition("@")[0] if answer.ok else str(answer.status_code)

    try:
        # The sequence of AsyncGRPOTrainer: the first adapter is all zeros, and is synced before the worker starts.
        for version in range(1, SYNCS + 1):
            folder = shelf / f"{NAME}-v{version}"
            client.pause()
            save_lora_adapter(model, accelerator, "default", str(folder))
            client.load_lora_adapter(f"{NAME}-v{version}", str(folder))
            client.resume()
            stale = version - (MAX_STALENESS + 1)
            if stale > 0:
                client.unload_lora_adapter(f"{NAME}-v{stale}")
            if stale > 1:
                shutil.rmtree(shelf / f"{NAME}-v{stale - 1}")
            worker.update_model_version(version)
            if version == 1:
                worker.start()
            seen["samples"].append(_next_sample(worker, version))
            seen["served"].append([served(one) for one in range(1, version + 1)])
            with torch.no_grad():
                for name, weights in model.named_parameters():
                    if "lora_B" in name:
                        weights.add_(torch.randn_like(weights), alpha=0.01)
    finally:
        worker.stop()
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()


def _next_sample(worker: Any, version: int) -> dict[str, Any]:
    """What the first sample of that version has. Those of older versions may be in the queue before it."""
    while True:
        worker.check_health(stale_after_s=patience(60))
        try:
            sample = worker.rollout_buffer.get(timeout=5)
        except queue.Empty:
            continue
        if sample.model_version == version:
            ours = sample.completion_mask.astype(bool)
            return {"tokens": int(ours.sum()), "highest_logprob": float(sample.old_log_probs[ours].max())}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    os._exit(0)
