"""The signals that stop a process in order."""

import signal


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT and SIGHUP; without SIGHUP under nohup, which ignores it."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignores_hangup else [signal.SIGHUP])]
