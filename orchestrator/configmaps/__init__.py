"""Intent in ConfigMaps: one per adapter and alias, written by people or by us, and some for our own state.

People's edits of them become intent. May import `intent`, `reconcile`, `store` and `core`.
"""
