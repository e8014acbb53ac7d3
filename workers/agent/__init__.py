"""The agent of one engine: its adapters, its operations in progress, and the engine's process.

An operation on an adapter runs in the order resolve, fetch, verify, install, load, announce. May import every room but
`app` and `api`.
"""
