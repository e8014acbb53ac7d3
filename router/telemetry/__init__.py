"""Metrics and traces of the router.

Imports no other room.
"""
