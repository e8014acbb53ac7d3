"""The `lorafleet` command: a table of resources, what can be done with every one of them, and the REST client.

`resources` is the table, `verbs` and `output` are written once for all rows; what takes more than a name is beside its
subject (`adapters`, `names`, `workers`, `keys`, `history`, and the folders). Subcommands call a running router or
orchestrator over REST. May import every other package of `lorafleet`.
"""
