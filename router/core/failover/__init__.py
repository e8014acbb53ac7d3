"""What a failure means for the next attempt: circuits, the retry budget, excluded replicas, and poison requests.

Imports `core` only.
"""
