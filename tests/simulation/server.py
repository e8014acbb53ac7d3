"""Runs simulated tests: imports everything once, and forks for each test, because a run uses its process up.

pytest's side is `server_process.py`. A test's module is imported here anew, with simulated time and chance, and its
assertions say what they compared.
"""

import ast
import asyncio
import os
import shutil
import sys
import traceback
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts

from tests.simulation.determinism import Replaced
from tests.simulation.fleet import Simulation
from tests.simulation.nodes import Node
from tests.simulation.run import prepare
from tests.simulation.server_process import SimulatedTest, TestEnd

_LONGEST_S = 4 * 3600.0
"""The longest that a test takes, in the fleet's time: it waits for something that never comes."""
_SEED = 1
_MOST_LINES = 3000
_HOST = "10.0.3.1"


def serve(asks: Connection, replaced: Replaced, *, model: Path, base: Path) -> None:
    """Run the test that each call names, until the other end is closed."""
    modules: dict[Path, ModuleType] = {}
    while True:
        try:
            test: SimulatedTest = asks.recv()
        except EOFError:
            return
        try:
            if test.file not in modules:
                modules[test.file] = _import(test.file)
            function = getattr(modules[test.file], test.name)
        except BaseException:  # noqa: BLE001  (handed to pytest)
            asks.send(0)
            asks.send(TestEnd(traceback.format_exc()))
            continue
        child = os.fork()
        if child == 0:
            _run(asks, function, test, replaced, model=model, folder=base / f"run-{os.getpid()}")
        _, status = os.waitpid(child, 0)
        if status:
            asks.send(TestEnd(f"the test's process ended with status {status}"))


def _import(file: Path) -> ModuleType:
    """A test's module, with assertions as pytest rewrites them."""
    source = file.read_bytes()
    tree = ast.parse(source, filename=str(file))
    rewrite_asserts(tree, source, str(file))
    module = ModuleType(f"{__package__}.{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(tree, str(file), "exec"), module.__dict__)
    return module


def _run(
    asks: Connection, function: Any, test: SimulatedTest, replaced: Replaced, *, model: Path, folder: Path
) -> None:
    """Run the test in this process, send how it ended, and end."""
    lines: deque[str] = deque(maxlen=_MOST_LINES)
    failure = ""
    asks.send(os.getpid())
    try:
        prepared = prepare(_SEED, replaced, folder=folder, show=lines.append)
        node = Node(prepared.loop, "test", _HOST)
        simulation = Simulation(prepared.loop, prepared.bus, node, model=model, folder=folder)

        async def main(_node: Node) -> None:
            async with asyncio.timeout(_LONGEST_S):
                await function(simulation=simulation, **test.arguments)

        node.start(main)
        assert node.main is not None
        prepared.loop.run_until_complete(node.main)
    except asyncio.CancelledError:
        failure = f"a process ended by itself: {simulation.surprise}"
    except BaseException:  # noqa: BLE001  (handed to pytest)
        failure = traceback.format_exc()
    if failure:
        failure += f"\nat {replaced.clock.now:.6f} of the log's clock, with seed {_SEED}"
    shutil.rmtree(folder, ignore_errors=True)
    asks.send(TestEnd(failure, "\n".join(lines) if failure else ""))
    os._exit(0)
