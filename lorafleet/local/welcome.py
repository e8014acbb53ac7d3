"""The ready line of `lorafleet up`, and commands to try first."""

# ruff: noqa: T201  (people and scripts read this on standard output)

from collections.abc import Sequence
from pathlib import Path

from lorafleet.local import demo


def print_ready(
    router: str, orchestrator: str, logs: Path, base_model: str, lora_ids: Sequence[str], *, has_keys: bool
) -> None:
    """Print the line `ready router=... orchestrator=...`, then addresses and commands to paste."""
    print(f"ready router={router} orchestrator={orchestrator}")
    rows = [
        ("router", f"{router}/v1", "base URL for OpenAI clients"),
        ("models", f"{router}/v1/models", "the base model and the adapters"),
        ("console", f"{orchestrator}/ui", "the fleet in a browser: traffic, adapters, workers, decisions"),
        ("orchestrator", f"{orchestrator}/docs", "REST API: adapters, placements, workers, policy"),
        ("metrics", f"{router}/metrics", f"Prometheus{', with a key of scope metrics' if has_keys else ''}"),
        ("logs", str(logs), "one file for each process"),
    ]
    width = max(len(address) for _, address, _ in rows)
    for name, address, purpose in rows:
        print(f"  {name:<13} {address:<{width}}  {purpose}")
    print("\nTry:")
    for line in curl_lines(router, base_model, lora_ids, has_keys=has_keys):
        print(f"  {line}")
    print(flush=True)


def curl_lines(router: str, base_model: str, lora_ids: Sequence[str], *, has_keys: bool) -> list[str]:
    """Commands to paste: a request to the base model, one to an adapter, and the explanation of a routing decision."""
    key = ' -H "authorization: Bearer $KEY"' if has_keys else ""
    script = demo.script_for(lora_ids)
    adapters = script.lora_ids[:1]

    def line(path: str, model: str, extra_fields: str = "") -> str:
        """A curl command that POSTs the demo's question for a model."""
        message = f'"messages": [{{"role": "user", "content": "{script.question}"}}]'
        body = f'{{"model": "{model}", {message}{extra_fields}}}'
        return f"curl -s {router}{path}{key} -H 'content-type: application/json' -d '{body}'"

    return [
        *(
            line("/v1/chat/completions", model, f', "max_tokens": {script.max_tokens}')
            for model in (base_model, *adapters)
        ),
        line("/v1/route", *(adapters or [base_model])),
    ]
