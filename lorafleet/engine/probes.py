"""The smallest requests that show that an engine computes.

Agents and routers send them to an engine whose health is in doubt.
"""

from collections.abc import Mapping
from typing import Any, Final

PROBE_REQUESTS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/pooling", {"input": "a"}),
)
"""Path and fields: one request for models that generate, one for models that pool, which answer the first with 404."""
