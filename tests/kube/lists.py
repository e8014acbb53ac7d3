"""Lists, complete or in pages of one version."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kube import status
from tests.kube.kinds import ResourceKind
from tests.kube.store import Object, VersionedObjects
from tests.kube.wire import PathTarget, holds_of, version_of

_MOST = 64
_TOO_OLD_TOKEN = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)


@dataclass(slots=True)
class PagedLists:
    """Remembers partly read lists by version, for their next pages."""

    _wholes: dict[tuple[int, ResourceKind, str], list[Object]] = field(default_factory=dict)

    def listed(self, store: VersionedObjects, target: PathTarget, query: Mapping[str, str]) -> Any:
        """The list of a collection. Raises 400, 410 and 504."""
        resource = target.resource
        asked = version_of(query.get("resourceVersion", ""))
        if asked > store.version:
            raise status.too_large_version(asked, store.version)
        holds = holds_of(query)
        limit, token = int(query.get("limit") or 0), query.get("continue", "")
        version, start = _resumed(token) if token else (store.version, "")
        if version == -1:  # the inconsistent rest of a list that broke
            version = store.version
        whole, of = store.find(resource, target.namespace), (version, resource, target.namespace)
        if token and version != store.version:
            if version < store.oldest[resource] or of not in self._wholes:
                raise status.expired(_TOO_OLD_TOKEN, resume=_token(-1, start))
            whole = self._wholes[of]
        found = [obj for obj in whole if holds(obj) and _key(obj) > start]
        meta: dict[str, Any] = {"resourceVersion": str(version)}
        if limit and len(found) > limit:
            self._wholes[of] = whole
            while len(self._wholes) > _MOST:
                del self._wholes[next(iter(self._wholes))]
            meta["continue"] = _token(version, _key(found[limit - 1]))
            if not query.get("labelSelector") and not query.get("fieldSelector"):
                meta["remainingItemCount"] = len(found) - limit
            found = found[:limit]
        # The items of a list do not say their kind: the list does. Only custom resources are otherwise.
        items = [{key: value for key, value in obj.items() if key not in ("kind", "apiVersion")} for obj in found]
        return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta, "items": items}


def _key(obj: Object) -> str:
    return f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}"


def _token(version: int, start: str) -> str:
    said = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start})
    return base64.urlsafe_b64encode(said.encode()).decode().rstrip("=")


def _resumed(token: str) -> tuple[int, str]:
    try:
        said = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(said["rv"]), str(said["start"])
    except (ValueError, KeyError) as exc:
        raise status.bad_request(f"continue key is not valid: {exc}") from exc
