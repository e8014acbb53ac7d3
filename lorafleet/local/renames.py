"""`lorafleet adapters rename-modules`: renames an adapter's modules in a folder of this machine."""

from pathlib import Path

from lorafleet.service.failure import CommandFailed
from workers.core.errors import SourceError
from workers.engines.vllm_tables import vllm_facts
from workers.verification.rename import rename_modules


def rename(folder: Path, out: Path, base: Path | None, language: str | None) -> list[str]:
    """Write the renamed adapter; returns what was done, a line each. Raises CommandFailed, and then writes nothing.

    language  whose names the language model gets; None: those that the engine finds
    """
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
