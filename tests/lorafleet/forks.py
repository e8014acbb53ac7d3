"""Houses that are started to see how they end, forked from a process that has imported them all.

    with Forks() as forks:
        ended = forks.run("router", "--port", "80", folder=tmp_path)

A process of its own takes a second of CPU to import what it needs, a fork next to none.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self


class Forks:
    """The process that forks: it has one thread, as a process that forks has to."""

    def __enter__(self) -> Self:
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("LORAFLEET_")}
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.lorafleet.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._env,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()
        self._folder.cleanup()

    def run(self, *words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
        """`python -m WORDS` in this folder, once it has ended by itself; without settings in its environment."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        out, err = (Path(self._folder.name) / name for name in ("out", "err"))
        asked = {"words": words, "folder": str(folder), "env": self._env, "out": str(out), "err": str(err)}
        self._server.stdin.write(f"{json.dumps(asked)}\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


def _serve() -> None:
    import workers.app  # noqa: F401

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _become(**json.loads(line))
            sys.exit()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _become(*, words: list[str], folder: str, env: dict[str, str], out: str, err: str) -> Any:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for opened, number in ((os.open(os.devnull, os.O_RDONLY), 0), (os.open(out, flags), 1), (os.open(err, flags), 2)):
        os.dup2(opened, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()
