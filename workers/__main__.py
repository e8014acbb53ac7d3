"""`python -m workers [flags] [-- engine command...]`."""

import os
import sys

from lorafleet.service.process import lean_imports

with lean_imports():
    from lorafleet.http_server import serve
    from lorafleet.keys.key_files import KeyFileError
    from lorafleet.service.settings import SettingsError, load_or_exit
    from lorafleet.telemetry import logs
    from workers.app import main
    from workers.config import WorkerSettings
    from workers.engines.command import CommandError, settings_from_command

PROG = "python -m workers"


def run() -> None:
    """Run the agent until SIGTERM; exits with status 2 and one line on stderr if it cannot start."""
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    settings = load_or_exit(WorkerSettings, arguments[:cut], prog=PROG)
    writer = logs.configure("worker", log_format=settings.log_format, level=settings.log_level)
    own_command = arguments[cut + 1 :]
    try:
        agreed = settings_from_command(settings, own_command, os.environ)
        serve.run(lambda: main(agreed, own_command, log_lines=writer.recent))
    except (CommandError, KeyFileError, SettingsError, OSError) as exc:
        print(f"{PROG}: {exc}", file=sys.stderr)  # noqa: T201  (the process could not start)
        raise SystemExit(2) from exc


if __name__ == "__main__":
    run()
