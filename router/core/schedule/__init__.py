"""Which replica gets a request: filter, cost, pick. Pure functions over a snapshot of the fleet.

May import `core.kv` and `core.failover`.
"""
