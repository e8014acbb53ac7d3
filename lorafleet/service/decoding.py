"""The exceptions of a decoder for a body that another process or a client sent."""

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of msgspec's decoders. The body is malformed, has bytes outside UTF-8, or is nested too deeply."""
