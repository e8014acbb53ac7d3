"""Verification of an adapter's files before a load: names, shapes, values, and the modules that the engine has."""
