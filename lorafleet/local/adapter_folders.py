"""Finds adapters below one folder, and folders that look like adapters but are none."""

import os
from pathlib import Path

from workers.verification.adapter_files import WEIGHTS_NAME, unread_weights
from workers.verification.peft import CONFIG_NAME

_MOST_NAMED = 5


def adapter_folders(root: Path) -> dict[str, Path]:
    """lora_id (the path below `root`) -> absolute folder, for every folder with an adapter_config.json."""
    found = sorted(path.parent for path in root.resolve().rglob(CONFIG_NAME))
    return {folder.relative_to(root.resolve()).as_posix(): folder for folder in found if folder != root.resolve()}


def linked_folders(root: Path) -> list[Path]:
    """Links to folders with adapters, at any depth below `root`; `adapter_folders` leaves them out."""
    found = [Path(folder, name) for folder, names, _ in os.walk(root) for name in names]
    return sorted(path for path in found if path.is_symlink() and next(path.rglob(CONFIG_NAME), None))


def folder_problem(root: Path) -> str:
    """Why `root` cannot be a folder of adapters, and what to give instead; empty if it can."""
    if not root.exists():
        return "no such folder; give one with a folder for each adapter in it"
    if not root.is_dir():
        return "is a file; give a folder with a folder for each adapter in it"
    if (root / CONFIG_NAME).is_file() and not adapter_folders(root):
        whole = root.resolve()
        return (
            f"is one adapter itself ({CONFIG_NAME} is in it); give the folder that it lies in:"
            f" --adapters {whole.parent}, where its name is {whole.name}"
        )
    return ""


def folder_notices(root: Path) -> list[str]:
    """Search `root`: a line for each entry that looks like an adapter but is none, and one if there are no adapters."""
    lines = [
        f"{link} is a link and is left out, as workers do not follow links; put the folder itself there"
        for link in linked_folders(root)
    ]
    if not adapter_folders(root):
        lines.append(
            f"{root} has no adapters: it needs a folder for each, with {CONFIG_NAME} and {WEIGHTS_NAME} in it."
            f" Put it there and start again, or register it meanwhile: lorafleet adapters add NAME {root}/NAME"
        )
    elif (root / CONFIG_NAME).is_file():
        lines.append(
            f"{root} is an adapter itself and is left out: an adapter's name is its path below that folder;"
            " move its files into a folder of their own there"
        )
    unread = _unread_folders(root)
    lines += [f"{folder} is left out: {what}" for folder, what in unread[:_MOST_NAMED]]
    if more := unread[_MOST_NAMED:]:
        lines.append(f"{len(more)} more folders have weights that no engine reads as an adapter, and are left out")
    return lines


def _unread_folders(root: Path) -> list[tuple[Path, str]]:
    """(folder, what its weights are) at or below `root`, for weights without an adapter_config.json.

    Folders below such a folder, and below an adapter, are parts of it.
    """
    found = []
    for path, folders, names in os.walk(root):
        folders.sort()
        is_adapter = CONFIG_NAME in names
        what = "" if is_adapter else unread_weights(names, folders)
        if what:
            found.append((Path(path), what))
        if what or (is_adapter and Path(path) != root):
            folders[:] = [name for name in folders if next(Path(path, name).rglob(CONFIG_NAME), None)]
    return found
