"""What one worker has: its adapters on disk and in the engine, their use, and the log of what happened to them.

The agent changes it, heartbeats and REST routes show it. Imports workers' engines, storage, sources and core.
"""
