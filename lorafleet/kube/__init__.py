"""Kubernetes as this project uses it: a small client in raw JSON, list-then-watch, and EndpointSlices."""
