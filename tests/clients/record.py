"""Record what programs send: `python -P -m tests.clients.record PACKAGES [PROGRAM...]`.

PACKAGES is a folder with an environment for each program: `python-NAME` (a virtual environment) or `node-NAME` (with
node_modules). docs/clients.md says which packages go into each. The programs talk to a stub on loopback alone.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients import recording
from tests.clients.stub import MODEL, RecordingStub
from tests.serving import serving

PROGRAMS = Path(__file__).parent / "programs"
_LIMIT_S = 400


async def record(program: str, packages: Path) -> str:
    """Run one program against a stub, and write its recording; what became of it, in a line."""
    script = next(PROGRAMS.glob(f"{program}.*"))
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "work" / "notes.txt"
        notes.parent.mkdir()
        notes.write_text("The key is under the mat.\n")
        stub = RecordingStub(str(notes))
        async with serving(stub.app) as url:
            kind = "node" if script.suffix == ".mjs" else "python"
            home = packages / f"{kind}-{program}"
            command = (
                ["node", str(home / "driver.mjs")]
                if kind == "node"
                else [str(home / "bin" / "python"), "-P", str(script)]
            )
            if kind == "node":
                (home / "driver.mjs").write_text(script.read_text())
            environment = {
                "HOME": folder, "PATH": f"{home / 'bin'}:{home / 'node_modules' / '.bin'}:{os.environ['PATH']}",
                "STUB": url, "MODEL": MODEL, "WORK": str(notes.parent), "NO_PROXY": "*", "DO_NOT_TRACK": "1",
                "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                *command, cwd=notes.parent, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                output, _ = await asyncio.wait_for(process.communicate(), _LIMIT_S)
            finally:
                if process.returncode is None:
                    process.kill()
    lines = output.decode(errors="replace").splitlines()
    version = next((line.removeprefix("version ") for line in lines if line.startswith("version ")), "")
    if process.returncode or not version:
        return f"{program}: not recorded, exit {process.returncode}\n" + "\n".join(lines[-30:])
    target = recording.write(program, version, stub.calls, MODEL)
    return f"{program} {version}: {len(stub.calls)} requests, {target.stat().st_size} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("programs", nargs="*", default=sorted(path.stem for path in PROGRAMS.glob("*.*")))
    args = parser.parse_args()
    for program in args.programs:
        sys.stdout.write(f"{asyncio.run(record(program, args.packages))}\n")


if __name__ == "__main__":
    main()
