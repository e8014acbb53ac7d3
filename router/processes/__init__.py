"""Several router processes on one port: their supervisor, their shared quotas, and their summed metrics.

May import `core`.
"""
