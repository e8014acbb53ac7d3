"""Which replica has which blocks: a radix tree for each base model, estimates where engines send no events, and trust.

Imports nothing else of `core`.
"""
