"""The errors of decoding what others sent."""

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no JSON or MessagePack: broken, not UTF-8, or nested too deeply."""
