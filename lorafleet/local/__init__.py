"""A whole fleet on one machine, started by `lorafleet up`: options, processes, the demo's model and requests.

Each service is its own process, started by `python -P -m`. May import `service` and `engine`.
"""
