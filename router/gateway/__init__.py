"""An endpoint picker: a gateway (Envoy) asks by external processing which engine gets a request, and sends it itself.

The request takes the stages of the router's own front. Only the two ends differ: the client's exchange and the engine's
connection are both ends of one gRPC stream. May import `router.api` and everything below.
"""
