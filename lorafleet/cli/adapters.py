"""`lorafleet adapters` and `lorafleet aliases`."""

# ruff: noqa: PLC0415, PLR0917  (imports of httpx and rich tables wait until a command needs them; Typer passes by name)

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafleet.cli import plan
from lorafleet.cli.completion import AdapterName, AliasName
from lorafleet.cli.context import if_match_header, named_tenants
from lorafleet.cli.output import AsJson, Output, OutputFormat, print_item, print_list
from lorafleet.service.failure import CommandFailed
from lorafleet.service.urls import url_path

adapters_app = typer.Typer(no_args_is_help=True, help="Adapters: register, show, change, remove.")
aliases_app = typer.Typer(no_args_is_help=True, help="Aliases: names for one or more adapters, with weights.")


class IgnoredModulesPolicy(StrEnum):
    accept = "accept"
    refuse = "refuse"


class LoadingName(StrEnum):
    lazy = "lazy"
    eager = "eager"
    weighted = "weighted"


class LanguageName(StrEnum):
    text = "text"
    wrapped = "wrapped"
    idefics = "idefics"
    outer = "outer"
    automodel = "automodel"


@adapters_app.command("list")
def adapters_list(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """List all adapters: state, replicas, workers.

    Examples:

      lorafleet adapters list -o wide

      lorafleet adapters list -o name | xargs -n1 lorafleet adapters retry
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        print_list(tables.ADAPTERS, api.list_all("/v1/adapters"), output, as_json)


@adapters_app.command("show")
def adapters_show(
    context: typer.Context,
    lora_id: AdapterName,
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
) -> None:
    """Show one adapter, and the etag of its registration.

    Example: lorafleet adapters show sql-expert/v1
    """
    with context.obj.orchestrator() as api:
        item, etag = api.get_with_etag(f"/v1/adapters/{url_path(lora_id)}")
    print_item(item | {"etag": etag.strip('"')}, lora_id, output, as_json)


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
    from lorafleet.client.archive import FILES

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
    lora_id: AdapterName,
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

    loading, min_replicas, max_replicas and ttl_s may be null, which takes the global policy; ignored_modules (accept or
    refuse) may be null, which takes each worker's setting.

    Examples:

      lorafleet adapters set sql-expert/v1 min_replicas=2 priority=5

      lorafleet adapters set sql-expert/v1 loading=null pinned=false

      lorafleet adapters set legal/v2 ttl_s=3600

      lorafleet adapters set legal/v2 --tenant acme --tenant globex
    """
    tenants = named_tenants(tenant, everyone)
    body: dict[str, Any] = {}
    if changes:
        body["policy"] = dict(plan.parse_setting(change, "lorafleet adapters show LORA_ID") for change in changes)
    if tenants or everyone:
        body["tenants"] = tenants
    if not body:
        raise CommandFailed("nothing to change: name NAME=VALUE, --tenant or --everyone", status=2)
    with context.obj.orchestrator() as api:
        item = api.call("PATCH", f"/v1/adapters/{url_path(lora_id)}", body, headers=if_match_header(if_match))
    from lorafleet.cli import tables

    tables.show(tables.fields(item["policy"] | {"tenants": item["tenants"]}))


@adapters_app.command("rm")
def adapters_rm(context: typer.Context, lora_id: AdapterName) -> None:
    """Remove an adapter: unload it everywhere, after its requests in flight.

    Example: lorafleet adapters rm sql-expert/v1
    """
    with context.obj.orchestrator() as api:
        api.call("DELETE", f"/v1/adapters/{url_path(lora_id)}")
    typer.echo(f"{lora_id} is being removed")


@adapters_app.command("retry")
def adapters_retry(context: typer.Context, lora_id: AdapterName) -> None:
    """Clear an adapter's failure and quarantine, and load it again.

    Example: lorafleet adapters retry sql-expert/v2
    """
    with context.obj.orchestrator() as api:
        api.call("POST", f"/v1/adapters/{url_path(lora_id)}/retry")
    typer.echo(f"{lora_id} is tried again; see: lorafleet adapters show {lora_id}")


@adapters_app.command("rename-modules")
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
    from lorafleet.local.renames import rename

    for line in rename(folder, out, base, to and to.value):
        typer.echo(line)


@aliases_app.command("list")
def aliases_list(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
    """List all aliases and their targets.

    Example: lorafleet aliases list
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        print_list(tables.ALIASES, api.list_all("/v1/aliases"), output, as_json)


@aliases_app.command("compare")
def aliases_compare(
    context: typer.Context,
    name: AliasName,
    range_s: Annotated[float, typer.Option(min=60, max=172_800, help="seconds up to now that figures are of")] = 3600.0,
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
) -> None:
    """Compare an alias's targets side by side: requests, errors, first tokens, time per token, tokens, cache hits.

    `worse` is by the rule of a rollout with its default limits, against the target with most of the sessions.

    Examples:

      lorafleet aliases compare sql-expert

      lorafleet aliases compare sql-expert --range-s 600 -o yaml
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        answer = api.call("GET", f"/v1/aliases/{url_path(name)}/comparison", range_s=range_s)
    print_list(tables.COMPARISON, answer, output, as_json)


@aliases_app.command("set")
def aliases_set(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="the alias")],
    targets: Annotated[list[str], typer.Argument(help="lora_id, or lora_id=weight")],
) -> None:
    """Point an alias at one or more adapters, in place of its former targets.

    Examples:

      lorafleet aliases set sql-expert sql-expert/v1

      lorafleet aliases set sql-expert sql-expert/v1=9 sql-expert/v2=1
    """
    with context.obj.orchestrator() as api:
        body = {"targets": [_parse_alias_target(target) for target in targets]}
        item = api.call("PUT", f"/v1/aliases/{url_path(name)}", body)
    typer.echo(f"{name} -> {', '.join(targets)}")
    if item["pending"]:
        lacks = "; ".join(f"{lora_id}: {missing}" for lora_id, missing in sorted(item["pending"]["lacks"].items()))
        typer.echo(f"  pending; the former targets stay until then: {lacks or item['pending']['error']}")


def _parse_alias_target(text: str) -> dict[str, Any]:
    """An alias target from `lora_id` or `lora_id=weight`; raises CommandFailed."""
    lora_id, has_weight, weight = text.partition("=")
    try:
        return {"lora_id": lora_id, "weight": float(weight)} if has_weight else {"lora_id": lora_id}
    except ValueError as exc:
        raise CommandFailed(f"{text}: {weight!r} is not a number; write lora_id or lora_id=weight", status=2) from exc


@aliases_app.command("rm")
def aliases_rm(context: typer.Context, name: AliasName) -> None:
    """Remove an alias; its adapters stay.

    Example: lorafleet aliases rm sql-expert
    """
    with context.obj.orchestrator() as api:
        api.call("DELETE", f"/v1/aliases/{url_path(name)}")
    typer.echo(f"{name} is removed")
