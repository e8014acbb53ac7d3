"""Which signals stop a process in order."""

import signal


def stopping() -> list[signal.Signals]:
    """SIGTERM, Ctrl-C and a terminal's hang-up; under nohup, which has that ignored, the first two."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_deaf else [signal.SIGHUP])]
