"""Which replica should hold which adapter: a pure function of intent, observed state, demand, policy and time.

`place` is the entry; the other files are its parts. Imports `core` only.
"""
