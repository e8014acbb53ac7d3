"""Engines that run without an agent: the orchestrator itself asks them to load and unload.

`transport` answers the agent's routes for such an engine, so that the rest of the orchestrator sees agents only. May
import `core` and `wire`.
"""
