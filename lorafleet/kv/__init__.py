"""KV events of engines, the ledger that converts them into our block hashes, and KV connectors."""
