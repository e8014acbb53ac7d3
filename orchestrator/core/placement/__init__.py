"""Which worker should hold which adapter: a pure function of intent, observed fleet, demand, policy and time.

`place.place` is the entry; the other files are its parts. Imports `core` only.
"""
