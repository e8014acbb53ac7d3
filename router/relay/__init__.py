"""The hot path's two edges: what a client says to us, and what we say to an engine."""
