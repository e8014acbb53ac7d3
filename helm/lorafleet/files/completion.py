"""`helm test`: a real completion from each base model, and one from an adapter where there is one."""

import json
import os
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

ROUTER, KEY = os.environ["ROUTER_URL"], os.environ["ROUTER_KEY"]
BASE_MODELS = json.loads(os.environ["BASE_MODELS"])
DEADLINE = time.monotonic() + float(os.environ["DEADLINE_S"])


def good(what: str, ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The first answer that is 200; until the deadline others are told and asked again."""
    while True:
        try:
            answer = ask()
            if answer.status_code == 200:
                return answer
            said = f"{answer.status_code} {answer.text[:300]}"
        except httpx.TransportError as exc:
            said = repr(exc)
        if time.monotonic() > DEADLINE:
            sys.exit(f"{what}: no good answer in time; the last one was: {said}")
        print(f"{what}: {said}", flush=True)
        time.sleep(5)


def models(client: httpx.Client) -> list[dict[str, Any]]:
    return good("/v1/models", lambda: client.get("/v1/models")).json()["data"]


def completion(client: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Which customers paid late?"}], "max_tokens": 8}
    return good(model, lambda: client.post("/v1/chat/completions", json=body))


def main() -> None:
    """Existing engines have no model in the values: use the first that they list."""
    headers = {"authorization": f"Bearer {KEY}"}
    verify = ssl.create_default_context(cafile=os.environ["ROUTER_CA"]) if "ROUTER_CA" in os.environ else True
    with httpx.Client(base_url=ROUTER, headers=headers, timeout=120, trust_env=False, verify=verify) as client:
        expected = BASE_MODELS or [model["id"] for model in models(client) if not model.get("parent")][:1]
        if not expected:
            sys.exit("/v1/models lists none: no engine answers")
        for base_model in expected:
            answer = completion(client, base_model)
            text = answer.json()["choices"][0]["message"]["content"]
            print(f"{base_model}: {answer.headers['x-lorafleet-worker']} says {text!r}")
        for adapter in [model["id"] for model in models(client) if model.get("parent")][:1]:
            answer = completion(client, adapter)
            print(f"{adapter}: {answer.headers['x-lorafleet-worker']} served {answer.headers['x-lorafleet-adapter']}")


main()
