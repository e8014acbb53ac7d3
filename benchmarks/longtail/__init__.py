"""Thousands of adapters that are each asked for rarely: the waits, simulated and with real processes."""
