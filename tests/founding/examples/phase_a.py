"""A worker's state, and the same question to an adapter and to the base model."""

import requests

lora = requests.get("http://worker:8000/metadata").json()["lora"]
print(len(lora["available_loras"]), "on disk,", len(lora["loaded_loras"]), "loaded")

listed = requests.get("http://worker:8000/v1/metadata/loras").json()
print(len(listed["available_loras"]), "on disk,", len(listed["loaded_loras"]), "loaded")

question = {"messages": [{"role": "user", "content": "Who bought most last year?"}], "max_tokens": 8}
for adapter in ({"lora_id": "sql-expert/v1"}, {}):
    body = {"model": "Qwen/Qwen2.5-Coder-7B", **adapter, **question}
    print(requests.post("http://router:8000/v1/chat/completions", json=body).json())
