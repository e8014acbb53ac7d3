"""What several request formats share: errors for bodies, values of batches, and the data of events."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lorafleet.service.http.json_count import has_more
from router.core.errors import BadBody

# The byte order mark that some clients put before a body; vLLM accepts it.
BOM = b"\xef\xbb\xbf"

# One half of a surrogate pair without the other, as when JavaScript cuts a text in the middle of an emoji.
_HALF_SURROGATE = re.compile(
    rb"(?<!\\)\\u(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)


def check_items(body: bytes, most: int) -> None:
    """Raises BadBody if the body has more than `most` strings (field names included), objects and lists."""
    # Each takes a byte at least.
    if len(body) > most and has_more(body, most):
        raise BadBody(
            f"the body has more than {most} texts, objects and lists (messages, their parts, tools): send fewer, or"
            " in several requests"
        )


def bad_json_error(body: bytes, exc: Exception) -> BadBody:
    """The error for a body whose decoding raised one of DECODE_ERRORS."""
    half = _HALF_SURROGATE.search(body)
    if isinstance(exc, RecursionError):
        why = "it is nested too deeply; a request needs a dozen levels"
    elif half is not None:
        why = f"{half[0].decode()} (byte {half.start()}) is half a character; was a text cut in the middle of an emoji?"
    else:
        why = str(exc)
    return BadBody(f"the body is not a JSON object: {why}")


def per_item(name: str, value: object, count: int, *, is_list: bool, kind: type = str) -> list[Any]:
    """A field's value for each item of a batch: one value for all, or a list with one for each.

    name, value  of the field; None stays None
    is_list      whether the items came as a list
    kind         str or dict: the type of a value
    raises       BadBody
    """
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, list) or not all(item is None or isinstance(item, kind) for item in value):
        raise BadBody(f"{name} must be {_KINDS[kind]}, null, or a list of these", param=name)
    if not is_list:
        raise BadBody(f"{name} is a list, but there is one prompt; make both a list, or neither", param=name)
    if len(value) != count:
        raise BadBody(f"{name} has {len(value)} entries for {count} prompts; it must have one for each", param=name)
    return value


_KINDS: Mapping[type, str] = {str: "a text", dict: "an object", bool: "true or false", int: "an integer"}


def is_streamed_call(stream: object) -> bool:
    """Whether a call whose items run as separate requests asks for a stream. Raises BadBody for what is no boolean.

    Engines take "true" and 1 for true as well, and would stream the items of a call that is answered whole.
    """
    if not isinstance(stream, bool | None):
        raise BadBody(f"stream must be true or false, found {type(stream).__name__}", param="stream")
    return bool(stream)


class ItemAnswer(NamedTuple):
    """The whole answer to one item of a batch, and the weights that made it: `lora_id@digest12`, or a base model."""

    body: bytes
    weights: str


def data_lines(events: bytes) -> list[bytes]:
    """The data of each of these events."""
    return [line[len(b"data:") :].strip() for line in events.split(b"\n") if line.startswith(b"data:")]
