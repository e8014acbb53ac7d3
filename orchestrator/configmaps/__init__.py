"""Intent in ConfigMaps: one an adapter and one an alias, written by people or by us, and a few for our own state."""
