"""LiteLLM as a proxy: chats, a tool, a stream, responses, messages and embeddings through it."""

import os
import secrets
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import httpx

KEY = f"sk-{secrets.token_hex(32)}"  # of this proxy, for the time of this program
url, model, work = os.environ["STUB"], os.environ["MODEL"], Path(os.environ["WORK"])
print("version", version("litellm"))
with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
(work / "config.yaml").write_text(f"""
model_list:
- model_name: {model}
  litellm_params: {{model: hosted_vllm/{model}, api_base: {url}/v1, api_key: key-of-nobody}}
- model_name: by-openai
  litellm_params: {{model: openai/{model}, api_base: {url}/v1, api_key: key-of-nobody}}
litellm_settings: {{num_retries: 0}}
""")
command = ["litellm", "--config", str(work / "config.yaml"), "--port", str(port), "--host", "127.0.0.1"]
environment = os.environ | {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_MASTER_KEY": KEY,
}
headers = {"authorization": f"Bearer {KEY}"}
proxy = subprocess.Popen(command, env=environment, stdout=sys.stderr, stderr=sys.stderr)
try:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, headers=headers) as client:
        for _ in range(600):
            try:
                if client.get("/health/liveliness").is_success:
                    break
            except httpx.TransportError:
                pass
            if proxy.poll() is not None:
                sys.exit("it has ended, see above")
            time.sleep(0.2)
        messages = [{"role": "user", "content": "Where is the key?"}]
        tool = {
            "type": "function",
            "function": {"name": "read_note", "parameters": {"type": "object", "properties": {}}},
        }
        for name in (model, "by-openai"):
            body = {"model": name, "messages": messages, "max_tokens": 16}
            for path, more in (
                ("/v1/chat/completions", {}),
                ("/v1/chat/completions", {"tools": [tool]}),
                ("/v1/chat/completions", {"stream": True}),
                ("/v1/messages", {}),
                ("/v1/messages", {"stream": True}),
            ):
                print(path, client.post(path, json=body | more).status_code)
            print(client.post("/v1/responses", json={"model": name, "input": "Where is the key?"}).status_code)
            print(client.post("/v1/completions", json={"model": name, "prompt": "Where", "max_tokens": 4}).status_code)
            print(client.post("/v1/embeddings", json={"model": name, "input": "x"}).status_code)
finally:
    proxy.kill()
    proxy.wait()
