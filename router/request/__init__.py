"""One inference request from its first byte to its last: `run` has the stages, in order.

May import every package but `api` and `app`.
"""
