"""Requests that wait for capacity at a replica: admission, their order, and the limits of keys.

May import `core.schedule`.
"""
