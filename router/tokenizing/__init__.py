"""Token ids of prompts, or approximate prompts for requests whose ids only the engine can know.

May import `protocols`, `telemetry` and `core`.
"""
