"""The engines' KV events, as they come: one feed for each engine, which keeps the router's index true.

May import `http`, `telemetry` and `core`.
"""
