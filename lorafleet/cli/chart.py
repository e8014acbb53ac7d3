"""`lorafleet chart`: the Helm chart that comes with the package."""

# ruff: noqa: PLC0415  (files are copied when the command runs)

import shlex
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The Helm chart of this version.")


@app.command("save")
def save(
    folder: Annotated[Path, typer.Argument(help="where the chart goes; it is made if it is missing")],
) -> None:
    """Write the Helm chart of this version to a folder, in place of another version there.

    Example: lorafleet chart save ./lorafleet-chart
    """
    from lorafleet.local.chart import save_chart

    save_chart(folder)
    place = shlex.quote(str(folder))
    typer.echo(f"{folder}: the chart of this version; values.yaml there explains every value")
    typer.echo(f"Next: helm install fleet {place} -f {place}/values-cpu.yaml --set image.registry=R")
