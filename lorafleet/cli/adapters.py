"""`lorafleet adapters add` and `set`, and `lorafleet orphans adopt`: what registers and changes adapters."""

# ruff: noqa: PLR0917  (Typer passes by name)

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafleet.cli.context import named_tenants, parse_setting
from lorafleet.cli.resources import ADAPTERS, ORPHANS
from lorafleet.cli.verbs import change
from lorafleet.service.failure import CommandFailed

adapters_app = ADAPTERS.app()
orphans_app = ORPHANS.app()


class IgnoredModulesPolicy(StrEnum):
    accept = "accept"
    refuse = "refuse"


class LoadingName(StrEnum):
    lazy = "lazy"
    eager = "eager"
    weighted = "weighted"
    everywhere = "everywhere"


@adapters_app.command("add")
def adapters_add(
    context: typer.Context,
    lora_id: Annotated[str, typer.Argument(help="name, usually with a version: sql-expert/v2")],
    source: Annotated[str, typer.Argument(help="folder, or file://, hf://, s3://, gs://, https:// address")],
    base_model: Annotated[
        str | None, typer.Option(help="its name in the fleet; default: as in the adapter's config")
    ] = None,
    digest: Annotated[str | None, typer.Option(help="sha256 of the files; any other bytes are refused")] = None,
    loading: Annotated[LoadingName | None, typer.Option(help="default: the global policy")] = None,
    min_replicas: Annotated[int | None, typer.Option(min=0)] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1)] = None,
    ttl_s: Annotated[
        float | None, typer.Option(min=0, help="unload after so many seconds without a request; 0: never")
    ] = None,
    ignored_modules: Annotated[
        IgnoredModulesPolicy | None,
        typer.Option(help="where an engine ignores some of its modules; default: the worker's setting"),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="never evicted")] = False,
    tenant: Annotated[list[str] | None, typer.Option(help="tenant that may use it; repeat; default: everyone")] = None,
) -> None:
    """Register an adapter. Repeating the command changes nothing.

    Examples:

      lorafleet adapters add sql-expert/v2 ./sql-expert-v2

      lorafleet adapters add legal/v3 s3://bucket/legal-v3 --loading eager --min-replicas 2 --tenant acme
    """
    given = {
        "loading": loading and loading.value,
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "ttl_s": ttl_s,
        "ignored_modules": ignored_modules and ignored_modules.value,
    }
    policy = {name: value for name, value in given.items() if value is not None} | ({"pinned": True} if pinned else {})
    spec = {
        "lora_id": lora_id,
        "source": str(Path(source).resolve()) if "://" not in source else source,
        "base_model": base_model,
        "digest": digest,
        "policy": policy,
        "tenants": named_tenants(tenant),
    }
    _require_adapter_files(source)
    with context.obj.orchestrator() as api:
        api.call("POST", "/v1/adapters", spec)
    typer.echo(f"{lora_id} is registered; see: lorafleet adapters show {lora_id}")
    if "://" not in source and not Path(source).is_dir():
        typer.echo(f"  this machine has no folder {spec['source']}; workers read it from their own disks", err=True)


def _require_adapter_files(source: str) -> None:
    """Raise CommandFailed for a folder of this machine that lacks an adapter's files.

    A folder that is not here may be on the workers' disks, as may one that a file:// address names.
    """
    folder = Path(source)
    if "://" in source or not folder.is_dir():
        return
    from lorafleet.client.archive import FILES  # noqa: PLC0415  (httpx is imported when a command needs it)

    config, weights = FILES
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as exc:
        raise CommandFailed(f"{source}: {exc.strerror}; expected a folder that can be read") from exc
    lacks = [] if config in names else [config]
    # Another suffix is one that workers convert or refuse with a reason of their own.
    lacks += [] if any(Path(name).stem == Path(weights).stem for name in names) else [weights]
    if lacks:
        near = sorted(str(path.parent) for path in folder.glob(f"*/{config}"))
        found = f"did you mean {near[0]}?" if near else f"the folder has {', '.join(sorted(names)[:5]) or 'no files'}"
        raise CommandFailed(
            f"{source}: no {' and no '.join(lacks)}; {found}; expected the folder that PEFT's save_pretrained wrote."
            f" If only the workers have its files, write file://{folder.resolve()}",
            status=2,
        )


@adapters_app.command("set")
def adapters_set(
    context: typer.Context,
    lora_id: Annotated[str, ADAPTERS.argument()],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="NAME=VALUE of its policy, see `adapters show`", show_default=False),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="tenants that may use it, in place of the former ones; repeat", show_default=False),
    ] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="every tenant may use it")] = False,
    if_match: Annotated[
        str | None, typer.Option(help="change only if the etag of `adapters show` is still this one")
    ] = None,
) -> None:
    """Change an adapter's own policy or its tenants. Other values stay; effective at once.

    loading, min_replicas, max_replicas, ttl_s, acceptance (off, warn or require), large_weights (note or refuse) and
    cache (tenant, key or shared) may be null, which takes the global policy; ignored_modules (accept or refuse) may be
    null, which takes each worker's setting.

    Examples:

      lorafleet adapters set sql-expert/v1 min_replicas=2 priority=5

      lorafleet adapters set sql-expert/v1 loading=null pinned=false

      lorafleet adapters set legal/v2 ttl_s=3600

      lorafleet adapters set legal/v2 --tenant acme --tenant globex
    """
    tenants = named_tenants(tenant, everyone)
    body: dict[str, Any] = {}
    if changes:
        body["policy"] = dict(parse_setting(text, "lorafleet adapters show LORA_ID") for text in changes)
    if tenants or everyone:
        body["tenants"] = tenants
    if not body:
        raise CommandFailed("nothing to change: name NAME=VALUE, --tenant or --everyone", status=2)
    change(context, ADAPTERS, lora_id, body, if_match)


@orphans_app.command("adopt")
def orphans_adopt(
    context: typer.Context,
    lora_ids: Annotated[
        list[str] | None, typer.Argument(help="lora_ids to adopt; default: all", show_default=False)
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="tenant that may use them; repeat; default: operators only")
    ] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="every tenant may")] = False,
) -> None:
    """Register orphans under their own names, for the whole fleet.

    Those that another client loaded into an engine are loaded again, under the fleet's engine name, and then unloaded
    under the old one. All others stay where they are.

    Their tenants were lost with the store: without --tenant or --everyone no tenant may use them. In a fleet without
    keys everyone may.

    Examples:

      lorafleet orphans adopt

      lorafleet orphans adopt sql-expert/v1 legal/v2 --tenant acme
    """
    tenants = named_tenants(tenant, everyone)
    body = {"lora_ids": lora_ids or None, "tenants": None if everyone else tenants or []}
    with context.obj.orchestrator() as api:
        results = api.call("POST", "/v1/orphans/adopt", body)["data"]
    refused = [item for item in results if item["status"] >= 400]
    typer.echo(f"{len(results) - len(refused)} adopted")
    for item in refused:
        typer.echo(f"{item['lora_id']}: {item['error']}")
    # An adapter that was named and cannot be adopted is a failure; without names it is only reported.
    if refused and lora_ids:
        raise CommandFailed(f"{len(refused)} of {len(results)} not adopted")
