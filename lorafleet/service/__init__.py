"""Parts of every service: settings, error answers, loops, files, its process and its connections.

It knows nothing of adapters or engines. `http` is the REST API, `network` are connections. Imports no other package of
`lorafleet` but `telemetry` and `keys`.
"""
