"""Changes of the wire since the last release that were agreed on, each with the reason why both versions still work.

A change is agreed on after a release in which both forms work, with a line in the changelog. The key is `Type.field`,
or `Type` for a whole one. When a release is recorded, this list is emptied.
"""

AGREED: dict[str, str] = {}
