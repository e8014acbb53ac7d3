"""The endpoint picker behind a real Envoy, beside the router's own front, at a fixed rate of requests."""
