"""`lorafleet up`: checks before the start, the lock of the state folder, and signal handling."""

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import KeyFileError
from lorafleet.local import adapter_folders, commands
from lorafleet.local.fleet import LocalFleet
from lorafleet.local.options import FleetOptions
from lorafleet.service.failure import CommandFailed
from lorafleet.service.files import make_private_folder
from lorafleet.service.process import stop_signals


def run_fleet(options: FleetOptions) -> int:
    """Start the fleet, run until a signal, stop it; returns the exit status. Raises CommandFailed."""
    require_startable(options)
    with _lock_state_dir(options.state_dir):
        return asyncio.run(_run_until_signal(options))


def is_installed(module: str) -> bool:
    """Whether a Python module can be imported."""
    return importlib.util.find_spec(module) is not None


def require_startable(options: FleetOptions, *, has: Callable[[str], bool] = is_installed) -> None:
    """Raise CommandFailed for options that cannot work. `has` reports whether a module can be imported."""
    if options.engine == "vllm" and not has("vllm"):
        raise CommandFailed(
            "vLLM is not installed in this environment: `make install`, or see docs/quickstart.md for the pip commands"
            " (or try `--engine sim`, a simulator that needs no vLLM)"
        )
    if options.engine == "sglang" and not has("sglang"):
        raise CommandFailed(
            "SGLang is not installed in this environment: `pip install sglang`, on a machine with a GPU"
        )
    if options.engine == "sgl-jax" and not has("sgl_jax"):
        raise CommandFailed(
            "sgl-jax is not installed in this environment: install sglang-jax from its repository, with JAX for this"
            " machine's device (docs/engines.md)"
        )
    if options.model is None and not (has("numpy") and has("safetensors")):
        raise CommandFailed(
            "creating the tiny demo model needs numpy and safetensors, which are not both installed:"
            " pip install 'lorafleet[demo]', or give the folder of a model with --model"
        )
    for flag, port in (("--router-port", options.router_port), ("--orchestrator-port", options.orchestrator_port)):
        _require_free(flag, port)
    if options.router_port and options.router_port == options.orchestrator_port:
        raise CommandFailed(f"--router-port and --orchestrator-port are both {options.router_port}", status=2)
    if options.model is not None and not (options.model / "config.json").is_file():
        raise CommandFailed(f"--model {options.model}: no config.json there; {_model_hint(options.model)}", status=2)
    if options.adapters is not None and (wrong := adapter_folders.folder_problem(options.adapters)):
        raise CommandFailed(f"--adapters {options.adapters}: {wrong}", status=2)
    if options.key_file is not None:
        try:
            ApiKeys([options.key_file])
        except KeyFileError as exc:
            raise CommandFailed(f"--key-file: {exc}", status=2) from exc


def _model_hint(model: Path) -> str:
    """What to give in place of a folder without a model. A missing path of two parts is taken for a hub name."""
    if len(model.parts) == 2 and not model.exists():
        return f"give the folder of a Hugging Face model; `hf download {model}` fetches one of that name and prints it"
    return "give the folder of a Hugging Face model"


def _require_free(flag: str, port: int) -> None:
    """Raise CommandFailed if the port cannot be bound on loopback; 0 means any port and is not checked."""
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((commands.LOOPBACK, port))
        except OSError as exc:
            why = "is in use" if exc.errno == errno.EADDRINUSE else f"cannot be used ({exc.strerror})"
            raise CommandFailed(
                f"port {port} {why}: choose another with {flag} (0 picks a free one)", status=2
            ) from exc


@contextlib.contextmanager
def _lock_state_dir(state_dir: Path) -> Iterator[None]:
    """Create the state folder and hold its lock, which one `lorafleet up` may have; raises CommandFailed."""
    try:
        make_private_folder(state_dir)  # store and logs
        handle = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise CommandFailed(
            f"--state-dir {state_dir}: {exc.strerror}; name a folder that can be created and written", status=2
        ) from exc
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.read(handle, 20).decode(errors="replace").strip() or "?"
            raise CommandFailed(
                f"another `lorafleet up` (process {holder}) uses {state_dir}:"
                " stop it, or give --state-dir another folder"
            ) from exc
        with contextlib.suppress(OSError):  # a full disk: the next write reports it
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        os.close(handle)


async def _run_until_signal(options: FleetOptions) -> int:
    """Run the fleet until it ends or a signal comes, and stop it; 0, or 130 if stopped before it was ready.

    A second signal kills the fleet and ends this process at once.
    """
    stopping = asyncio.Event()
    fleet = LocalFleet(options)
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        """Stop the fleet in order; at a second signal kill it and exit with 130."""
        if stopping.is_set():  # a second signal: kill at once
            fleet.kill_and_wait()
            os._exit(130)
        stopping.set()

    for number in stop_signals():
        loop.add_signal_handler(number, on_signal)
    try:
        live = asyncio.create_task(fleet.run_until_cancelled())
        signalled = asyncio.create_task(stopping.wait())
        await asyncio.wait({live, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if live.done():
            live.result()
            return 0
        live.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await live
        return 0 if fleet.is_ready else 130
    finally:
        await fleet.stop()
