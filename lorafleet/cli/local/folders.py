"""`lorafleet adapters push`, `certify` and `rename-modules`: an adapter's folder on this machine."""

# ruff: noqa: PLC0415, PLR0917  (imports of httpx wait until the command needs them; Typer passes by name)

import json
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from lorafleet.cli.context import named_tenants
from lorafleet.service.failure import CommandFailed, printable

if TYPE_CHECKING:
    from lorafleet.client import Published, Pushed, PushProgress

_QUIET_S = 1.0  # an upload that takes less shows no progress
_LINE_S = 5.0  # between two lines where the output is not a terminal


class DtypeName(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LanguageName(StrEnum):
    text = "text"
    wrapped = "wrapped"
    idefics = "idefics"
    outer = "outer"
    automodel = "automodel"


def adapters_certify(
    folder: Annotated[Path, typer.Argument(help="folder with adapter_config.json and adapter_model.safetensors")],
    base: Annotated[str, typer.Option(help="the base model's folder, or its name on the hub")],
    dtype: Annotated[DtypeName, typer.Option(help="of the computation; auto: the base model's own")] = DtypeName.auto,
    device: Annotated[str, typer.Option(help="such as cuda:0")] = "cpu",
    prompts: Annotated[
        Path | None, typer.Option(help="a file with token ids, a JSON list a line; default: the adapter writes three")
    ] = None,
) -> None:
    """Write an acceptance file into an adapter's folder, by transformers and PEFT, which must be installed here.

    Engines that load the adapter are compared with it: docs/acceptance.md.

    Examples:

      lorafleet adapters certify ./sql-expert-v2 --base ./Qwen2.5-7B-Instruct --dtype bfloat16
    """
    from lorafleet.client import FleetError
    from lorafleet.client.certify import certify_folder

    given = None if prompts is None else _prompts_in(prompts)
    try:
        path = certify_folder(folder, base, given, dtype=dtype.value, device=device)
    except FleetError as exc:
        raise CommandFailed(printable(str(exc))) from exc
    typer.echo(f"{path}: compared with each engine that loads the adapter")


def _prompts_in(path: Path) -> list[list[int]]:
    """The lists of token ids in a file, one a line. Raises CommandFailed."""
    try:
        return [list(map(int, json.loads(line))) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError, TypeError) as exc:
        raise CommandFailed(f"{path}: {exc}; expected a JSON list of token ids a line", status=2) from exc


def adapters_push(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="folder with adapter_config.json and adapter_model.safetensors")],
    name: Annotated[str, typer.Argument(help="new lora_id, such as sql-expert/v2; with --publish a published name")],
    publish: Annotated[
        bool, typer.Option("--publish", help="make it the next version of the name, ready on its workers")
    ] = False,
    digest: Annotated[str | None, typer.Option(help="that the folder must have; nothing else is sent")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="its name in the fleet; default: as in the adapter's config")
    ] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="tenant that may use it; repeat; default: everyone")] = None,
    expected_version: Annotated[
        int | None,
        typer.Option(min=0, help="with --publish: the version that the name must be at now; 0: the name must be new"),
    ] = None,
) -> None:
    """Upload an adapter from this machine, and register it. A broken upload goes on where it was.

    The workers need no access to the folder. Repeating the command sends nothing.

    Examples:

      lorafleet adapters push ./sql-expert-v2 sql-expert/v2

      lorafleet adapters push ./checkpoint-7 rollout-policy --publish

      lorafleet adapters push ./checkpoint-7 rollout-policy --publish --expected-version 6
    """
    from lorafleet.client import FleetError

    if publish and (tenant or digest):
        raise CommandFailed("--publish takes neither --tenant nor --digest: a name's versions are its key's", status=2)
    if expected_version is not None and not publish:
        raise CommandFailed("--expected-version is for --publish: an adapter's bytes never change", status=2)
    tenants = tuple(named_tenants(tenant) or ())
    shown = _ProgressLine(name, sys.stderr)
    try:
        with context.obj.fleet() as fleet:
            if publish:
                published = fleet.publish(
                    name,
                    folder,
                    base_model=base_model,
                    expected_version=expected_version,
                    on_progress=shown.update,
                )
                _say_published(published)
            else:
                pushed = fleet.push(
                    name, folder, digest=digest, base_model=base_model, tenants=tenants, on_progress=shown.update
                )
                _say_pushed(pushed)
    except FleetError as exc:
        raise CommandFailed(_with_hint(exc, name)) from exc
    finally:
        shown.end()


class _ProgressLine:
    """The progress of an upload that takes over a second: one line on a terminal, else a line every few seconds."""

    def __init__(self, name: str, out: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._out = out
        self._clock = clock
        self._began = self._shown_at = clock()
        self._is_shown = False

    def update(self, progress: "PushProgress") -> None:
        """Show the bytes sent so far, if it is time."""
        now = self._clock()
        is_live = self._out.isatty()
        if now - self._began < _QUIET_S or (not is_live and self._is_shown and now - self._shown_at < _LINE_S):
            return
        sent, total = progress.sent_bytes / 1e6, progress.total_bytes / 1e6
        what = f"{printable(self._name)}: {sent:.0f} of {total:.0f} MB sent"
        self._out.write(f"\r\x1b[K{what}" if is_live else f"{what}\n")
        self._out.flush()
        self._is_shown, self._shown_at = True, now

    def end(self) -> None:
        """Leave the line, on a terminal."""
        if self._is_shown and self._out.isatty():
            self._out.write("\n")


def _say_pushed(pushed: "Pushed") -> None:
    """Print what was registered, and the next step."""
    state = "is registered" if pushed.is_new else "was registered already, with these very bytes"
    where = f", kept on {', '.join(pushed.kept_on)}" if pushed.kept_on else ""
    typer.echo(f"{pushed.lora_id} {state}{where}; digest {pushed.digest[:12]}")
    if pushed.note and pushed.is_new:
        typer.echo(f"  {pushed.note}", err=True)
    typer.echo(f"  see: lorafleet adapters show {pushed.lora_id}")


def _say_published(published: "Published") -> None:
    """Print what the name points at, and the next step."""
    state = "points at" if published.is_new else "had these very bytes:"
    where = f", ready on {', '.join(published.workers)}" if published.workers else ""
    typer.echo(f"{published.name} {state} {published.lora_id}{where}; digest {published.digest[:12]}")
    typer.echo(f'  ask it: the model "{published.name}" at any router')


def _with_hint(exc: Exception, name: str) -> str:
    """The error's message, with what to do next."""
    from lorafleet.client import FleetError

    assert isinstance(exc, FleetError)
    hints = {
        "immutable": f"; or let the fleet count: lorafleet adapters push DIR {name.partition('/')[0]} --publish",
        "invalid_api_key": " (give --token KEY, or LORAFLEET_TOKEN)",
        "scope_missing": " (use a key with scope register)",
        "version_conflict": f"; see: lorafleet published show {name}",
        "upload_too_large": "; raise max_upload_bytes at the orchestrator, max_adapter_bytes at the workers",
    }
    again = "; repeat the command: it goes on where it was" if (exc.status or 0) >= 500 else ""
    return printable(str(exc)) + hints.get(exc.code, again)


def adapters_rename_modules(
    folder: Annotated[Path, typer.Argument(help="the adapter's folder; it is only read")],
    out: Annotated[Path, typer.Argument(help="a new folder for the renamed adapter")],
    base: Annotated[
        Path | None,
        typer.Option(help="folder of the base model that will serve it; without it only wrappers are removed"),
    ] = None,
    to: Annotated[
        LanguageName | None,
        typer.Option(help="whose names its language model gets; default: the ones that the engine finds"),
    ] = None,
) -> None:
    """Write an adapter under module names that its base model has. Its weights stay byte for byte.

    Renamed are a doubled prefix, names of compiled or wrapped models, the adapter's name in tensors' names, and the
    place of the language model: `text` (AutoModelForCausalLM), `wrapped` (AutoModelForImageTextToText), `idefics`
    (Idefics3, SmolVLM), `outer` (transformers 4), `automodel` (AutoModel). Anything else is refused: such an adapter
    needs another base model, or another training.

    Examples:

      lorafleet adapters rename-modules ./sql ./sql-renamed --base ./gemma-3-4b-it

      lorafleet adapters rename-modules ./sql ./sql-renamed
    """
    for line in rename(folder, out, base, to and to.value):
        typer.echo(line)


def rename(folder: Path, out: Path, base: Path | None, language: str | None) -> list[str]:
    """Write the renamed adapter; returns what was done, a line each. Raises CommandFailed, and then writes nothing.

    language  whose names the language model gets; None: those that the engine finds
    """
    from workers.core.errors import SourceError
    from workers.engines.vllm_tables import vllm_facts
    from workers.verification.renames import rename_modules

    for name, path in (("FOLDER", folder), ("--base", base)):
        if path is not None and not path.is_dir():
            raise CommandFailed(f"{name} {path}: no such folder", status=2)
    if language is not None and base is None:
        raise CommandFailed("--to needs --base: only its modules show that the new names are right", status=2)
    try:
        plan = rename_modules(folder, out, base=base, facts=vllm_facts(()), language=language)
    except SourceError as exc:
        raise CommandFailed(f"{folder}: {exc.code}: {exc}") from exc
    except OSError as exc:
        raise CommandFailed(f"{folder}: {exc}") from exc
    if not plan.steps:
        return [f"{folder} has the names already; {out} is a copy of its two files"]
    return [*plan.steps, f"{out} is a new adapter, with a digest of its own: register it under a new lora_id"]
