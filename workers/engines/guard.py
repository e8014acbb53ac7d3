"""Runs a command and kills its process group when the agent ends: `python guard.py PID_FILE COMMAND...`.

The guard leads the process group and reads a pipe whose other end only the agent has. When the pipe closes, it kills
the group, because vLLM 0.32's EngineCore does not notice that its parent has died. SIGTERM is passed to the command
only, which then drains. Standard library only, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command and return its exit status, or 128 + n after signal n."""
    libc = ctypes.CDLL(None)

    def die_with_guard() -> None:
        """Have the kernel kill the command when the guard ends."""
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, preexec_fn=die_with_guard)  # noqa: PLW1509, S603
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with open(sys.argv[1], "w", encoding="ascii") as file:  # noqa: PTH123  (pathlib costs start-up time)
            file.write(str(child.pid))
    except OSError as exc:  # for example a full disk; the engine runs without a PID file
        sys.stderr.write(f"{sys.argv[1]}: {exc}\n")
    threading.Thread(target=_kill_group_when_agent_ends, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _kill_group_when_agent_ends() -> None:
    """Block until the agent's end of the pipe closes, then kill the process group."""
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
