# A worker's metadata: names that others read; `...` stands for what is said elsewhere.
metadata = {
    "model": {"name": "Qwen/Qwen2.5-Coder-7B", "type": "Completions", "base_model": "Qwen/Qwen2.5-Coder-7B"},
    "transport": {...},
    "lora": {
        "enabled": true,
        "max_loras": 4,
        "available_loras": [{"lora_id": "sql-expert/v1", "path": "/shared/loras/sql-expert/v1", "rank": 8}],
        "loaded_loras": [{"lora_id": "sql-expert/v1", "state": "ready", "memory_mb": 1}],
        "capacity": {"loaded_count": 1, "available_slots": 3},
    },
}
