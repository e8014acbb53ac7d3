"""Several router processes on one port: who starts them, what they share, and how their metrics are added up.

May import `core`.
"""
