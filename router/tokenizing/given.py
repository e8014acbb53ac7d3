"""Token ids that a request gives itself, with the places of its pictures."""

from array import array
from collections.abc import Mapping
from typing import Any

from lorafleet.kv.pictures import PlacedPicture
from router.protocols.routes import PromptKind
from router.tokenizing.tokens import NO_TOKENS, Tokens

# Tokens of all pictures together, as a multiple of the prompt's: a video's sound lies among its frames, and nothing
# else overlaps. Each block has each of its pictures, so without a bound a small body would fill the memory.
_MOST_OVERLAP = 2


def given_prompt(body: Mapping[str, Any], kind: PromptKind | None) -> Tokens | str | None:
    """The token ids in a body that gives its own, or the text of a batch of one text; None: neither.

    NO_TOKENS where ids are given that are not, as they are, what the engine hashes.
    """
    if kind == "token_ids":
        return _generate_ids(body)
    given = body.get("prompt") if kind in {None, "completion"} else None
    if not isinstance(given, list):
        return None
    if len(given) == 1 and isinstance(given[0], str | list):
        (given,) = given  # a batch of one, as some clients write every prompt
        if isinstance(given, str):
            return given
    return _given_ids(given) if body.get("truncate_prompt_tokens") is None else NO_TOKENS


def _given_ids(prompt: list[Any]) -> Tokens:
    """Token ids given in the request; NO_TOKENS for a batch of prompts or invalid ids."""
    if not prompt or set(map(type, prompt)) != {int}:
        return NO_TOKENS
    ids = packed_ids(prompt)
    return NO_TOKENS if ids is None else Tokens(ids, "given")


def _generate_ids(body: Mapping[str, Any]) -> Tokens:
    """The `token_ids` of a body of `/inference/v1/generate`; NO_TOKENS where they are not what the engine hashes.

    `features` have the hashes and places of pictures, which vLLM 0.32 takes as it hashes its own
    (scale_out/token_in_token_out/serving.py). The ids of `content_parts` are only known to the engine.
    """
    ids, features = body.get("token_ids"), body.get("features")
    if not isinstance(ids, list) or body.get("content_parts"):
        return NO_TOKENS
    tokens = _given_ids(ids)
    if features is None or tokens.ids is None:
        return tokens
    try:
        placed = [
            PlacedPicture(str(item), int(place["offset"]), int(place["length"]))
            for kind, items in features["mm_hashes"].items()
            for item, place in zip(items, features["mm_placeholders"][kind], strict=True)
        ]
    except (LookupError, TypeError, ValueError, AttributeError):
        return NO_TOKENS  # for the engine to refuse
    if any(not 0 <= picture.offset <= picture.offset + picture.length <= len(ids) for picture in placed):
        return NO_TOKENS
    if sum(picture.length for picture in placed) > _MOST_OVERLAP * len(ids):
        return NO_TOKENS
    return Tokens(tokens.ids, "given", pictures=tuple(sorted(placed, key=lambda picture: picture.offset)))


def packed_ids(ids: list[Any]) -> "array[int] | None":
    """The ids as an array of unsigned 32-bit integers; None if one does not fit."""
    try:
        return array("I", ids)
    except (TypeError, OverflowError):
        return None
