"""The reconcile loop: observe the workers, place, diff, act. Each pass starts from the whole state.

Also the queries of routers and people about that state. May import `leadership`, `store`, `agentless` and `core`.
"""
