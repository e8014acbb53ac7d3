"""Kubernetes: a small client in raw JSON, list and watch, and workers in EndpointSlices."""
