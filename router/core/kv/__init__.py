"""Which replica has which blocks: a radix tree for each base model, estimates where engines send no events, and how
accurate predicted hits are.

Imports nothing else of `core`.
"""
