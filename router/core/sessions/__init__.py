"""Sessions: which requests are turns of one, when the next turn comes, and whose KV an engine evicts next.

Imports nothing else of `core`.
"""
