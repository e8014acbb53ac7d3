"""KV events of engines, the ledger that converts them into our block hashes, resume points, and KV connectors."""
