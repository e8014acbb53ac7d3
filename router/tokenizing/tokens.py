"""Token ids of one prompt, and their source."""

from array import array
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec

from lorafleet.kv.pictures import PlacedPicture
from router.tokenizing.approximate import ApproximatePrompt

Source = Literal["local", "remote", "given", "approximate", "none"]


class Tokens(msgspec.Struct, frozen=True):
    """Token ids of a prompt, unsigned 32-bit, and their source; `ids` is None if there are none.

    seen           length of the prefix that an earlier prompt had
    kept           length of the prefix that the conversation's next prompt will have
    made_by        number of our tokenizer that made them; 0 for none
    approximation  the approximate prompt, if there are no ids; None as well means no KV term
    pictures       in the prompt, in its order
    """

    ids: "array[int] | None"
    source: Source
    seen: int = 0
    kept: int = 0
    made_by: int = 0
    approximation: ApproximatePrompt | None = None
    pictures: tuple[PlacedPicture, ...] = ()


NO_TOKENS = Tokens(None, "none")

# A call that waits for a thread or the engine and returns the tokens.
SlowTokens = Callable[[], Coroutine[Any, Any, Tokens]]
