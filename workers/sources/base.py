"""Where an adapter's files come from: one class a scheme."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from workers.core.errors import SourceError


class Source(Protocol):
    """Fetches adapters of one scheme."""

    async def fetch(self, ref: str, into: Path) -> None:
        """Put `adapter_config.json` and `*.safetensors` of the adapter at `ref` into the empty folder `into`.

        Nothing else may be put there. What is left in `into` after an error is thrown away by the caller.

        raises  SourceError: not found, forbidden, too big, or not reachable
        """


Sources = Mapping[str, Source]


def scheme(ref: str) -> str:
    """`file` for a plain path, else what stands before `://`."""
    return urlsplit(ref).scheme.lower() if "://" in ref else "file"


def source_for(ref: str, sources: Sources) -> Source:
    """The source that fetches this reference; raises SourceError naming the schemes that there are."""
    found = sources.get(scheme(ref))
    if found is None:
        known = ", ".join(f"{name}://" for name in sorted(sources))
        raise SourceError(
            "source_unsupported", f"source {ref!r}: scheme {scheme(ref)!r} is not known; known: {known} and plain paths"
        )
    return found
