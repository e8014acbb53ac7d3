"""A whole fleet in one process, in simulated time, whose every step follows from one number.

The real router, orchestrators, agents and sim engines run on one event loop with a virtual clock and a simulated
network. `python -P -m tests.simulation SEED` draws a fleet, its clients and its faults from the seed, runs them, and
holds what happened to the promises in docs/guarantees.md.

May import all services; nothing imports it but its own tests.
"""
