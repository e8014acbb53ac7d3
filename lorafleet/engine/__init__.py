"""Engines as router, orchestrator and agents see them: arguments, metrics page, error messages, and learned rates.

`agentless` reads the state of an engine that runs without an agent; `vllm_plugin` is a plugin that vLLM itself loads.
May import `service` and `kv`.
"""
