"""Token ids of a prompt before the engine has seen it, or an approximate prompt where only the engine can know them.

May import `protocols`, `telemetry` and `core`.
"""
