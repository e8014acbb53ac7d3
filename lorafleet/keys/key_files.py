"""Key files: YAML with the hashes of API keys, read and checked. A key file never holds a key.

`keys: [{sha256: <hex of the key>, tenant: acme, scopes: [infer], expires: 2027-01-01T00:00:00Z, limits:
{requests_per_minute: 60, tokens_per_minute: 100000, concurrent_requests: 8}}]`; all limits are optional, and so are
budgets among them, such as `tokens_per_month` and its soft line `soft_tokens_per_month`. Keys are
random (`lorafleet keys new`), so a plain hash is safe. `issuers`, beside `keys`, are whose tokens are taken, and what
their claims grant: the fields of a key again (`issuers.py`). `tenants: {acme: {limits: {...}}}` are limits of all keys
and tokens of a tenant together.

A file that is cut off between two lines may still be YAML, with fewer keys, or with a key that lost its tenant. So a
file may begin with the line `FIRST_LINE`, which promises that its last line is `LAST_LINE`: `lorafleet keys new` writes
both. Of a file without them `ApiKeys` waits until nobody writes it any more.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from lorafleet.keys.issuers import Grant, Issuer, fill, filled, places_in
from lorafleet.keys.roles import FLEET_SCOPES, SCOPES, Caller, namespace_trouble
from lorafleet.service import yamls
from lorafleet.service.http import validation_message
from orchestrator.model.limits import BUDGETS, MOST, SOFT, AccountLimits

FIRST_LINE = "# lorafleet keys: the last line is `# end`, so that a file that is cut off is seen"
LAST_LINE = "# end"
# Key files are checked for changes this often.
RECHECK_S = 1.0
LIMITS = tuple(each.name for each in fields(AccountLimits))
# Digits of a key's hash that identify the key in logs and quotas.
_KEY_ID_DIGITS = 12
_GRANTED = frozenset({"tenant", "scopes", "note", "limits", "namespace", "lora_ids", "may_shadow_base"})
_FIELDS = _GRANTED | {"sha256", "expires"}
_ISSUER = TypeAdapter(Issuer)
_MAX_NOTE = 80
# Reports name a limit by its tenant.
_MAX_LIMITED_TENANT = 200


class KeyFileError(Exception):
    """A key file is unreadable or invalid. The message names the file, the entry and the expected form."""


class KeyFileUnreadable(KeyFileError):
    """A key file cannot be read now, because of its mode, its disk or a lack of descriptors; a retry may succeed."""


def hash_key(key: str) -> str:
    """The hash of a key, as key files hold it."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A fresh key with 256 random bits."""
    return "lf-" + secrets.token_urlsafe(32)


class KeyFile(NamedTuple):
    """The contents of a key file.

    callers        by key hash
    issuers        by URL
    tenant_limits  by tenant, of those that have some
    is_marked      whether its marks show that it is whole
    """

    callers: dict[str, Caller]
    issuers: dict[str, Issuer]
    tenant_limits: dict[str, AccountLimits]
    is_marked: bool


def read_key_files(files: Sequence[Path]) -> dict[str, Caller]:
    """The callers of all key files by key hash; raises KeyFileError."""
    return {key: caller for path in files for key, caller in read_key_file(path).callers.items()}


def with_marks(text: str) -> str:
    """The text of a new key file, between the marks by which a file that is cut off is seen."""
    return f"{FIRST_LINE}\n{text.rstrip()}\n{LAST_LINE}\n"


def _is_marked(path: Path, text: str) -> bool:
    """Whether the text has both marks. Raises KeyFileError for a text with the first alone."""
    if not text.lstrip().startswith(FIRST_LINE):
        return False
    last = text.rstrip().rpartition("\n")[2]
    if last != LAST_LINE:
        raise KeyFileError(
            f"key file {path}: cut off, or continued behind its end: its first line promises that the last one is"
            f" {LAST_LINE!r}, found {_line_beginning(last)}; move what was added above {LAST_LINE!r}, or write the"
            " whole file again"
        )
    return True


def _line_beginning(line: str) -> str:
    """The beginning of a line, for a message; a hash in it is no secret."""
    return ascii(line[:40])


def read_key_file(path: Path) -> KeyFile:
    """The callers and issuers of one key file; raises KeyFileError."""
    form = (
        f"expected `keys: [{{sha256: <64 hex>, tenant: <name>, scopes: [{'|'.join(SCOPES)}],"
        " expires: <UTC time>, limits: {...}, namespace: <name>, lora_ids: [<pattern>], may_shadow_base: true}]`"
    )
    try:
        text = yamls.read_text(path)
        is_marked = _is_marked(path, text)
        raw: Any = yamls.parse_yaml(text)
    except FileNotFoundError as exc:
        message = f"key file {path}: {exc.strerror}; `lorafleet keys new --file {path}` makes one"
        raise KeyFileUnreadable(message) from exc
    except OSError as exc:
        raise KeyFileUnreadable(f"key file {path}: {exc}") from exc
    except ValueError as exc:  # no text, or no YAML
        raise KeyFileError(f"key file {path}: {exc}") from exc
    issuers = raw.get("issuers", []) if isinstance(raw, dict) else []
    tenants = raw.get("tenants", {}) if isinstance(raw, dict) else {}
    entries = raw.get("keys", [] if issuers or tenants else None) if isinstance(raw, dict) else None
    if not isinstance(entries, list) or not isinstance(issuers, list):
        raise KeyFileError(f"key file {path}: {form}")
    callers = dict(_parse_entry(path, number, entry, form) for number, entry in enumerate(entries))
    found = [_parse_issuer(f"key file {path}: issuer {number}", entry) for number, entry in enumerate(issuers)]
    by_url = {issuer.issuer: issuer for issuer in found}
    if len(by_url) < len(found):
        raise KeyFileError(f"key file {path}: an issuer stands there twice: give it all its grants in one place")
    return KeyFile(callers, by_url, _parse_tenants(path, tenants), is_marked)


def _parse_tenants(path: Path, tenants: object) -> dict[str, AccountLimits]:
    """The limits of each tenant that has some; raises KeyFileError."""
    if not isinstance(tenants, dict) or not all(map(_may_have_limits, tenants)):
        form = f"`{{<name, of at most {_MAX_LIMITED_TENANT} characters>: {{limits: {{...}}}}}}`"
        raise KeyFileError(f"key file {path}: tenants must be {form}")
    found = {}
    for name, entry in tenants.items():
        location = f"key file {path}: tenant {name}"
        if not isinstance(entry, dict) or entry.keys() != {"limits"}:
            raise KeyFileError(f"{location}: expected `limits: {{...}}`, and nothing else")
        found[name] = _parse_limits(entry["limits"], location)
    return {name: limits for name, limits in found.items() if limits is not None}


def _may_have_limits(tenant: object) -> bool:
    """Whether this is a tenant's name that limits can have."""
    return isinstance(tenant, str) and 0 < len(tenant.strip()) <= len(tenant) <= _MAX_LIMITED_TENANT


def _parse_entry(path: Path, number: int, entry: object, form: str) -> tuple[str, Caller]:
    """The key hash and the caller of one entry; raises KeyFileError."""
    if not isinstance(entry, dict) or entry.keys() - _FIELDS:
        raise KeyFileError(f"key file {path}: entry {number}: {form}")
    location, digest = f"key file {path}: entry {number}", entry.get("sha256")
    if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise KeyFileError(f"{location}: sha256 must be 64 lower-case hex digits")
    granted = _parse_granted(location, entry)
    expires_at = _parse_expiry(entry.get("expires"), location)
    return digest, replace(granted, key_id=key_id_of(digest), expires_at=expires_at)


def _parse_granted(location: str, entry: Mapping[str, Any], captured: Mapping[str, str] | None = None) -> Caller:
    """What a key or a grant gives, by the fields that both have; raises KeyFileError.

    captured  values to check the fields of a grant with, in place of each `{name}`; None: a key, which has none
    """
    tenant, scopes = entry.get("tenant"), entry.get("scopes")
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise KeyFileError(f"{location}: scopes must be some of {', '.join(SCOPES)}")
    if tenant is not None and not (isinstance(tenant, str) and tenant.strip()):
        raise KeyFileError(f"{location}: tenant must be a name; leave it out for none")
    if (trouble := scope_trouble(tenant, scopes)) is not None:
        raise KeyFileError(f"{location}: {trouble}")
    limits = _parse_limits(entry.get("limits"), location)
    namespace, lora_ids, shadows = entry.get("namespace"), entry.get("lora_ids"), entry.get("may_shadow_base")
    checked = namespace if captured is None or not isinstance(namespace, str) else fill(namespace, captured)
    if (trouble := naming_trouble(checked, lora_ids, shadows)) is not None:
        raise KeyFileError(f"{location}: {trouble}")
    return Caller(
        tenant,
        frozenset(scopes),
        limits=limits,
        namespace=namespace or "",
        lora_ids=tuple(lora_ids or ()),
        may_shadow_base=bool(shadows),
        note=_short_note(entry.get("note")),
    )


def _parse_issuer(location: str, entry: object) -> Issuer:
    """One issuer, with its grants; raises KeyFileError."""
    if not isinstance(entry, dict):
        raise KeyFileError(f"{location}: expected `{{issuer: <URL>, audiences: [<name>], grants: [...]}}`")
    grants = entry.get("grants")
    if isinstance(grants, list):
        parsed = [_parse_grant(f"{location}: grant {number}", grant) for number, grant in enumerate(grants)]
        entry = entry | {"grants": parsed}
    try:
        return _ISSUER.validate_python(entry)
    except ValidationError as exc:
        raise KeyFileError(f"{location}: {validation_message(exc.errors())}") from exc


def _parse_grant(location: str, entry: object) -> Grant:
    """One grant; raises KeyFileError, also for a `{name}` that no claim gives."""
    claims = entry.get("claims") if isinstance(entry, dict) else None
    if (
        not isinstance(entry, dict)
        or entry.keys() - _GRANTED - {"claims"}
        or not claims
        or not isinstance(claims, dict)
    ):
        fields = ", ".join(sorted(_GRANTED))
        raise KeyFileError(f"{location}: expected `claims: {{<name>: <pattern>}}` and some of {fields}")
    texts = tuple((name, str(value).lower() if isinstance(value, bool) else value) for name, value in claims.items())
    if not all(isinstance(text, str) and text for pair in texts for text in pair):
        raise KeyFileError(f"{location}: claims must be names with patterns such as team-*, found {claims!r:.100}")
    places = [place for _, pattern in texts for place in places_in(pattern)]
    if len(set(places)) < len(places):
        raise KeyFileError(f"{location}: a {{name}} stands in the claims twice: give each a name of its own")
    try:
        gives = _parse_granted(location, entry, dict.fromkeys(places, "x"))
        filled(gives, dict.fromkeys(places, "x"))
    except KeyError as exc:
        raise KeyFileError(f"{location}: {{{exc.args[0]}}} stands in no pattern of its claims") from exc
    return Grant(claims=texts, gives=gives)


def _short_note(note: object) -> str:
    """An entry's note as one line of at most 80 characters; empty without one."""
    return "" if note is None else " ".join(str(note).split())[:_MAX_NOTE]


def key_id_of(digest: str) -> str:
    """The first digits of a key's hash, by which logs, histories and `lorafleet keys` name the key."""
    return digest[:_KEY_ID_DIGITS]


def scope_trouble(tenant: str | None, scopes: Sequence[str]) -> str | None:
    """Why scopes do not go with the tenant, or with none; None if they do."""
    if tenant is None and "tenant-admin" in scopes:
        return "scope 'tenant-admin' needs a tenant: name one, or give scope 'admin' for the whole fleet"
    if tenant is not None and (held := sorted(set(scopes) & set(FLEET_SCOPES))):
        return (
            f"scope {held[0]!r} holds for the whole fleet, so it takes no tenant: leave out {tenant!r}, or give scope"
            " 'tenant-admin' for that tenant alone"
        )
    return None


def naming_trouble(namespace: object, lora_ids: object, may_shadow_base: object) -> str | None:
    """Why these fields of a key do not go together, or are none; None if they do. None stands for a missing field."""
    if namespace is not None and (trouble := namespace_trouble(namespace)) is not None:
        return trouble
    is_list = isinstance(lora_ids, list | tuple) and all(isinstance(each, str) and each for each in lora_ids)
    if lora_ids is not None and not (is_list and lora_ids):
        return f"lora_ids must be a list of patterns such as team-a/*, found {lora_ids!r:.40}"
    if may_shadow_base not in (None, True, False):
        return f"may_shadow_base must be true or false, found {may_shadow_base!r:.40}"
    if may_shadow_base and namespace is None:
        return "may_shadow_base needs a namespace: what is published under a base model's name lives there"
    return None


def budget_trouble(limits: Mapping[str, float]) -> str | None:
    """Why these budgets do not go together; None if they do."""
    for name, _, _ in BUDGETS:
        soft, hard = limits.get(SOFT + name, 0), limits.get(name, MOST)
        if soft > hard:
            return f"{SOFT}{name} must be at most {name} ({hard:g}), where requests are refused; found {soft:g}"
    return None


def _parse_expiry(value: object, location: str) -> float | None:
    """The expiry of one entry as Unix seconds; None without one. Raises KeyFileError."""
    if value is None:
        return None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if not isinstance(value, datetime):
        raise KeyFileError(f"{location}: expires must be a UTC time such as 2027-01-31T00:00:00Z, found {value!r:.40}")
    return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()


def _parse_limits(limits: object, location: str) -> AccountLimits | None:
    """The limits of one entry; None without any. Raises KeyFileError for an unknown name or an invalid number."""
    if limits is None:
        return None
    if not isinstance(limits, dict) or limits.keys() - set(LIMITS):
        raise KeyFileError(f"{location}: limits must be some of {', '.join(LIMITS)}, each with a number")
    for name, value in limits.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= MOST
        if not is_number or (name == "concurrent_requests" and value != int(value)):
            kind = "a whole number" if name == "concurrent_requests" else "a number"
            found = f"found {value!r:.40}; leave it out for none"
            raise KeyFileError(f"{location}: {name} must be {kind} of at least 1 and at most 2**53, {found}")
    if (trouble := budget_trouble(limits)) is not None:
        raise KeyFileError(f"{location}: {trouble}")
    if "concurrent_requests" in limits:  # 8.0 is valid, and shared quotas need integers
        limits = limits | {"concurrent_requests": int(limits["concurrent_requests"])}
    return AccountLimits(**limits) if limits else None
