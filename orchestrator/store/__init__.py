"""Where intent, history and rollouts are kept: one interface, and SQLite behind it.

`configmaps` is the other implementation. May import `core` and `wire`.
"""
