from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none")
answer = client.chat.completions.create(
    model="meta-llama/Llama-3-8B",
    messages=[{"role": "user", "content": "Good morning"}],
    extra_body={"lora_path": "/models/lora/summarization"},
)
print(answer.choices[0].message.content)
