"""The Helm chart of this version: in the wheel as package data, in a checkout at `helm/lorafleet`."""

import shutil
from pathlib import Path

from lorafleet.service.failure import CommandFailed

_PACKAGE = Path(__file__).parents[1]


def chart_folder() -> Path:
    """The chart's folder; not to be written to."""
    packaged = _PACKAGE / "chart"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "helm" / "lorafleet"


def save_chart(folder: Path) -> None:
    """Copy the chart to the folder, in place of another version of the chart there.

    Raises CommandFailed for a folder that has something else, or that cannot be written.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise CommandFailed(f"{folder} is a file; name a folder for the chart")
        if folder.is_dir() and any(folder.iterdir()):
            if not _is_our_chart(folder):
                raise CommandFailed(f"{folder} has other files than a chart of lorafleet; name a new folder")
            shutil.rmtree(folder)
        shutil.copytree(chart_folder(), folder, dirs_exist_ok=True)
    except OSError as exc:
        raise CommandFailed(f"{folder}: {exc.strerror}; name a folder that you may write to") from exc


def _is_our_chart(folder: Path) -> bool:
    """Whether the folder has a chart of lorafleet, of any version."""
    try:
        return "name: lorafleet" in (folder / "Chart.yaml").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
