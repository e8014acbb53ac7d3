"""Loads and unloads at an engine, by vLLM's own calls."""

import aiohttp


class DynamicLoRAManager:
    def __init__(self, vllm_server_url, max_loras=4):
        self.url, self.max_loras, self.loaded = vllm_server_url, max_loras, []

    async def post(self, call, **body):
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/v1/{call}", json=body) as answer:
            return answer.status == 200

    async def load_lora(self, name, path):
        while len(self.loaded) >= self.max_loras:
            await self.unload_lora(self.loaded[0])
        self.loaded.append(name)
        return await self.post("load_lora_adapter", lora_name=name, lora_path=path)

    async def unload_lora(self, name):
        self.loaded.remove(name)
        return await self.post("unload_lora_adapter", lora_name=name)

    def get_loaded_loras(self):
        return dict.fromkeys(self.loaded)
