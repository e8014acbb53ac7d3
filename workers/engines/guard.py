"""Runs one command and sees that nothing of it outlives the agent: `python guard.py PID_FILE COMMAND...`.

It leads the command's process group and reads a pipe that only the agent holds the other end of. When that closes,
however the agent ended, it kills the whole group: vLLM's EngineCore is a child that does not notice its parent's
death by itself (vLLM 0.32, no death watch in v1/engine/core.py). SIGTERM goes on to the command alone, which knows how
to drain. Standard library only: it starts in milliseconds.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """The command's exit status, 128 + n for signal n as shells have it."""
    libc = ctypes.CDLL(None)

    def die_with_guard() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, preexec_fn=die_with_guard)  # noqa: PLW1509, S603
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with open(sys.argv[1], "w", encoding="ascii") as file:  # noqa: PTH123  (pathlib costs start-up time)
            file.write(str(child.pid))
    except OSError as exc:  # a full disk: whoever looks for the number finds none
        sys.stderr.write(f"{sys.argv[1]}: {exc}\n")
    threading.Thread(target=_kill_when_alone, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _kill_when_alone() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
