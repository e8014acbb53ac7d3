"""What people want of the fleet: adapters, aliases, policies and pins, and objects that no worker knows any longer.

Each change is checked, stored and audited before it counts. May import `reconcile`, `store` and `core`.
"""
