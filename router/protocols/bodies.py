"""What is said of a body that is no JSON, or too much of it."""

import re

import msgspec

from lorafleet.service.json_count import has_more
from router.core.errors import BadBody

# Some clients begin what they send with it; vLLM takes it.
BOM = b"\xef\xbb\xbf"
# What decoding such a body raises.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# A text that JavaScript cut in the middle of an emoji: "\ud83d" without its second half.
_HALF = re.compile(
    rb"(?<!\\)\\u(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)


def check_items(body: bytes, most: int) -> None:
    """Raises BadBody where it has more texts (names of fields, too), objects and lists than `most`."""
    if has_more(body, most):
        raise BadBody(
            f"the body has more than {most} texts, objects and lists (messages, their parts, tools): send fewer, or"
            " in several requests"
        )


def not_json(body: bytes, exc: Exception) -> BadBody:
    """The error for a body whose decoding raised one of NOT_JSON."""
    half = _HALF.search(body)
    if isinstance(exc, RecursionError):
        why = "it is nested too deeply; a request needs a dozen levels"
    elif half is not None:
        why = f"{half[0].decode()} (byte {half.start()}) is half a character; was a text cut in the middle of an emoji?"
    else:
        why = str(exc)
    return BadBody(f"the body is not a JSON object: {why}")
