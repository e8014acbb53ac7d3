"""`helm test`: a real completion from each base model, and one from an adapter where there is one."""

import json
import os
import sys
import time

import httpx

ROUTER, KEY = os.environ["ROUTER_URL"], os.environ["ROUTER_KEY"]
BASE_MODELS = json.loads(os.environ["BASE_MODELS"])
DEADLINE = time.monotonic() + float(os.environ["DEADLINE_S"])


def answered(client: httpx.Client, model: str) -> httpx.Response:
    """The first answer that is 200; until the deadline others are told and asked again."""
    body = {"model": model, "messages": [{"role": "user", "content": "Which customers paid late?"}], "max_tokens": 8}
    while True:
        try:
            answer = client.post("/v1/chat/completions", json=body)
            if answer.status_code == 200:
                return answer
            said = f"{answer.status_code} {answer.text[:300]}"
        except httpx.TransportError as exc:
            said = repr(exc)
        if time.monotonic() > DEADLINE:
            sys.exit(f"{model}: no completion in time; the last answer was: {said}")
        print(f"{model}: {said}", flush=True)
        time.sleep(5)


with httpx.Client(base_url=ROUTER, headers={"authorization": f"Bearer {KEY}"}, timeout=120, trust_env=False) as client:
    for base_model in BASE_MODELS:
        answer = answered(client, base_model)
        text = answer.json()["choices"][0]["message"]["content"]
        print(f"{base_model}: {answer.headers['x-lorafleet-worker']} says {text!r}")
    listed = client.get("/v1/models").json()["data"]
    for adapter in [model["id"] for model in listed if model.get("parent")][:1]:
        answer = answered(client, adapter)
        print(f"{adapter}: {answer.headers['x-lorafleet-worker']} served {answer.headers['x-lorafleet-adapter']}")
