"""Requests that wait for room on a replica: whether one may wait, in which order they go, and what a key may use.

May import `core.schedule`.
"""
