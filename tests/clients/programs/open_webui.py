"""Open WebUI: its list of models, and a conversation, through its own server."""

import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import httpx

url, model, work = os.environ["STUB"], os.environ["MODEL"], Path(os.environ["WORK"])
print("version", version("open-webui"))
with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
environment = os.environ | {
    "OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "key-of-nobody", "WEBUI_AUTH": "False",
    "ENABLE_OLLAMA_API": "False", "DATA_DIR": str(work / "data"), "WEBUI_SECRET_KEY": "x",
    "RAG_EMBEDDING_ENGINE": "openai", "OFFLINE_MODE": "True",
    "ENABLE_VERSION_UPDATE_CHECK": "False", "SCARF_NO_ANALYTICS": "true", "ANONYMIZED_TELEMETRY": "False",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",
}  # fmt: skip
command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
server = subprocess.Popen(command, env=environment, cwd=work, stdout=sys.stderr, stderr=sys.stderr)
try:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        for _ in range(1500):
            try:
                if client.get("/health").is_success:
                    break
            except httpx.TransportError:
                pass
            if server.poll() is not None:
                sys.exit("it has ended, see above")
            time.sleep(0.2)
        signed = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
        client.headers["authorization"] = f"Bearer {signed['token']}"
        print(client.get("/api/models").status_code)
        messages = [{"role": "user", "content": "Where is the key?"}]
        for more in ({"stream": False}, {"stream": True}):
            body = {"model": model, "messages": messages, "params": {"max_tokens": 16}} | more
            print(client.post("/api/chat/completions", json=body).status_code)
        tasks = {"model": model, "messages": messages, "chat_id": "1"}
        print(client.post("/api/v1/tasks/title/completions", json=tasks).status_code)
finally:
    server.kill()
    server.wait()
