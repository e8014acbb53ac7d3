"""References to adapters, taken apart and judged: `scheme://where/what`. Nothing here opens anything."""

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from workers.core.errors import SourceError

_REPO_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9._/-]{1,200}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

# How often anybody decodes a path, and one more.
_MOST_DECODED = 3

ARCHIVES = (".tar.gz", ".tgz", ".zip")


@dataclass(frozen=True, slots=True)
class HubReference:
    """`hf://<repo>[/<folder>][@<revision>]`; `repo` is `org/name`."""

    repo: str
    folder: str
    revision: str

    def at(self, commit: str) -> str:
        """The same adapter at a commit, which never changes."""
        return f"hf://{self.repo}{'/' + self.folder if self.folder else ''}@{commit}"


def scheme(ref: str) -> str:
    """`file` for a plain path, else what stands before `://`."""
    return ref.split("://", 1)[0].lower() if "://" in ref else "file"


def shown(ref: str) -> str:
    """The reference as messages may have it: without user, password, query and fragment, and not too long."""
    if "://" not in ref:
        return ascii(ref[:300])
    head, _, tail = ref.partition("://")
    place = re.split(r"[?#]", tail, maxsplit=1)[0]
    where, slash, path = place.partition("/")
    if "@" in where:
        where = "***@" + where.rpartition("@")[2]
    hidden = "?***" if len(place) < len(tail) else ""
    return ascii(f"{head}://{where}{slash}{path}"[:300] + hidden)


def split(ref: str) -> SplitResult:
    """A `scheme://` reference, taken apart.

    A reference is stored, shown and told to others, so nothing secret may be in it: no user, no password, no query
    (where signatures are). raises SourceError `source_invalid`
    """
    try:
        parts = urlsplit(ref)
        secrets = parts.username is not None or parts.password is not None
    except ValueError as exc:
        raise _invalid(ref, "not a URL") from exc
    if not ref.isprintable() or " " in ref:
        raise _invalid(ref, "spaces and control characters must be written as %XX")
    if secrets:
        raise _invalid(ref, "credentials do not belong in a reference; see `Sources` in the operations guide")
    if "?" in ref or "#" in ref:
        raise _invalid(ref, "a query or fragment may hold a secret and expires; give the plain address")
    return parts


def hub(ref: str) -> HubReference:
    """A hub reference; without a revision it is `main`. raises SourceError `source_invalid`"""
    plain, at, revision = ref.partition("@")
    parts = split(plain)
    names = [parts.netloc, *parts.path.strip("/").split("/")]
    if len(names) < 2 or not all(_REPO_PART.fullmatch(name) and ".." not in name for name in names):
        raise _invalid(ref, "expected hf://org/repo, hf://org/repo@revision or hf://org/repo/folder@revision")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise _invalid(ref, "the revision after @ must be a branch, a tag or a commit")
    return HubReference("/".join(names[:2]), "/".join(names[2:]), revision or "main")


def bucket_and_folder(ref: str) -> tuple[str, str]:
    """An object store's bucket (or container) and the folder in it. raises SourceError `source_invalid`"""
    parts = split(ref)
    folder = unquote(parts.path).strip("/")
    if not _BUCKET.fullmatch(parts.netloc) or not folder:
        raise _invalid(ref, f"expected {parts.scheme}://bucket/folder")
    if any(part in {"", ".", ".."} for part in folder.split("/")) or any(char in folder for char in "*?[]{}"):
        raise _invalid(ref, "the folder may have no empty part, no `.` or `..`, and no wildcard")
    return parts.netloc, folder


def is_commit(revision: str) -> bool:
    """Whether a revision names one commit for ever, and not a branch or a tag."""
    return _COMMIT.fullmatch(revision) is not None


def is_archive(ref: str) -> bool:
    return ref.lower().endswith(ARCHIVES)


def is_below(ref: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a reference is one of the prefixes or below one; a prefix ends at a `/`, so `s3://a` is not `s3://ab`.

    Of a hub's repository also at an `@`: a revision follows.
    """
    if _leads_up(ref):
        return False
    ends = "/@" if scheme(ref) == "hf" else "/"
    return any(
        ref == prefix or ref.startswith(tuple(prefix.rstrip("/") + end for end in ends))
        if not prefix.endswith("://")
        else ref.startswith(prefix)
        for prefix in prefixes
    )


def _leads_up(ref: str) -> bool:
    """Whether any server might take it so: some decode twice, some read `\\` as `/`, Tomcat leaves out `;` and more."""
    for _ in range(_MOST_DECODED):
        ref = unquote(ref)
    return ref != unquote(ref) or any(part.partition(";")[0] in {".", ".."} for part in re.split(r"[/\\]", ref))


def _invalid(ref: str, why: str) -> SourceError:
    return SourceError("source_invalid", f"source {shown(ref)}: {why}")
