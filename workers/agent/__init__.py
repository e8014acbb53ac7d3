"""The agent of one engine: what it holds, what it is doing, and the engine's process.

An operation on an adapter runs in the order resolve, fetch, verify, install, load, announce. May import every room but
`app` and `api`.
"""
