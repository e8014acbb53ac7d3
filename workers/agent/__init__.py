"""The agent of one engine: its adapters, its operations in progress, and the engine's process.

An operation on an adapter runs in the order resolve, fetch, verify, install, load, announce. May import every package
but `app` and `api`.
"""
