"""Clients, commands and processes of each kind of engine, and `sim`, an engine that computes nothing.

May import `sources`, `storage` and `core`.
"""
