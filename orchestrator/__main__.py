"""`python -m orchestrator`."""

import sys

from lorafleet.service.process import lean_imports

with lean_imports():
    from lorafleet.http_server import serve
    from lorafleet.keys.key_files import KeyFileError
    from lorafleet.kube.errors import KubeConfigError
    from lorafleet.service.network.urls import has_database_password
    from lorafleet.service.settings import load_or_exit
    from lorafleet.telemetry import logs
    from orchestrator.app import main
    from orchestrator.config import OrchestratorSettings
    from orchestrator.core.errors import OrchestratorUnavailable, StoreError

PROG = "python -m orchestrator"
_SEEN = (
    "every user sees a password on a command line; give the address in LORAFLEET_ORCHESTRATOR_STORE or in the file that"
    " --store-file names, or the password in PGPASSWORD or the file that PGPASSFILE names"
)


def run() -> None:
    """Serve with the settings of command line and environment. If it cannot start: one line on stderr, SystemExit 2."""
    if any(map(has_database_password, sys.argv[1:])):
        print(f"{PROG}: {_SEEN}", file=sys.stderr)  # noqa: T201  (the process could not start)
        raise SystemExit(2)
    settings = load_or_exit(OrchestratorSettings, sys.argv[1:], prog=PROG)
    logs.configure("orchestrator", log_format=settings.log_format, level=settings.log_level)
    try:
        serve.run(lambda: main(settings))
    except (StoreError, OrchestratorUnavailable, KeyFileError, KubeConfigError, OSError) as exc:
        print(f"{PROG}: {exc}", file=sys.stderr)  # noqa: T201  (the process could not start)
        raise SystemExit(2) from exc


if __name__ == "__main__":
    run()
