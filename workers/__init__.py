"""The agent beside each engine: fetches, verifies, loads and announces adapters."""
