"""Train an adapter on the CPU, publish each step to a fleet, sample from it, and check which weights answered.

    lorafleet up --engine vllm --workers 2 --state-dir .state/demo      # prints: ready router=http://127.0.0.1:8000 ...
    python examples/rollout_trainer/trainer.py --url http://127.0.0.1:8000 \\
        --model .state/demo/tiny-qwen --runs .state/demo/adapters/runs

The calls are vLLM's own and OpenAI's; of lorafleet there are three headers. Needs torch, peft, openai and httpx.
"""

import argparse
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import peft
import torch
import transformers

# The engine adds float32 numbers in another order than torch does. A wrong version is off by 0.01 or more.
TOLERANCE = 1e-3
TEXT = "said the customer, and wrote down once more what was in the order and when it would come"
PROMPTS = [f"{word}, {TEXT}. {word}, {TEXT}: " for word in ("One", "Yes", "No", "Then", "Here", "Now")]


@dataclass(frozen=True)
class Sample:
    """An answer with its log-probabilities by the engine, the version that made it, and its cached prompt tokens.

    is_repeated  whether the client sent the request again after an error: its prompt may be cached by its first try
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    version: str
    cached: int
    is_repeated: bool


def publish(router: httpx.Client, name: str, folder: Path, within_s: float = 300.0) -> None:
    """Load the adapter on the whole fleet. A call that was cut off, or not done in time, is sent again."""
    body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
    deadline = time.monotonic() + within_s
    while True:
        try:
            answer = router.post("/v1/load_lora_adapter", json=body)
        except httpx.TransportError as exc:
            failure = repr(exc)
        else:
            failure = f"{answer.status_code} {answer.text}"
            if answer.is_success:
                return
            if answer.is_client_error:
                sys.exit(f"{name} cannot be published: {failure}")
        if time.monotonic() > deadline:
            sys.exit(f"{name} was not published in {within_s:.0f} s: {failure}")
        time.sleep(0.2)


def sample(client: openai.OpenAI, name: str, prompt: list[int], seed: int) -> Sample:
    """A completion by the newest version of the name."""
    raw = client.completions.with_raw_response.create(
        model=name,
        prompt=prompt,
        max_tokens=16,
        logprobs=0,  # those of the sampled tokens alone
        seed=seed,
        extra_body={"return_token_ids": True},
        extra_headers={"x-lorafleet-fingerprint": "adapter"},
    )
    answer = raw.parse()
    choice: Any = answer.choices[0]
    version, usage = raw.headers["x-lorafleet-adapter"], answer.usage
    if answer.system_fingerprint != version:
        sys.exit(f"the header names {version}, the body {answer.system_fingerprint}")
    by_engine = (usage and usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
    cached = int(raw.headers["x-lorafleet-cached-tokens"]) + by_engine
    return Sample(
        prompt, choice.token_ids, choice.logprobs.token_logprobs, version, cached, is_repeated=raw.retries_taken > 0
    )


def logprobs_of(model: torch.nn.Module, one: Sample) -> torch.Tensor:
    """[tokens] log-probabilities of the sampled tokens by the weights in training."""
    ids = torch.tensor([one.prompt + one.tokens])
    predicted = model(input_ids=ids).logits[0, len(one.prompt) - 1 : -1].log_softmax(-1)
    return predicted.gather(1, ids[0, len(one.prompt) :, None])[:, 0]


def number_of(version: str) -> int:
    """7 of `policy/v7@0123456789ab`."""
    return int(version.rpartition("/v")[2].partition("@")[0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a router of the fleet")
    parser.add_argument("--model", type=Path, required=True, help="the folder of the base model")
    parser.add_argument("--runs", type=Path, required=True, help="where to write adapters: workers may read it, too")
    parser.add_argument("--name", default="policy", help="what to publish under")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--key", default="none", help="an API key with the scopes infer and register")
    parser.add_argument("--sim", action="store_true", help="the engines compute nothing: compare no log-probabilities")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is tiny: threads would wait for each other
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    base = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=2e-3)
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=args.key, max_retries=60, timeout=60)
    router = httpx.Client(base_url=args.url, headers={"authorization": f"Bearer {args.key}"}, timeout=60)
    last, wrong, hits, worst = 0, 0, 0, 0.0
    for step in range(1, args.steps + 1):
        folder = args.runs.resolve() / f"{args.name}-{step}"
        model.save_pretrained(folder)
        began = time.perf_counter()
        publish(router, args.name, folder)
        publish_ms = (time.perf_counter() - began) * 1e3
        shutil.rmtree(folder)  # the fleet has its own copies
        with ThreadPoolExecutor(len(prompts)) as threads:
            rows = [threads.submit(sample, client, args.name, prompt, step) for prompt in prompts]
        samples = [row.result() for row in rows]
        # A step is one version, newer than the last. It sends each prompt once: a hit would be of another step.
        versions = {one.version for one in samples}
        wrong += sum(number_of(one.version) <= last or one.version != samples[0].version for one in samples)
        hits += sum(one.cached > 0 and not one.is_repeated for one in samples)
        last = max(map(number_of, versions))
        ours = [logprobs_of(model, one) for one in samples]
        if not args.sim:
            off = [(mine - torch.tensor(one.logprobs)).abs().max() for mine, one in zip(ours, samples, strict=True)]
            worst = max(worst, float(max(off)))
        # Policy gradient: every second token of the vocabulary is worth a point.
        points = [torch.tensor(one.tokens) % 2 - 0.5 for one in samples]
        loss = -torch.cat([mine * point for mine, point in zip(ours, points, strict=True)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reward = float(torch.cat(points).mean() + 0.5)
        print(f"step {step}: {', '.join(versions)} in {publish_ms:.0f} ms, reward {reward:.2f}", flush=True)
    again = sample(client, args.name, prompts[-1], args.steps)
    print(f"{args.steps} steps: {wrong} answers of another version, {hits} cache hits across versions")
    print(
        f"log-probabilities off by at most {worst:.1e} (tolerance {TOLERANCE:.0e}); {again.cached} cached when repeated"
    )
    sys.exit(bool(wrong or hits or worst > TOLERANCE or not again.cached))


if __name__ == "__main__":
    main()
