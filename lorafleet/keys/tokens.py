"""Tokens: a JWT's signature, issuer, audience and times, and the caller that its claims stand for.

source  RFC 8725 (JSON Web Token Best Current Practices), RFC 9068 (`typ`), RFC 7515 (headers)
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jwt

from lorafleet.keys.issuers import Claims, Issuer, NoGrant, caller_of_claims
from lorafleet.keys.roles import Caller, expiry_text
from lorafleet.keys.signing_keys import SigningKey, SigningKeys
from lorafleet.service.http import HttpError

Reason = Literal[
    "malformed",
    "too_large",
    "header",
    "algorithm",
    "issuer",
    "key",
    "signature",
    "audience",
    "claims",
    "expired",
    "not_yet_valid",
    "no_grant",
    "ambiguous_grant",
    "issuer_away",
]
MOST_TOKEN_BYTES = 16 * 2**10
_MOST_KID = 256
_MOST_SECONDS = 2**37  # the year 6325: later times are none of the calendar's
# Headers that would have the token itself name the key that it is checked with, and those that change its meaning.
_REFUSED_HEADERS = ("crit", "jwk", "jku", "x5u", "x5c", "b64", "zip", "enc")
# Of access tokens and ID tokens. Others, such as `logout+jwt`, are signed by the same key, for something else.
_TYPES = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})
_AGAIN_S = 1.0
_READ_ONLY: Any = {"verify_signature": False}
# Times are checked here: they come from the service's own clock.
_OPTIONS: Any = {"require": ["iss", "aud", "exp", "sub"], "verify_exp": False, "verify_nbf": False, "verify_iat": False}


class TokenRefused(HttpError):
    """A token is not taken. `reason` is a label of the metric; the message is for who sent it."""

    def __init__(self, reason: Reason, message: str) -> None:
        status, code = _ANSWERS.get(reason, (401, "invalid_token"))
        super().__init__(status, code, message, retry_after_s=_AGAIN_S if status == 503 else None)
        self.reason = reason


_ANSWERS: Mapping[Reason, tuple[int, str]] = {
    "expired": (401, "expired_token"),
    "no_grant": (403, "no_grant"),
    "ambiguous_grant": (403, "no_grant"),
    "issuer_away": (503, "issuer_unreachable"),
}


def is_token(key: str) -> bool:
    """Whether a bearer credential has the form of a JWT, signed (three parts) or encrypted (five)."""
    return key.startswith("ey") and key.count(".") in {2, 4}


def caller_of_token(
    token: str,
    issuers: Mapping[str, Issuer],
    keys: SigningKeys,
    *,
    id_of_subject: Callable[[str, str], str],
    now: float,
) -> Caller:
    """The caller of a token, as its issuer's grants have it. Raises TokenRefused.

    id_of_subject  (issuer, subject) -> the caller's id in logs, histories and quotas
    now            Unix seconds
    """
    header, unchecked = _read(token)
    issuer = _issuer_of(unchecked, issuers)
    key = _key_of(header, issuer, keys)
    try:
        claims = _verified(token, key, header["alg"], issuer)
    except jwt.InvalidSignatureError as exc:
        if "kid" not in header and keys.want_fetch(issuer):  # it does not say by which key it is signed
            raise _not_known_yet(issuer, keys) from exc
        raise TokenRefused("signature", "this token's signature is not one of its issuer") from exc
    expires_at = _checked_times(claims, issuer.skew_s, now)
    try:
        key_id = id_of_subject(issuer.issuer, claims["sub"])
        return caller_of_claims(issuer, claims, key_id=key_id, expires_at=expires_at)
    except NoGrant as exc:
        message = f"this token is valid, and gives no access here: {exc}; ask the operator for a grant"
        raise TokenRefused(exc.reason, message) from exc


def subject_in(token: str) -> str:
    """The subject that a token claims, unchecked, for a line of the log; empty: it claims none."""
    try:
        return ascii(jwt.decode(token, options=_READ_ONLY).get("sub", ""))[1:-1][:100]
    except jwt.InvalidTokenError:
        return ""


def _read(token: str) -> tuple[dict[str, Any], Claims]:
    """Header and claims, unchecked; raises TokenRefused for what no token of ours has."""
    if len(token) > MOST_TOKEN_BYTES:
        raise TokenRefused("too_large", f"this token has more than {MOST_TOKEN_BYTES} bytes")
    if token.count(".") != 2:
        raise TokenRefused("malformed", "this token is encrypted (JWE): send a signed one (JWS)")
    try:
        read = jwt.decode_complete(token, options=_READ_ONLY)
    except jwt.DecodeError as exc:
        raise TokenRefused("malformed", f"this is no valid JWT: {exc!s:.200}") from exc
    except jwt.InvalidTokenError as exc:
        raise TokenRefused("header", f"this token's header is not taken: {exc!s:.200}") from exc
    header, claims = read["header"], read["payload"]
    if refused := [name for name in _REFUSED_HEADERS if name in header]:
        raise TokenRefused("header", f"this token has the header {refused[0]!r}, which is not taken")
    kind = header.get("typ", "JWT")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise TokenRefused("header", f"this token is of type {kind!r:.40}, expected an access token or an ID token")
    return header, claims


def _issuer_of(claims: Claims, issuers: Mapping[str, Issuer]) -> Issuer:
    """The issuer that a token claims to be of; raises TokenRefused for one that is not ours."""
    name = claims.get("iss")
    found = issuers.get(name) if isinstance(name, str) else None
    if found is None:
        raise TokenRefused("issuer", f"this token is of issuer {name!r:.200}, whose tokens are not taken here")
    return found


def _key_of(header: Mapping[str, Any], issuer: Issuer, keys: SigningKeys) -> SigningKey:
    """The issuer's key that a token names; raises TokenRefused. Asks for a fetch where the key is not known."""
    algorithm, kid = header.get("alg"), header.get("kid")
    if algorithm not in issuer.algorithms:
        expected = ", ".join(issuer.algorithms)
        raise TokenRefused("algorithm", f"this token is signed by {algorithm!r:.40}, expected one of {expected}")
    if kid is not None and len(kid) > _MOST_KID:
        raise TokenRefused("header", f"this token's `kid` has more than {_MOST_KID} characters")
    found = keys.find(issuer, kid, algorithm)
    if found is not None:
        return found
    if keys.want_fetch(issuer):
        raise _not_known_yet(issuer, keys)
    raise TokenRefused("key", f"this token's issuer has no key {kid!r:.60} for {algorithm} signatures")


def _not_known_yet(issuer: Issuer, keys: SigningKeys) -> TokenRefused:
    """The refusal of a token whose key is being fetched."""
    why = "its issuer does not answer" if keys.trouble(issuer) else "its issuer is being asked"
    return TokenRefused("issuer_away", f"this token's signing key is not known yet, and {why}: send it again")


def _verified(token: str, key: SigningKey, algorithm: str, issuer: Issuer) -> Claims:
    """The claims of a token whose signature, issuer and audience are right.

    Raises jwt.InvalidSignatureError, and TokenRefused for anything else.
    """
    try:
        return jwt.decode(
            token,
            key.public_key,
            algorithms=[algorithm],
            audience=issuer.audiences,
            issuer=issuer.issuer,
            options=_OPTIONS,
        )
    except jwt.InvalidSignatureError:
        raise
    except jwt.InvalidTokenError as exc:
        if isinstance(exc, jwt.InvalidAudienceError) or getattr(exc, "claim", "") == "aud":
            expected = ", ".join(issuer.audiences)
            raise TokenRefused("audience", f"this token is for another audience; `aud` must have {expected}") from exc
        raise TokenRefused("claims", f"this token's claims are not taken: {exc!s:.200}") from exc


def _checked_times(claims: Claims, skew_s: float, now: float) -> float:
    """The Unix seconds from which a token is refused; raises TokenRefused for one that is refused now."""
    times = {name: claims[name] for name in ("exp", "nbf", "iat") if name in claims}
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_SECONDS:
            raise TokenRefused("claims", f"this token's `{name}` is no time, found {value!r:.40}")
        if name != "exp" and value > now + skew_s:
            message = f"this token is valid from its `{name}` on, which is {value - now:.0f} s away: check the clocks"
            raise TokenRefused("not_yet_valid", message)
    expires_at = times["exp"] + skew_s
    if now >= expires_at:
        raise expired(times["exp"])
    return float(expires_at)


def expired(expires_at: float) -> TokenRefused:
    """The refusal of a token that was taken until then."""
    return TokenRefused("expired", f"this token expired at {expiry_text(expires_at)}: log in again for another")
