"""The router's view of the fleet: workers and their reports, the catalog, health probes, and usage reports.

May import `http`, `core` and the other services' `wire`.
"""
