"""Chooses a worker with a free slot by its metadata, and has it load an adapter from its own folder."""


class LoRAOrchestrator:
    def __init__(self, service_discovery):
        self.service_discovery, self.workers = service_discovery, {}

    async def _sync_worker_states(self):
        for worker in self.service_discovery.list_instances("dynamo", "worker"):
            self.workers[worker.instance_id] = worker.address, (await worker.metadata())["lora"]

    async def request_lora(self, name):
        loaded = []
        for instance_id, (address, lora) in self.workers.items():
            found = next((item for item in lora["available_loras"] if item["lora_id"] == name), None)
            if found and lora["capacity"]["available_slots"] > 0:
                body = {"lora_id": name, "lora_path": found["path"], "base_model": found.get("base_model")}
                call = f"{address}/v1/admin/load_lora"
                async with aiohttp.ClientSession() as session, session.post(call, json=body) as answer:
                    loaded += [instance_id] if answer.status == 200 else []
        return loaded
