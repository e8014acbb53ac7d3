"""Batches, whose items are requests of their own, and stored answers: the routes above `router.request`."""
