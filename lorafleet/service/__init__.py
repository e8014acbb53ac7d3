"""What every service needs around its own subject: settings, logs, keys, error bodies, loops, files, signals, metrics.

Nothing here knows of adapters or engines. Imports no other package of `lorafleet`.
"""
