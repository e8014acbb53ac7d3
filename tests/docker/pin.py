"""`python -m tests.docker.pin > docker/constraints.txt`: the images' packages, in the versions of this environment.

Run it where `make test` has passed. Everything that lorafleet needs is listed, with what that needs in turn; of the
extras those that an image has.
"""

import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("demo", "tracing", "s3", "gs", "az", "postgresql")


def pins() -> dict[str, str]:
    """Canonical name -> version, of lorafleet's dependencies here."""
    found: dict[str, str] = {}
    left = [("lorafleet", extra) for extra in ("", *EXTRAS)]
    seen = set(left)
    while left:
        name, extra = left.pop()
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
                continue
            package = canonicalize_name(needed.name)
            if package != "lorafleet":
                found[package] = metadata.version(package)
            for entry in ((package, more) for more in ("", *needed.extras)):
                if entry not in seen:
                    seen.add(entry)
                    left.append(entry)
    return found


if __name__ == "__main__":
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(pins().items()))
    sys.stdout.write(f"# Written by python -m tests.docker.pin.\n{lines}")
