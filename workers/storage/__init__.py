"""Adapters on this worker's disk: fetched, verified, cached, and deleted when the disk is full.

May import `sources` and `core`.
"""
