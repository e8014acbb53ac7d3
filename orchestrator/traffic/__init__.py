"""What the console shows of the last two days: traffic that routers report and readings of workers, kept in a file.

Nothing is decided by it. May import `core` and `wire`.
"""
