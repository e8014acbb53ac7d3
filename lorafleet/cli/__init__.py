"""The `lorafleet` command: one file for each group of subcommands, the REST client, and the tables that are printed.

Subcommands call a running router or orchestrator over REST. May import every other package of `lorafleet`.
"""
