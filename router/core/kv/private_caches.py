"""Whose cached prompts are kept apart: the salts that asked of late, and when the cost of that is sampled next."""

from collections import OrderedDict
from itertools import islice
from math import inf

# Salts of all base models and adapters together.
_MOST_SALTS = 1024
# Between two samples: each hashes a prompt a few times more, up to a millisecond.
_SAMPLE_EVERY_S = 0.25


class PrivateCaches:
    """The salts that asked last, by base model and adapter; bounded."""

    def __init__(self) -> None:
        self._salts: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._sample_at = -inf

    def record_use(self, base_model: str, engine_name: str, salt: str) -> None:
        """Note that a request with this salt was sent, and forget the salt that was used longest ago."""
        key = base_model, engine_name, salt
        self._salts[key] = None
        self._salts.move_to_end(key)
        if len(self._salts) > _MOST_SALTS:
            self._salts.popitem(last=False)

    def others(self, base_model: str, engine_name: str, salt: str, *, most: int) -> list[str]:
        """Salts other than this one that asked for this adapter, the last one first, at most so many."""
        found = (
            other
            for model, name, other in reversed(self._salts)
            if (model, name) == (base_model, engine_name) and other != salt
        )
        return list(islice(found, most))

    def take_sample(self, now: float) -> bool:
        """Whether this request's cost is to be sampled; the next one is some time later."""
        if now < self._sample_at:
            return False
        self._sample_at = now + _SAMPLE_EVERY_S
        return True
