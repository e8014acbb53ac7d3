"""Batches, background runs and stored answers: one body, each of whose items is a request of its own."""
