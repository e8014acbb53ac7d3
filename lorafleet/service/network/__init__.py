"""Connections: addresses and their checks, sockets, and the transport of our HTTP clients."""
