"""One pass after another: observe the workers, place, diff, act. Each pass starts from the whole state.

Also the reads that routers and people ask of that state. May import `leadership`, `store`, `agentless` and `core`.
"""
