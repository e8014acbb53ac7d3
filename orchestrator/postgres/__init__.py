"""The store and the lease in a PostgreSQL database, for orchestrators on several hosts without Kubernetes.

May import `store`, `core` and `model`. psycopg is imported when an orchestrator or a copy uses such a store.
"""
