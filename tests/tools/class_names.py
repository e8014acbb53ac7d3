"""Class names that two classes of this repository share. `make lint` runs it: a class name is unique.

A reader who meets `Adapter` in a log, a traceback or a search then knows which class is meant.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def defined_classes(source: str) -> Iterator[str]:
    """The names of all classes in Python source, nested ones included, in no particular order."""
    return (node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def shared_names(sources: Iterable[tuple[str, str]]) -> Mapping[str, Sequence[str]]:
    """Each class name that stands more than once -> the files that define the name.

    sources  pairs of file name and Python source
    """
    found: dict[str, list[str]] = defaultdict(list)
    for file, source in sources:
        for name in defined_classes(source):
            found[name].append(file)
    return {name: files for name, files in sorted(found.items()) if len(files) > 1}


def main() -> int:
    """Print the shared names; the exit status is 1 where there are any."""
    # Untracked files count, ignored ones (environments, build output) do not.
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    shared = shared_names((file, (ROOT / file).read_text()) for file in listed if (ROOT / file).is_file())
    for name, files in shared.items():
        print(f"class {name} is defined in {', '.join(files)}: give each a name of its own")
    return 1 if shared else 0


if __name__ == "__main__":
    sys.exit(main())
