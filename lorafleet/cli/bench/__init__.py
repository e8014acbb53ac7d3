"""`lorafleet bench`: a load generator for a fleet.

`plan` decides before the start what is sent and when, `report` makes figures of what came back: both are pure. `load`
sends and measures. `command` has the flags.
"""
