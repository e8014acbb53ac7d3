"""Adapters on this worker's disk: fetched, verified, kept, and evicted when there is no room.

May import `sources` and `core`.
"""
