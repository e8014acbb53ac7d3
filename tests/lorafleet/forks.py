"""Starts services as forks of a process that has imported them all, to test how they end.

    with Forks() as forks:
        ended = forks.run("router", "--port", "80", folder=tmp_path)

A new process takes a second of CPU for its imports, a fork almost none.
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
    """The forking process; it has one thread, as forking requires."""

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
        """The result of `python -m WORDS` in this folder, without settings in the environment."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        out, err = (Path(self._folder.name) / name for name in ("out", "err"))
        request = {"words": words, "folder": str(folder), "env": self._env, "out": str(out), "err": str(err)}
        self._server.stdin.write(f"{json.dumps(request)}\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


def _serve() -> None:
    import workers.app  # noqa: F401

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _run_module(**json.loads(line))
            sys.exit()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _run_module(*, words: list[str], folder: str, env: dict[str, str], out: str, err: str) -> Any:
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
