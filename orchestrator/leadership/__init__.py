"""Leader election between orchestrators: a lease in a file or in Kubernetes, and requests forwarded to the leader.

Each term has an epoch, by which agents fence a leader that has lost its lease. May import `store` and `core`.
"""
