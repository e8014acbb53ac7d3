"""A whole fleet on one machine, as `lorafleet up` starts it: options, processes, the demo's model and requests.

Each service is a process of its own, started by `python -P -m`. May import `service` and `engine`.
"""
