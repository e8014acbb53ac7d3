"""Parts of every service: settings, logs, API keys, error answers, loops, files, signals, metrics.

It knows nothing of adapters or engines. Imports no other package of `lorafleet`.
"""
