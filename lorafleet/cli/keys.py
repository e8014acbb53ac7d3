"""`lorafleet keys`: make, list, revoke and rotate API keys."""

# ruff: noqa: PLC0415, PLR0917  (imports of YAML and tables wait until a command needs them; Typer passes by name)

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cli.columns import Column, ListView, Shown
from lorafleet.cli.output import AsJson, Output, OutputFormat, print_list
from lorafleet.service.failure import CommandFailed

keys_app = typer.Typer(no_args_is_help=True, help="API keys.")

KeyFile = Annotated[Path, typer.Option("--file", help="the key file")]
KeyId = Annotated[str, typer.Argument(help="the key's id, as `keys list` and logs show it, or its first digits")]


@keys_app.command("new")
def keys_new(
    file: Annotated[Path, typer.Option(help="the key file; created if missing")],
    tenant: Annotated[
        str | None,
        typer.Option(help="tenant of the key, with scopes infer, view, tenant-admin or register; default: none"),
    ] = None,
    scopes: Annotated[
        str,
        typer.Option(
            help="comma-separated: infer, view, tenant-admin, operate, load, register, worker, agent, agent-load,"
            " drain, metrics, export, admin"
        ),
    ] = "infer",
    note: Annotated[str, typer.Option(help="a comment in the file")] = "",
    requests_per_minute: Annotated[
        int | None, typer.Option(help="request limit of this key; default: none", show_default=False)
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="token limit, prompt and output; default: none", show_default=False)
    ] = None,
    bytes_per_minute: Annotated[
        int | None, typer.Option(help="limit of bytes of bodies, as they are read; default: none", show_default=False)
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(help="limit of requests at a time; default: none", show_default=False)
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(help="budget of tokens a day, in UTC; default: none", show_default=False)
    ] = None,
    soft_tokens_per_day: Annotated[
        int | None, typer.Option(help="soft line of this budget: told, not refused; default: none", show_default=False)
    ] = None,
    tokens_per_month: Annotated[
        int | None, typer.Option(help="budget of tokens a month, in UTC; default: none", show_default=False)
    ] = None,
    soft_tokens_per_month: Annotated[
        int | None, typer.Option(help="soft line of this budget: told, not refused; default: none", show_default=False)
    ] = None,
    engine_seconds_per_day: Annotated[
        int | None, typer.Option(help="budget of engine-seconds a day, in UTC; default: none", show_default=False)
    ] = None,
    soft_engine_seconds_per_day: Annotated[
        int | None, typer.Option(help="soft line of this budget: told, not refused; default: none", show_default=False)
    ] = None,
    engine_seconds_per_month: Annotated[
        int | None, typer.Option(help="budget of engine-seconds a month, in UTC; default: none", show_default=False)
    ] = None,
    soft_engine_seconds_per_month: Annotated[
        int | None, typer.Option(help="soft line of this budget: told, not refused; default: none", show_default=False)
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(help="90d, 12h, or a UTC time such as 2027-01-31T00:00:00Z; default: never", show_default=False),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="the key's name `x` means `NAMESPACE/x`; default: none", show_default=False),
    ] = None,
    lora_ids: Annotated[
        str | None,
        typer.Option(
            help="comma-separated patterns of names that it may register and publish, such as team-a/*; default: all",
            show_default=False,
        ),
    ] = None,
    may_shadow_base: Annotated[
        bool, typer.Option(help="it may publish under a base model's name, and then gets that in its place")
    ] = False,
) -> None:
    """Create an API key and print it. The file gets only its hash; running services read it within a second.

    Examples:

      lorafleet keys new --tenant acme --scopes infer --requests-per-minute 600 --file keys.yaml

      lorafleet keys new --tenant acme --scopes tenant-admin --expires 90d --file keys.yaml

      lorafleet keys new --scopes operate --file keys.yaml

      lorafleet keys new --tenant acme --scopes infer,register --namespace run-7 --file keys.yaml

      lorafleet keys new --scopes worker,drain --note agents --file keys.yaml
    """
    from lorafleet.keys.key_edits import add_key, parse_expiry

    wanted_scopes = [scope.strip() for scope in scopes.split(",") if scope.strip()]
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "bytes_per_minute": bytes_per_minute,
        "concurrent_requests": concurrent_requests,
        "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month,
        "engine_seconds_per_day": engine_seconds_per_day,
        "engine_seconds_per_month": engine_seconds_per_month,
        "soft_tokens_per_day": soft_tokens_per_day,
        "soft_tokens_per_month": soft_tokens_per_month,
        "soft_engine_seconds_per_day": soft_engine_seconds_per_day,
        "soft_engine_seconds_per_month": soft_engine_seconds_per_month,
    }
    until = None if expires is None else parse_expiry(expires, datetime.now(UTC))
    # An unset shell variable must not make a key without the restriction that was meant.
    for flag, value in (("--tenant", tenant), ("--namespace", namespace), ("--lora-ids", lora_ids)):
        if value is not None and not value.strip(" ,"):
            raise CommandFailed(f"{flag}: expected a value, found {value!r}; leave the flag out for none", status=2)
    patterns = tuple(pattern.strip() for pattern in (lora_ids or "").split(",") if pattern.strip())
    key = add_key(
        file,
        tenant,
        wanted_scopes,
        note,
        limits,
        until,
        namespace=namespace,
        lora_ids=patterns,
        may_shadow_base=may_shadow_base,
    )
    typer.echo(key)


@keys_app.command("list")
def keys_list(
    file: KeyFile,
    output: Output = OutputFormat.table,
    as_json: AsJson = False,
) -> None:
    """List a file's keys by id, with tenant, scopes, limits and expiry. Neither key nor hash is shown.

    Example: lorafleet keys list --file keys.yaml
    """
    from pydantic import TypeAdapter

    from lorafleet.keys.key_edits import list_keys
    from lorafleet.keys.roles import ANYONE
    from lorafleet.keys.whoami import KeyItem, key_item

    items = TypeAdapter(list[KeyItem])
    rows = items.dump_python([key_item(caller, reader=ANYONE) for caller in list_keys(file)], mode="json")
    print_list(_key_list_view(datetime.now(UTC)), rows, output, as_json)


def _key_list_view(now: datetime) -> ListView:
    """The columns of a key file's keys; neither key nor hash."""

    def limits_text(limits: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {limit:g}" for name, limit in limits.items())

    def expiry_text(expires: str | None) -> str:
        if expires is None:
            return "never"
        return f"{expires} (expired)" if datetime.fromisoformat(expires) <= now else expires

    return ListView(
        (
            Column("id", "key_id"),
            Column("tenant", "spec.tenant", form=lambda tenant: "all tenants" if tenant is None else tenant),
            Column("scopes", "spec.scopes"),
            Column("limits", "spec.limits", form=limits_text),
            Column("expires", "spec.expires_at", form=expiry_text),
            Column("namespace", "spec.namespace", shown=Shown.wide),
            Column("may register", "spec.lora_ids", shown=Shown.wide),
            Column("in place of base models", "spec.may_shadow_base", shown=Shown.wide),
            Column("all scopes", "status.may", shown=Shown.wide),
            Column("note", "spec.note"),
        ),
        names=("key_id",),
    )


@keys_app.command("revoke")
def keys_revoke(key_id: KeyId, file: KeyFile) -> None:
    """Remove a key from the file; running services refuse it within a second.

    Example: lorafleet keys revoke 2c26b46b68ff --file keys.yaml
    """
    from lorafleet.keys.key_edits import revoke_key

    typer.echo(f"key {revoke_key(file, key_id)} is revoked")


@keys_app.command("rotate")
def keys_rotate(
    key_id: KeyId,
    file: KeyFile,
    grace: Annotated[str, typer.Option(help="time for which the old key stays valid, too: 45s, 30m, 24h, 7d")] = "24h",
    expires: Annotated[
        str | None, typer.Option(help="of the new key: 90d, or a UTC time; default: never", show_default=False)
    ] = None,
) -> None:
    """Create a key with the same tenant, scopes and limits, and print it. The old one expires after the grace time.

    Example: lorafleet keys rotate 2c26b46b68ff --grace 7d --file keys.yaml
    """
    from lorafleet.keys.key_edits import parse_duration, parse_expiry, rotate_key
    from lorafleet.service.times import utc_text

    now = datetime.now(UTC)
    until = None if expires is None else parse_expiry(expires, now)
    key, old_until = rotate_key(file, key_id, grace=parse_duration(grace, "--grace"), now=now, expires=until)
    typer.echo(key)
    typer.echo(f"the old key is valid until {utc_text(old_until, 'seconds')}", err=True)
