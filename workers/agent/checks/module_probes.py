"""Measures what the engine does with adapters on each kind of module, by a small adapter of its own for each kind.

The answers with and without such an adapter are compared. That needs no plugin and no hooks, so it holds for compiled
models and CUDA graphs as well, and it goes before what the table of model classes says. It is done while the engine is
idle, once for each version, base model and command, and kept in the state folder.
"""

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter

from lorafleet.engine.canary import BaseReadings, Outcome, run_canary
from lorafleet.engine.probe_adapters import PROBE_PREFIX, write_probe
from lorafleet.service.files import write_atomically
from workers.agent.current_engine import CurrentEngine
from workers.config import WorkerSettings
from workers.core.errors import EngineError
from workers.engines.base import EngineClient
from workers.verification.base_model import BaseModel, is_in_tower
from workers.verification.engine_modules import module_name_pattern
from workers.verification.tensors import Shape
from workers.wire import NOTHING_MEASURED, MeasuredModules, ProbeOutcome

log = structlog.get_logger()

_FILE, _FOLDER = "measured_modules.json", "probe"
_MOST_KINDS = 64
_MOST_KEPT = 8
"""Tables in the file: of the last engines of this worker."""
_OUTCOMES: Mapping[Outcome, ProbeOutcome] = {"seen": "works", "none": "no effect", "unknown": "unknown"}
_TABLES = TypeAdapter(dict[str, MeasuredModules])


def probe_kinds(base: BaseModel) -> dict[str, dict[str, Shape]]:
    """Kind of module -> the modules of it that its probe adapts, the first and the last one, with their shapes.

    Not those of towers, which a prompt of text does not reach, nor experts. A class that is in no table may also find
    the names of `AutoModel`.
    """
    kinds: dict[str, list[str]] = {}
    for module, shape in base.shapes.items():
        if len(shape) == 2 and ".experts" not in module and not is_in_tower(module):
            kinds.setdefault(module_name_pattern(module), []).append(module)
    found = {kind: {name: base.shapes[name] for name in (names[0], names[-1])} for kind, names in kinds.items()}
    if base.engine is None or base.engine.model_class.modules is None:
        for kind, modules in list(found.items()):
            if kind.startswith("model.") and ".layers." in f".{kind}":
                short = {name.removeprefix("model."): shape for name, shape in modules.items()}
                found[kind.removeprefix("model.")] = short
    return dict(list(found.items())[:_MOST_KINDS])


class ModuleProbes:
    """The measured table of the engine in use. The event loop is the only writer."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: CurrentEngine,
        *,
        command: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`command` is a digest of the engine's command and environment; "": not known, as of an attached engine."""
        self._settings = settings
        self._engine = engine
        self._command = command
        self._clock = clock
        self._file = settings.state / _FILE
        self._kinds: dict[str, dict[str, Shape]] = {}
        self._readings = BaseReadings()
        self.table: MeasuredModules | None = None

    async def begin(self, base: BaseModel | None) -> None:
        """Take what was measured of such an engine before; kinds that are not in it are left to be measured."""
        self.table, self._kinds = None, {}
        if base is None or not self._is_wanted or not self._can_run(base):
            return
        flags = await asyncio.to_thread(self._flags)
        tables = await asyncio.to_thread(self._read)
        self._kinds = probe_kinds(base)
        empty = MeasuredModules(engine_version=self._engine.version, flags=flags)
        known = tables.get(flags, empty)
        outcomes = {kind: outcome for kind, outcome in known.outcomes.items() if kind in self._kinds}
        self.table = replace(known, outcomes=outcomes, pending=len(self._kinds) - len(outcomes))

    def decided(self) -> MeasuredModules:
        """What counts for adapters: the table once all kinds are measured, and empty before.

        Where no kind works, the probes may not have been seen at all: the engine cannot read this disk, for example.
        """
        if self.table is None or self.table.pending or "works" not in self.table.outcomes.values():
            return NOTHING_MEASURED
        return self.table

    @property
    def _is_wanted(self) -> bool:
        """Whether this engine is to be measured, by the setting."""
        chosen = self._settings.probe_modules
        return chosen == "always" or (chosen == "auto" and self._settings.engine == "vllm")

    def _can_run(self, base: BaseModel) -> bool:
        """Whether the engine survives an adapter: vLLM's kernels of experts need a GPU, and end it without one."""
        devices = {report.device for report in self._engine.reports}
        return not base.has_experts or (bool(devices) and "cpu" not in devices)

    def next_kind(self) -> str | None:
        """The next kind to be measured; None if all are, or the engine has requests or is not trusted."""
        if self.table is None or not self.table.pending or not self._engine.is_idle or self._engine.suspicion:
            return None
        return next(kind for kind in self._kinds if kind not in self.table.outcomes)

    async def measure(self, client: EngineClient, kind: str) -> MeasuredModules:
        """Load the kind's probe, compare the answers with and without it, unload it; returns the table with it.

        The kind is written down as unknown before: if it ends the engine, it is not tried again.

        raises  EngineError if the engine fails
        """
        assert self.table is not None
        began_at = self._clock()
        failed = self._with_outcome(kind, "unknown", 0.0)
        await self._try_write(failed)
        name = f"{PROBE_PREFIX}{hashlib.sha256(kind.encode()).hexdigest()[:12]}"
        folder = self._settings.state / _FOLDER / name
        await asyncio.to_thread(write_probe, folder, self._kinds[kind])
        try:
            outcome = await self._outcome_of(client, name, folder)
        except EngineError:
            self.table = failed
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        measured = self.table = self._with_outcome(kind, outcome, self._clock() - began_at)
        await self._try_write(measured)
        log.info("kind of module measured", kind=kind, outcome=outcome, pending=measured.pending)
        return measured

    async def _outcome_of(self, client: EngineClient, name: str, folder: Path) -> ProbeOutcome:
        """What the engine does with the probe in a folder. Raises EngineError."""
        timeout_s = self._settings.load_deadline_s
        try:
            await client.load(name, folder, timeout_s=timeout_s)
        except EngineError as exc:
            if exc.code != "adapter_refused":
                raise
            return "refused"
        self._readings = self._readings.of_boot(self._engine.boot_id)
        try:
            result = await run_canary(
                partial(client.fingerprint, base_model=self._engine.model_card().name),
                name,
                readings=self._readings,
                timeout_s=self._settings.load_deadline_s,
            )
        finally:
            await client.unload(name, timeout_s=timeout_s)
        return _OUTCOMES[result.outcome]

    def _with_outcome(self, kind: str, outcome: ProbeOutcome, seconds: float) -> MeasuredModules:
        """The table with one more outcome."""
        assert self.table is not None
        outcomes = {**self.table.outcomes, kind: outcome}
        pending = sum(each not in outcomes for each in self._kinds)
        return replace(self.table, outcomes=outcomes, pending=pending, seconds=round(self.table.seconds + seconds, 3))

    async def _try_write(self, table: MeasuredModules) -> None:
        """Write the table into the state folder; an error of the disk is logged."""
        try:
            await asyncio.to_thread(self._write, table)
        except OSError as exc:
            log.warning("measured modules not kept", file=str(self._file), error=str(exc))

    def _write(self, table: MeasuredModules) -> None:
        """Write the table beside those of other engines, the oldest of which are dropped. Raises OSError."""
        others = {flags: each for flags, each in self._read().items() if flags != table.flags}
        kept = dict([*others.items(), (table.flags, table)][-_MOST_KEPT:])
        write_atomically(self._file, json.dumps({flags: asdict(each) for flags, each in kept.items()}).encode())

    def _read(self) -> dict[str, MeasuredModules]:
        """The tables in the state folder; none if they cannot be read, so that everything is measured again."""
        try:
            return _TABLES.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as exc:
            log.warning("measured modules cannot be read", file=str(self._file), error=str(exc))
            return {}

    def _flags(self) -> str:
        """A digest of what decides about modules: version, base model, command, device. Blocking.

        Of an engine that was not started here the command is not known, so its start counts in its place.
        """
        engine = self._engine
        try:
            config = (Path(self._settings.model) / "config.json").read_text()
        except OSError:
            config = ""
        parts: list[Any] = [engine.version, self._settings.model, config, self._command or engine.boot_id]
        parts += sorted((report.punica, report.device) for report in engine.reports)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def command_digest(words: tuple[str, ...]) -> str:
    """A digest of the words of an engine's command, and of vLLM's variables in this process's environment."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("VLLM_"))
    return hashlib.sha256(json.dumps([words, variables]).encode()).hexdigest()
