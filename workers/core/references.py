"""Parsing and checks of adapter references `scheme://host/path`. Nothing is opened."""

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from lorafleet.identity import fleet_digest
from workers.core.errors import SourceError

_REPO_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9._/-]{1,200}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

# Servers decode a path at most twice; one more to be safe.
_MAX_DECODINGS = 3

OWN_FLEET = "fleet"
"""Scheme of bytes that only this fleet's workers have; see `lorafleet.identity.fleet_source`."""
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")


@dataclass(frozen=True, slots=True)
class HubReference:
    """`hf://<repo>[/<folder>][@<revision>]`; `repo` is `org/name`."""

    repo: str
    folder: str
    revision: str

    def at_commit(self, commit: str) -> str:
        """The reference of the same adapter at a commit, which is immutable."""
        return f"hf://{self.repo}{'/' + self.folder if self.folder else ''}@{commit}"


def scheme(ref: str) -> str:
    """The lower-case scheme of a reference; `file` for a plain path, `fleet` for the fleet's own `fleet:<digest>`."""
    if fleet_digest(ref) is not None:
        return OWN_FLEET
    return ref.split("://", 1)[0].lower() if "://" in ref else "file"


def redacted(ref: str) -> str:
    """The reference for messages: without user, password, query and fragment, and shortened."""
    if "://" not in ref:
        return ascii(ref[:300])
    head, _, tail = ref.partition("://")
    place = re.split(r"[?#]", tail, maxsplit=1)[0]
    host, slash, path = place.partition("/")
    if "@" in host:
        host = "***@" + host.rpartition("@")[2]
    hidden = "?***" if len(place) < len(tail) else ""
    return ascii(f"{head}://{host}{slash}{path}"[:300] + hidden)


def parse_reference(ref: str) -> SplitResult:
    """The parts of a `scheme://` reference.

    References are stored and shown, so they must not contain secrets: no user, no password, no query (which may hold
    a signature). raises SourceError `source_invalid`
    """
    try:
        parts = urlsplit(ref)
        secrets = parts.username is not None or parts.password is not None
    except ValueError as exc:
        raise _invalid_source(ref, "not a URL") from exc
    if not ref.isprintable() or " " in ref:
        raise _invalid_source(ref, "spaces and control characters must be written as %XX")
    if secrets:
        raise _invalid_source(ref, "credentials do not belong in a reference; see `Sources` in the operations guide")
    if "?" in ref or "#" in ref:
        raise _invalid_source(ref, "a query or fragment may hold a secret and expires; give the plain address")
    return parts


def parse_hub_reference(ref: str) -> HubReference:
    """A parsed hub reference; the default revision is `main`. raises SourceError `source_invalid`"""
    plain, at, revision = ref.partition("@")
    parts = parse_reference(plain)
    names = [parts.netloc, *parts.path.strip("/").split("/")]
    if len(names) < 2 or not all(_REPO_PART.fullmatch(name) and ".." not in name for name in names):
        raise _invalid_source(ref, "expected hf://org/repo, hf://org/repo@revision or hf://org/repo/folder@revision")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise _invalid_source(ref, "the revision after @ must be a branch, a tag or a commit")
    return HubReference("/".join(names[:2]), "/".join(names[2:]), revision or "main")


def relative_problem(ref: str) -> str:
    """Why a plain path is not absolute, and what to write: a clause for an error message; "" if it is absolute."""
    if ref.startswith("/"):
        return ""
    expected = "give the absolute path that workers see, such as /shared/outputs/lora"
    if ref.startswith("~"):
        return f"`~` is a home folder of yours, which workers do not know; {expected}"
    if re.match(r"[A-Za-z]:[\\/]|\\\\", ref):
        return f"a path of Windows, and workers see paths of Linux; {expected}"
    if is_like_repository(ref):
        return f"a relative path; {expected}; a repository on the Hugging Face hub is written hf://{ref}"
    return f"a relative path, and workers do not share your working folder; {expected}"


def is_like_repository(ref: str) -> bool:
    """Whether text without a scheme may be meant as `org/name` on the Hugging Face hub."""
    names = ref.split("/")
    return len(names) == 2 and all(_REPO_PART.fullmatch(name) and ".." not in name for name in names)


def bucket_and_folder(ref: str) -> tuple[str, str]:
    """Bucket (or container) and folder of an object-store reference. raises SourceError `source_invalid`"""
    parts = parse_reference(ref)
    folder = unquote(parts.path).strip("/")
    if not _BUCKET.fullmatch(parts.netloc) or not folder:
        raise _invalid_source(ref, f"expected {parts.scheme}://bucket/folder")
    if any(part in {"", ".", ".."} for part in folder.split("/")) or any(char in folder for char in "*?[]{}"):
        raise _invalid_source(ref, "the folder may have no empty part, no `.` or `..`, and no wildcard")
    return parts.netloc, folder


def is_archive(ref: str) -> bool:
    """Whether a reference names a `.tar`, `.tar.gz`, `.tgz` or `.zip` file."""
    return ref.lower().endswith(ARCHIVES)


def is_below(ref: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a reference equals a prefix or is below it: `s3://a` allows `s3://a/b` but not `s3://ab`.

    For a hub repository a revision (`@`) may follow the prefix, too.
    """
    if _may_leave_folder(ref):
        return False
    ends = "/@" if scheme(ref) == "hf" else "/"
    return any(
        ref == prefix or ref.startswith(tuple(prefix.rstrip("/") + end for end in ends))
        if not prefix.endswith("://")
        else ref.startswith(prefix)
        for prefix in prefixes
    )


def _may_leave_folder(ref: str) -> bool:
    """Whether some server may read `..` in the path: some decode twice, read `\\` as `/`, or (Tomcat) drop `;...`."""
    for _ in range(_MAX_DECODINGS):
        ref = unquote(ref)
    return ref != unquote(ref) or any(part.partition(";")[0] in {".", ".."} for part in re.split(r"[/\\]", ref))


def _invalid_source(ref: str, reason: str) -> SourceError:
    """A SourceError `source_invalid` that names the reference without secrets."""
    return SourceError("source_invalid", f"source {redacted(ref)}: {reason}")
