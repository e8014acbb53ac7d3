"""Routes beside inference: what a router knows, why it decided, and its OpenAPI document.

May import every package but `app`.
"""
