"""Authentication by bearer tokens and authorization by stored Roles and RoleBindings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kube.kinds import BY_PLURAL, ResourceKind
from tests.kube.status import forbidden, unauthorized
from tests.kube.store import VersionedObjects

ADMIN = "admin"  # in system:masters, so to speak: may do everything


@dataclass(slots=True)
class AccessRules:
    """Access rules. `tokens`: token -> user, e.g. `system:serviceaccount:<namespace>:<name>`; empty: all are admin."""

    store: VersionedObjects
    tokens: dict[str, str] = field(default_factory=dict)

    def user(self, authorization: str) -> str:
        """The user of an authorization header. Raises 401."""
        if not self.tokens:
            return ADMIN
        user = self.tokens.get(authorization.removeprefix("Bearer ").strip())
        if user is None:
            raise unauthorized()
        return user

    def require(
        self, user: str, verb: str, resource: ResourceKind, subresource: str, namespace: str, name: str
    ) -> None:
        """Raise 403 without permission. `name`: "" for a collection and for an object without a name yet."""
        if user == ADMIN:
            return
        what = f"{resource.plural}/{subresource}" if subresource else resource.plural
        for rule in self._rules_of(user, namespace):
            if (
                _has(rule.get("verbs"), verb)
                and _has(rule.get("apiGroups"), resource.group)
                and _has(rule.get("resources"), what)
                and (not rule.get("resourceNames") or name in rule["resourceNames"])
            ):
                return
        raise forbidden(user, verb, resource, subresource, namespace, name)

    def _rules_of(self, user: str, namespace: str) -> list[dict[str, Any]]:
        """The rules of the user's Roles in this namespace; none for requests of the whole cluster."""
        found = []
        for binding in self.store.find(BY_PLURAL["rolebindings"], namespace) if namespace else ():
            if user in _subjects(binding):
                role = self.store.get(BY_PLURAL["roles"], namespace, binding["roleRef"]["name"])
                found += (role or {}).get("rules") or []
        return found


def _subjects(binding: dict[str, Any]) -> set[str]:
    own = binding["metadata"]["namespace"]
    return {
        f"system:serviceaccount:{subject.get('namespace', own)}:{subject['name']}"
        if subject["kind"] == "ServiceAccount"
        else subject["name"]
        for subject in binding.get("subjects") or []
    }


def _has(listed: Sequence[str] | None, wanted: str) -> bool:
    return wanted in (listed or ()) or "*" in (listed or ())
