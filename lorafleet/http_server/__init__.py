"""The client's side of every service: connections, what a message on them must look like, and how long it may take.

A request goes to a handler of the service's hot routes, or to its ASGI app. Imports uvicorn, httptools and lorafleet.
"""
