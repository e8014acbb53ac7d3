"""`lorafleet top`: the fleet's traffic and load, live.

`snapshot` reads the orchestrator's REST and makes one frozen value of the answers; `frame` lays it out as lines of a
given width; `screen` shows them on a terminal and takes keys. `snapshot_of` and `frame` are pure.
"""
