"""`lorafleet monitoring` and `lorafleet chart`: files for Prometheus, Grafana and Helm."""

# ruff: noqa: PLC0415  (YAML is imported, and files are copied, when a command needs it)

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from lorafleet.cli.context import FleetAddress
from lorafleet.service.failure import CommandFailed
from lorafleet.service.network.urls import bracketed

if TYPE_CHECKING:
    from lorafleet.local.monitoring import ScrapeTarget

app = typer.Typer(no_args_is_help=True)
chart_app = typer.Typer(no_args_is_help=True, help="The Helm chart of this version.")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@app.command()
def monitoring(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="where the files go; it is made if it is missing")],
    credentials_file: Annotated[
        Path | None, typer.Option(help="file with a key of scope `metrics` (lorafleet keys new --scopes metrics)")
    ] = None,
    router_processes: Annotated[int, typer.Option(min=1, help="`processes` of each router")] = 1,
) -> None:
    """Write prometheus.yml, alerts.yml and dashboard.json for this fleet, with its workers of now.

    Run it again when workers were added or have other addresses. On Kubernetes the chart installs the same.

    Example: lorafleet monitoring ./monitoring
    """
    from lorafleet.local.monitoring import monitoring_files

    address: FleetAddress = context.obj
    with address.orchestrator() as api:
        targets = scrape_targets(address, api.list_all("/v1/workers"))
    written = monitoring_files(
        targets,
        router_processes=router_processes,
        credentials_file=None if credentials_file is None else str(credentials_file.resolve()),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise CommandFailed(f"{folder}: {exc.strerror}; name a folder that you may write to") from exc
    typer.echo(f"{folder}: {', '.join(written)}, for {len(targets)} processes")
    typer.echo(f"Next: prometheus --config.file={folder / 'prometheus.yml'}")
    typer.echo("      then import dashboard.json in Grafana (Dashboards, New, Import)")


def scrape_targets(fleet: FleetAddress, workers: Iterable[Mapping[str, Any]]) -> "list[ScrapeTarget]":
    """The router, the orchestrator, and the agent of each worker; an agentless engine has metrics of its own only."""
    named = [("router", fleet.router_url), ("orchestrator", fleet.orchestrator_url)]
    named += [(worker["id"], worker["agent_url"]) for worker in workers if worker["agent_url"]]
    return [_scrape_target(name, url) for name, url in named]


def _scrape_target(name: str, url: str) -> "ScrapeTarget":
    """The target of a service's URL, with its port."""
    from lorafleet.local.monitoring import ScrapeTarget

    parts = urlsplit(url)
    return ScrapeTarget(
        f"{bracketed(parts.hostname or '')}:{parts.port or _DEFAULT_PORTS[parts.scheme]}", name, parts.scheme
    )


@chart_app.command("save")
def chart_save(
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


@chart_app.command("check")
def chart_check(
    values: Annotated[list[Path] | None, typer.Option("--values", "-f", help="file of values; may be repeated")] = None,
    chart: Annotated[Path | None, typer.Option(help="the chart's folder; default: the chart of this version")] = None,
    release: Annotated[str, typer.Option(help="name of the release to be")] = "fleet",
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="its namespace")] = "default",
    kubernetes_version: Annotated[str, typer.Option(help="version of the cluster")] = "1.37.0",
    helm: Annotated[str, typer.Option(help="the helm program")] = "helm",
) -> None:
    """Check an installation with these values, without a cluster: what the API server would refuse in its middle.

    helm renders the chart; each object is checked by Kubernetes' strict schema and the API server's rules about two
    fields. Custom kinds, as KEDA's, have no schema here. Needs `pip install 'lorafleet[chart]'`.

    Example: lorafleet chart check -f values.yaml
    """
    from lorafleet.local.chart import chart_folder
    from lorafleet.local.manifests.check import ChartRelease, checked

    found = checked(
        ChartRelease(
            chart=chart or chart_folder(),
            name=release,
            namespace=namespace,
            values=tuple(values or ()),
            kubernetes=kubernetes_version,
        ),
        helm=helm,
    )
    if found.unchecked:
        typer.echo(f"without a schema here: {', '.join(found.unchecked)}", err=True)
    if found.problems:
        for problem in found.problems:
            typer.echo(problem)
        raise CommandFailed(f"{len(found.problems)} values that Kubernetes {kubernetes_version} refuses; see above")
    typer.echo(f"{found.objects} objects are as Kubernetes {kubernetes_version} takes them")
