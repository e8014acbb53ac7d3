"""HTTP to the engines, and answers back to the client: connections, server-sent events, error bodies.

May import `protocols` and `core.errors`.
"""
