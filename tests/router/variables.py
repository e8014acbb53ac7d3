"""Environment variables that tests set for the router processes that they start (bare.py, many.py)."""

# Seconds for which a process that takes another's place may wait until it can route.
JOIN_WITHIN_S = "JOIN_WITHIN_S"
# Set to anything: the process ends while it starts.
REFUSES_TO_START = "REFUSES_TO_START"
