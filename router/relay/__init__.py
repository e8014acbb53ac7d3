"""The hot path to an engine, and its answer back to the client."""
