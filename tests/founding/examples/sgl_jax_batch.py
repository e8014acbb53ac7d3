adapters = ["/models/lora/translation", "/models/lora/summarization", None]
body = {"text": ["One", "Two", "Three"], "sampling_params": {"max_new_tokens": 8}, "lora_path": adapters}
response = requests.post("http://127.0.0.1:30000/generate", json=body)
