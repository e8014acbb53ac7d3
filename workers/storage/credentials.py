"""Credentials that adapters refer to: files that an operator has provided, read for each fetch.

A tenant who registers an adapter chooses its source, and thus where a credential would be sent. Therefore each secret
has a file `sources` with the allowed prefixes, one per line, for example hf://acme.
"""

import asyncio
import re
from pathlib import Path

from workers.core.errors import SourceError
from workers.core.references import is_below, redacted

_SECRET = re.compile(r"([a-z0-9][-a-z0-9.]{0,252})/([-_a-zA-Z0-9][-._a-zA-Z0-9]{0,252})")
_SOURCES = "sources"


class Credentials:
    """Files `<folder>/<name>/<key>`, the layout of mounted Kubernetes Secrets."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    async def read(self, secret: str, ref: str) -> str:
        """Read the credential `name/key` for a source; raises SourceError if it is missing or not allowed."""
        return await asyncio.to_thread(self._read, secret, ref)

    def _read(self, secret: str, ref: str) -> str:
        """Read the credential's file; blocking. Raises SourceError if unreadable or not allowed for the source."""
        subject = f"source {redacted(ref)}: its secret {secret[:520]!r}"
        match = _SECRET.fullmatch(secret)
        if match is None or match[2] == _SOURCES:
            raise SourceError("source_unauthorized", f"{subject} is no name/key of a credential")
        if self._folder is None:
            raise SourceError(
                "source_unauthorized", f"{subject} cannot be read: secrets_dir is not set for this worker"
            )
        folder = self._folder / match[1]
        try:
            credential = (folder / match[2]).read_text().strip()
            prefixes = tuple((folder / _SOURCES).read_text().split())
        except (OSError, UnicodeError) as exc:
            message = f"{subject} cannot be read ({type(exc).__name__}): {folder} needs {match[2]!r} and {_SOURCES!r}"
            raise SourceError("source_unauthorized", message) from None
        if not is_below(ref, prefixes):
            hint = f"its file {_SOURCES!r} has the allowed prefixes, one per line, as hf://acme"
            raise SourceError("source_unauthorized", f"{subject} is not allowed for this source; {hint}")
        if not credential or not credential.isprintable():
            raise SourceError("source_unauthorized", f"{subject} is empty, or more than one line")
        return credential
