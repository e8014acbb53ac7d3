"""Issuers of tokens (OIDC), as key files name them: whose tokens are taken, and what their claims grant. Pure.

A grant has the fields of a key, and patterns of claims. A token gets the first grant whose patterns all match; `{team}`
in a pattern stands for one part of a name, and gives it to the fields of the grant.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Le, MinLen
from pydantic import ConfigDict

from lorafleet.keys.roles import Caller
from lorafleet.service.network.urls import is_http

Claims = Mapping[str, Any]
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # asymmetric ones alone
_PLACE = re.compile(r"\{(\w+)\}")
# A value of a claim becomes part of names and patterns: no slash, no `*`, and no `.` or `..`.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}"
# Claims that are lists of words in one text (RFC 8693, 4.2; Entra's `scp`).
_WORD_LISTS = frozenset({"scope", "scp"})
_NAMES_OF_PEOPLE = ("preferred_username", "email", "name", "sub")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]+")
_FORBID: ConfigDict = {"extra": "forbid"}


class NoGrant(Exception):
    """No grant is for the claims of a token, or one is for them in several ways. The message says which."""

    def __init__(self, reason: Literal["no_grant", "ambiguous_grant"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What tokens with these claims may do.

    claims  name of a claim -> pattern; all must match. `a.b` is the claim `b` in the claim `a`
    gives   the fields of a key, where `{name}` is what stands there in a claim
    """

    claims: Annotated[tuple[tuple[str, str], ...], MinLen(1)]
    gives: Caller

    def found_in(self, claims: Claims) -> Caller | None:
        """What these claims get by this grant; None: it is not for them. Raises NoGrant where they match twice."""
        captured: dict[str, str] = {}
        for name, pattern in self.claims:
            matches = {match.groups(): match for text in _texts(claims, name) if (match := _regex(pattern)(text))}
            if not matches:
                return None
            if len(matches) > 1:
                values = ", ".join(sorted(ascii(match[0])[1:-1] for match in matches.values()))
                raise NoGrant("ambiguous_grant", f"its claim {name} has several values for {pattern}: {values:.200}")
            captured |= next(iter(matches.values())).groupdict()
        return filled(self.gives, captured)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleLogin:
    """How the console logs in: as a public client, by authorization code with PKCE.

    client_id  as the issuer knows the console
    scope      what the console asks for
    token      which of the issuer's tokens it sends to the fleet
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    client_id: Annotated[str, MinLen(1)]
    scope: str = "openid profile"
    token: Literal["access_token", "id_token"] = "access_token"  # noqa: S105  (the name of a field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """An issuer whose tokens are taken.

    issuer      its URL, as the claim `iss` has it
    audiences   `aud` must name one of them
    grants      the first that is for a token's claims counts
    algorithms  of signatures; any other is refused
    skew_s      by which clocks may differ
    refresh_s   between two reads of its signing keys
    outlive_s   how long its keys are taken while it cannot be reached
    keys_url    of its signing keys; empty: its discovery document names it
    ca_file     authorities of its certificate; None: the public ones
    token_file  a token to send to it, as a Kubernetes API server wants; None: none
    console     how the console logs in there; None: it does not
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    issuer: str
    audiences: Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1)]
    grants: Annotated[tuple[Grant, ...], MinLen(1)]
    algorithms: Annotated[tuple[Algorithm, ...], MinLen(1)] = ("RS256", "ES256")
    skew_s: Annotated[float, Ge(0), Le(300)] = 30.0
    refresh_s: Annotated[float, Ge(1), Le(86_400)] = 300.0
    outlive_s: Annotated[float, Ge(0)] = 86_400.0
    keys_url: str = ""
    ca_file: Path | None = None
    token_file: Path | None = None
    console: ConsoleLogin | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a URL that is not safe: who can change its answers makes tokens of any tenant."""
        for name, url in (("issuer", self.issuer), ("keys_url", self.keys_url)):
            if (url or name == "issuer") and not is_safe_url(url):
                raise ValueError(f"{name} must be an https:// URL, or http:// on loopback, found {url!r:.100}")


def is_safe_url(url: str) -> bool:
    """Whether nobody between us and this URL can change what it answers."""
    if not is_http(url):
        return False
    parts = urlsplit(url)
    if not _HOST.fullmatch(parts.netloc):  # it becomes part of a header of the console's page
        return False
    return parts.scheme == "https" or _is_loopback(parts.hostname or "")


def _is_loopback(host: str) -> bool:
    """Whether this host is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def caller_of_claims(issuer: Issuer, claims: Claims, *, key_id: str, expires_at: float) -> Caller:
    """The caller of a token whose signature, audience and times have been checked. Raises NoGrant."""
    who = next(str(claims[name]) for name in _NAMES_OF_PEOPLE if isinstance(claims.get(name), str))
    for grant in issuer.grants:
        found = grant.found_in(claims)
        if found is not None:
            note = " ".join(who.split())[:80]
            return replace(found, key_id=key_id, expires_at=expires_at, issuer=issuer.issuer, note=note)
    looked_at = ", ".join(sorted({name for grant in issuer.grants for name, _ in grant.claims}))
    raise NoGrant("no_grant", f"no grant is for its claims (grants look at {looked_at})")


def filled(gives: Caller, captured: Mapping[str, str]) -> Caller:
    """The caller, with what was captured in place of each `{name}`. Raises KeyError for another name."""
    return replace(
        gives,
        tenant=None if gives.tenant is None else fill(gives.tenant, captured),
        namespace=fill(gives.namespace, captured),
        lora_ids=tuple(fill(pattern, captured) for pattern in gives.lora_ids),
    )


def fill(text: str, captured: Mapping[str, str]) -> str:
    """The text, with what was captured in place of each `{name}`. Raises KeyError for another name."""
    return _PLACE.sub(lambda place: captured[place[1]], text)


def places_in(text: str) -> list[str]:
    """The names of the `{name}` in a text, in their order."""
    return _PLACE.findall(text)


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> Any:
    """A function that matches a whole text with a pattern: `*` is any text, `{name}` one part of a name."""
    parts = re.split(r"(\*|\{\w+\})", pattern)
    names = {"*": ".*"}
    text = "".join(
        names.get(part) or (f"(?P<{part[1:-1]}>{_PART})" if _PLACE.fullmatch(part) else re.escape(part))
        for part in parts
    )
    return re.compile(text, re.DOTALL).fullmatch


def _texts(claims: Claims, name: str) -> Iterator[str]:
    """The values of a claim as texts; a claim that is a list has several."""
    value = _claim(claims, name)
    if isinstance(value, str) and name in _WORD_LISTS:
        value = value.split()
    for each in value if isinstance(value, list) else (value,):
        if isinstance(each, bool):
            yield str(each).lower()
        elif isinstance(each, str | int):
            yield str(each)


def _claim(claims: Claims, name: str) -> Any:
    """The claim of this name, or of its part before a dot; None without one. Names may have dots themselves."""
    if name in claims:
        return claims[name]
    for place in (index for index, char in enumerate(name) if char == "."):
        inner = claims.get(name[:place])
        if isinstance(inner, dict) and (found := _claim(inner, name[place + 1 :])) is not None:
            return found
    return None
