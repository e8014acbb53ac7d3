import requests

body = {"text": "Good morning", "sampling_params": {"max_new_tokens": 8}, "lora_path": "/models/lora/translation"}
response = requests.post("http://127.0.0.1:30000/generate", json=body)
print(response.json()["text"])
