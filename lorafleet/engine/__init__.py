"""What router, orchestrator and agent all must know of an engine: its arguments, metrics page, errors, and rates.

`agentless` reads the state of an engine that runs without an agent; `vllm_cpu` is a plugin that vLLM itself loads.
May import `service` and `kv`.
"""
