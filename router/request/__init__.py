"""One inference request from its first byte to its last: `run` has the stages, in order.

May import every room but `api` and `app`.
"""
