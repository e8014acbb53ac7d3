"""Changes of the wire since the last release that were agreed on, each with the reason why both versions still work.

When a release is recorded, both lists are emptied.
"""

AGREED: dict[str, str] = {}
"""Removed and changed forms: `Type.field`, or `Type` for a whole one -> the reason.

A change is agreed on after a release in which both forms work, with a line in the changelog.
"""

ADDED_CALLS: dict[tuple[str, str], str] = {}
"""Calls that services of the last release neither make nor serve: (method, path of the route) -> the reason."""
