"""Rules of uploads: which bytes a request has, which upload it continues, and whether all of them have come."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.errors import OrchestratorRequestError

ARCHIVE = "archive"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
UPLOAD_FILES = (ARCHIVE, CONFIG, WEIGHTS)
"""What a request may send: an archive of the adapter, or one of its two files."""

_NAMES_SHOWN = 5
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")


@dataclass(frozen=True, slots=True)
class SentBytes:
    """The bytes of a file that a request has.

    start  of the first one; None: the request has none, and asks to finish what has come
    length  how many they are; None: not known before their end
    total  of the whole file; None: not known before its end
    is_resumed  they continue what has come before; otherwise the file begins anew
    """

    start: int | None
    length: int | None
    total: int | None
    is_resumed: bool


def sent_bytes(content_range: str | None, content_length: str | None) -> SentBytes:
    """The bytes that a request's headers announce. Raises OrchestratorRequestError for a Content-Range of another form.

    curl -C sends the form of RFC 9110 14.4 (lib/http.c): `bytes 100-199/200`; `bytes */200` sends nothing.
    """
    length = int(content_length) if content_length is not None else None
    if content_range is None:
        return SentBytes(0, length, length, is_resumed=False)
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    problem = "" if match is not None else "expected the form `bytes 100-199/200`, or `bytes */200` without a body"
    if match is not None and match[1] is not None:
        first, last, total = int(match[1]), int(match[2]), None if match[3] == "*" else int(match[3])
        if last < first or (total is not None and last >= total):
            problem = "its numbers contradict each other"
        elif length is not None and length != last - first + 1:
            problem = f"the body has {length} bytes, the range {last - first + 1}"
        else:
            return SentBytes(first, last - first + 1, total, is_resumed=first > 0)
    elif match is not None and length:
        problem = f"it announces no bytes, and the body has {length}"
    if problem or match is None:
        message = f"header Content-Range {content_range[:100]!r}: {problem}"
        raise OrchestratorRequestError(message, code="invalid_content_range", param="Content-Range")
    return SentBytes(None, 0, None if match[3] == "*" else int(match[3]), is_resumed=True)


def upload_id(owner: str, name: str) -> str:
    """The id of a caller's unfinished upload of an adapter: each has one at a time, wherever it arrives."""
    return hashlib.sha256(f"{len(owner)}:{owner}{name}".encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class UploadQuota:
    """What one tenant's unfinished uploads may be together."""

    uploads: int
    size_bytes: int

    def problem(self, others: Mapping[str, tuple[str, int]], new_bytes: int) -> str:
        """Why a tenant may begin no further upload of this size, and what to do; "" if it may.

        others  upload id -> adapter and size, of its unfinished uploads
        """
        taken = sum(size for _, size in others.values())
        if len(others) < self.uploads and taken + new_bytes <= self.size_bytes:
            return ""
        if len(others) >= self.uploads:
            problem = f"{len(others)} uploads are unfinished, of at most {self.uploads} (max_unfinished_uploads)"
        else:
            problem = f"the {len(others)} unfinished uploads have announced {taken} bytes, with this one"
            problem += f" {taken + new_bytes} of at most {self.size_bytes} (max_unfinished_upload_bytes)"
        names = sorted({name for name, _ in others.values() if name})
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        advice = "finish one, or forget it by DELETE /v1/uploads/{lora_id}; each ends after an hour without growth"
        return f"{problem}: {shown}; {advice}"


def missing_files(received: Mapping[str, tuple[int, int | None]]) -> tuple[str, ...]:
    """The files of an upload that have not come whole, in the order to send them; empty if it can be installed.

    received  file -> bytes that are there, and of the whole file (None: not known, and what is there is all)
    """
    needed = (ARCHIVE,) if ARCHIVE in received or not received else (CONFIG, WEIGHTS)
    return tuple(name for name in needed if name not in received or received[name][1] not in (None, received[name][0]))
