"""Checks after a load: what the engine does with the adapter, and whether its answers are the trainer's.

May import the agent's `current_engine`, and what the agent may.
"""
