"""The wire of the last release, and tests that today's services work with it.

`last_release/` has a schema of every wire type and a recorded session of each conversation. At each release
`python -m tests.wire.record` writes both anew. Tests send the recorded requests to today's services, and play the
recorded answers to today's clients.
"""
