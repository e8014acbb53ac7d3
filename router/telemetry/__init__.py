"""Metrics and traces of the router.

Imports no other package of its service.
"""
