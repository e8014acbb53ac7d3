"""Which of several orchestrators acts: a lease in a file or in Kubernetes, and requests that go to the leader.

Each lease has an epoch, which fences a leader that has lost its lease. May import `store` and `core`.
"""
