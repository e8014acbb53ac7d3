"""What an engine has cached, in our words: block hashes, KV events, and the ledger from one to the other."""
