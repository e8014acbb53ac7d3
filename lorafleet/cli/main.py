"""The `lorafleet` command. Flags in, one call, a table out; what is heavy is imported by the command that needs it."""

# ruff: noqa: PLC0415, PLR0917  (`lorafleet --help` must not wait for httpx, rich tables or numpy; Typer passes by name)

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lorafleet.cli import plan, rollout
from lorafleet.service.failure import CommandFailed
from lorafleet.service.urls import path_of

if TYPE_CHECKING:
    from lorafleet.cli.client import RestClient

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve many LoRA adapters from one fleet of vLLM workers.\n\nFirst steps: lorafleet up --engine sim --demo",
)
adapters_app = typer.Typer(no_args_is_help=True, help="Adapters: register, look at, change, forget.")
aliases_app = typer.Typer(no_args_is_help=True, help="Aliases: names that point at adapters, with weights.")
workers_app = typer.Typer(no_args_is_help=True, help="Workers: an engine with its agent.")
policy_app = typer.Typer(no_args_is_help=True, help="The global placement policy.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys.")
for name, sub in (
    ("adapters", adapters_app),
    ("aliases", aliases_app),
    ("rollout", rollout.app),
    ("workers", workers_app),
    ("policy", policy_app),
    ("keys", keys_app),
):
    app.add_typer(sub, name=name)


app.add_typer(plan.app)


class EngineName(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    sim = "sim"


class LoadingName(StrEnum):
    lazy = "lazy"
    eager = "eager"
    weighted = "weighted"


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """Which servers the command speaks to, and with which key."""

    orchestrator_url: str
    router_url: str
    token: str

    def orchestrator(self) -> "RestClient":
        from lorafleet.cli.client import RestClient

        return RestClient(self.orchestrator_url, self.token, flag="lorafleet --orchestrator-url")

    def router(self) -> "RestClient":
        from lorafleet.cli.client import RestClient

        return RestClient(self.router_url, self.token, flag="lorafleet --router-url")


@app.callback()
def _target(
    context: typer.Context,
    orchestrator_url: Annotated[
        str, typer.Option(envvar="LORAFLEET_URL_ORCHESTRATOR", help="where the orchestrator is")
    ] = "http://127.0.0.1:8080",
    router_url: Annotated[
        str, typer.Option(envvar="LORAFLEET_URL_ROUTER", help="where the router is")
    ] = "http://127.0.0.1:8000",
    token: Annotated[
        str, typer.Option(envvar="LORAFLEET_TOKEN", help="API key, where the fleet wants one", show_default=False)
    ] = "",
) -> None:
    context.obj = FleetAddress(orchestrator_url, router_url, token)


def _default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "lorafleet"


class _EngineArgumentsCommand(TyperCommand):
    """A command with arguments for the engines behind `--`, which says so of a flag that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as exc:
            if type(exc).__name__ == "NoSuchOption":  # click's, which is inside Typer or beside it, by its version
                exc.message = f"{exc}; flags of the engine stand behind `--`"  # type: ignore[attr-defined]
            raise


_FILE_OF = "YAML file with settings of the {}, as its own --config; its variables LORAFLEET_{}_... come before it"


@app.command(cls=_EngineArgumentsCommand)
def up(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ENGINE ARGUMENT",
            help="behind `--`, arguments that every engine gets, as `vllm serve` takes them",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="vllm (the default), sglang: the real ones; sim: speaks like vLLM, computes nothing"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="how many engines, each with its agent; default 2, or one a device"),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="folder of the base model; without it a tiny one is made")] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="every folder below it with an adapter_config.json is an adapter")
    ] = None,
    max_loras: Annotated[
        int | None, typer.Option(min=1, max=1024, help="adapters that one engine runs at once; default 2")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="GPUs as CUDA_VISIBLE_DEVICES names them, as 0,1,2,3: dealt out to the workers, as many to each",
            show_default=False,
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="one argument for every engine; repeat: --engine-arg=--dtype --engine-arg=bfloat16"),
    ] = None,
    router_port: Annotated[int | None, typer.Option(min=0, max=65535, help="default 8000; 0 picks a free one")] = None,
    orchestrator_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="default 8080; 0 picks a free one")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="store, models and logs; default ~/.local/state/lorafleet", show_default=False)
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="who may call (see `lorafleet keys new`); without it everything is open")
    ] = None,
    router_config: Annotated[Path | None, typer.Option(help=_FILE_OF.format("router", "ROUTER"))] = None,
    orchestrator_config: Annotated[
        Path | None, typer.Option(help=_FILE_OF.format("orchestrator", "ORCHESTRATOR"))
    ] = None,
    workers_config: Annotated[Path | None, typer.Option(help=_FILE_OF.format("workers' agents", "WORKERS"))] = None,
    demo: Annotated[bool, typer.Option("--demo", help="then ask four questions and show where each went")] = False,
    once: Annotated[bool, typer.Option("--once", help="stop when ready (and the demo done)")] = False,
) -> None:
    """Start a whole fleet on this machine, and stop it with Ctrl-C.

    Prints one line `ready router=... orchestrator=...` when it is. Everything listens on loopback.

    What stands behind `--` is for every engine. Settings of the services are taken from the environment
    (LORAFLEET_ROUTER_..., LORAFLEET_ORCHESTRATOR_..., LORAFLEET_WORKERS_...), as docs/configuration.md lists them.

    Examples:

      lorafleet up --engine sim --workers 8 --demo

      lorafleet up --model ./Qwen2.5-0.5B --adapters ./my-adapters --max-loras 4

      lorafleet up --model ./Qwen2.5-7B --devices 0,1 -- --enable-auto-tool-choice --tool-call-parser hermes

      lorafleet up --model ./Qwen2.5-7B --devices 0,1,2,3 --workers 2 -- --tensor-parallel-size 2
    """
    from lorafleet.local.options import asked
    from lorafleet.local.up import run

    options = asked(
        engine=engine and engine.value,
        workers=workers,
        model=model,
        adapters=adapters,
        max_loras=max_loras,
        router_port=router_port,
        orchestrator_port=orchestrator_port,
        state_dir=state_dir or _default_state_dir(),
        key_file=key_file,
        configs={"router": router_config, "orchestrator": orchestrator_config, "workers": workers_config},
        devices=devices,
        words=[*(engine_arg or ()), *(words or ())],
        environment=os.environ,
        demo=demo,
        once=once,
    )
    raise typer.Exit(run(options))


# --- adapters ----------------------------------------------------------------------------------------------------


@adapters_app.command("list")
def adapters_list(context: typer.Context) -> None:
    """All adapters: state, replicas, workers.

    Example: lorafleet adapters list
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        tables.show(tables.adapters(api.every("/v1/adapters")))


@adapters_app.command("show")
def adapters_show(context: typer.Context, lora_id: str) -> None:
    """One adapter, everything known, and the etag that names this version of what was asked for.

    Example: lorafleet adapters show sql-expert/v1
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        item, etag = api.tagged(f"/v1/adapters/{path_of(lora_id)}")
        tables.show(tables.fields(item | {"etag": etag.strip('"')}))


@adapters_app.command("add")
def adapters_add(
    context: typer.Context,
    lora_id: Annotated[str, typer.Argument(help="name, usually with a version: sql-expert/v2")],
    source: Annotated[str, typer.Argument(help="folder, or file://, hf://, s3://, gs://, https:// address")],
    base_model: Annotated[
        str | None, typer.Option(help="its name in the fleet; default: what the adapter itself says")
    ] = None,
    digest: Annotated[str | None, typer.Option(help="refuse any other bytes (sha256)")] = None,
    loading: Annotated[LoadingName | None, typer.Option(help="default: as the global policy says")] = None,
    min_replicas: Annotated[int | None, typer.Option(min=0)] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1)] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="never evicted")] = False,
    tenant: Annotated[list[str] | None, typer.Option(help="who may use it; repeat; default: everyone")] = None,
) -> None:
    """Register an adapter. The same again changes nothing.

    Examples:

      lorafleet adapters add sql-expert/v2 ./sql-expert-v2

      lorafleet adapters add legal/v3 s3://bucket/legal-v3 --loading eager --min-replicas 2 --tenant acme
    """
    said = {"loading": loading and loading.value, "min_replicas": min_replicas, "max_replicas": max_replicas}
    policy = {name: value for name, value in said.items() if value is not None} | ({"pinned": True} if pinned else {})
    spec = {
        "lora_id": lora_id,
        "source": str(Path(source).resolve()) if "://" not in source else source,
        "base_model": base_model,
        "digest": digest,
        "policy": policy,
        "tenants": tenant or None,
    }
    with context.obj.orchestrator() as api:
        api.call("POST", "/v1/adapters", spec)
    typer.echo(f"{lora_id} is registered; see: lorafleet adapters show {lora_id}")
    if "://" not in source and not Path(source).is_dir():
        typer.echo(
            f"  there is no folder {spec['source']} on this machine; workers will look on their own disks", err=True
        )


@adapters_app.command("set")
def adapters_set(
    context: typer.Context,
    lora_id: str,
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="name=value, as its policy in `adapters show` has them", show_default=False),
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="who may use it, in place of who might; repeat", show_default=False)
    ] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="every tenant may use it")] = False,
    if_match: Annotated[
        str | None, typer.Option(help="only if it is still this one: the etag that `adapters show` says")
    ] = None,
) -> None:
    """Change an adapter's own policy, or who may use it. What is not named stays; effective at once.

    loading, min_replicas and max_replicas may be null: as the global policy says.

    Examples:

      lorafleet adapters set sql-expert/v1 min_replicas=2 priority=5

      lorafleet adapters set sql-expert/v1 loading=null pinned=false

      lorafleet adapters set legal/v2 --tenant acme --tenant globex
    """
    if tenant and everyone:
        raise CommandFailed("name one: --tenant, or --everyone", status=2)
    body: dict[str, Any] = {}
    if changes:
        body["policy"] = dict(plan.setting(change, "lorafleet adapters show LORA_ID") for change in changes)
    if tenant or everyone:
        body["tenants"] = tenant or None
    if not body:
        raise CommandFailed("nothing to change: name NAME=VALUE, --tenant or --everyone", status=2)
    with context.obj.orchestrator() as api:
        item = api.call("PATCH", f"/v1/adapters/{path_of(lora_id)}", body, headers=_if_match(if_match))
    from lorafleet.cli import tables

    tables.show(tables.fields(item["policy"] | {"tenants": item["tenants"]}))


@adapters_app.command("rm")
def adapters_rm(context: typer.Context, lora_id: str) -> None:
    """Unload an adapter everywhere and forget it. Requests in flight finish first.

    Example: lorafleet adapters rm sql-expert/v1
    """
    with context.obj.orchestrator() as api:
        api.call("DELETE", f"/v1/adapters/{path_of(lora_id)}")
    typer.echo(f"{lora_id} is being removed")


@adapters_app.command("retry")
def adapters_retry(context: typer.Context, lora_id: str) -> None:
    """Forget why an adapter failed, its quarantine too, and try it again.

    Example: lorafleet adapters retry sql-expert/v2
    """
    with context.obj.orchestrator() as api:
        api.call("POST", f"/v1/adapters/{path_of(lora_id)}/retry")
    typer.echo(f"{lora_id} is tried again; see: lorafleet adapters show {lora_id}")


# --- aliases -----------------------------------------------------------------------------------------------------


@aliases_app.command("list")
def aliases_list(context: typer.Context) -> None:
    """All aliases and what they point at.

    Example: lorafleet aliases list
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        tables.show(tables.aliases(api.every("/v1/aliases")))


@aliases_app.command("set")
def aliases_set(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="the alias")],
    targets: Annotated[list[str], typer.Argument(help="lora_id, or lora_id=weight")],
) -> None:
    """Point an alias at one or more adapters, in place of what it pointed at.

    Examples:

      lorafleet aliases set sql-expert sql-expert/v1

      lorafleet aliases set sql-expert sql-expert/v1=9 sql-expert/v2=1
    """
    with context.obj.orchestrator() as api:
        body = {"targets": [_alias_target(target) for target in targets]}
        item = api.call("PUT", f"/v1/aliases/{path_of(name)}", body)
    typer.echo(f"{name} -> {', '.join(targets)}")
    if item["pending"]:
        lacks = "; ".join(f"{lora_id}: {what}" for lora_id, what in sorted(item["pending"]["lacks"].items()))
        typer.echo(f"  pending, it stays where it is until then: {lacks or item['pending']['error']}")


def _alias_target(text: str) -> dict[str, Any]:
    lora_id, has_weight, weight = text.partition("=")
    try:
        return {"lora_id": lora_id, "weight": float(weight)} if has_weight else {"lora_id": lora_id}
    except ValueError as exc:
        raise CommandFailed(f"{text}: {weight!r} is no number; write lora_id or lora_id=weight", status=2) from exc


@aliases_app.command("rm")
def aliases_rm(context: typer.Context, name: str) -> None:
    """Remove an alias; its adapters stay.

    Example: lorafleet aliases rm sql-expert
    """
    with context.obj.orchestrator() as api:
        api.call("DELETE", f"/v1/aliases/{path_of(name)}")
    typer.echo(f"{name} is removed")


# --- workers, placements, policy ---------------------------------------------------------------------------------


@app.command()
def placements(context: typer.Context) -> None:
    """Which adapter is on which worker, and whether it should be.

    Example: lorafleet placements
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        tables.show(tables.placements(api.every("/v1/placements")))


@workers_app.command("list")
def workers_list(context: typer.Context) -> None:
    """All workers: state, adapters, free slots.

    Example: lorafleet workers list
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        tables.show(tables.workers(api.every("/v1/workers")))


@workers_app.command("cordon")
def workers_cordon(context: typer.Context, worker: str) -> None:
    """Place nothing new on a worker; it serves what it has.

    Example: lorafleet workers cordon w1
    """
    _worker(context, worker, "cordon", "is cordoned")


@workers_app.command("uncordon")
def workers_uncordon(context: typer.Context, worker: str) -> None:
    """Use a cordoned or drained worker again.

    Example: lorafleet workers uncordon w1
    """
    _worker(context, worker, "uncordon", "is in use again")


@workers_app.command("drain")
def workers_drain(
    context: typer.Context,
    worker: str,
    deadline_s: Annotated[float | None, typer.Option(min=0, help="how long its adapters may take to move")] = None,
) -> None:
    """Move a worker's adapters elsewhere and send it nothing more.

    Example: lorafleet workers drain w1 --deadline-s 60
    """
    _worker(context, worker, "drain", "is draining", {} if deadline_s is None else {"deadline_s": deadline_s})


def _worker(context: typer.Context, worker: str, verb: str, result: str, body: Any = None) -> None:
    with context.obj.orchestrator() as api:
        api.call("POST", f"/v1/workers/{path_of(worker)}/{verb}", body)
    typer.echo(f"{worker} {result}")


@policy_app.command("show")
def policy_show(context: typer.Context) -> None:
    """The policy in force, and the etag that names this version of it.

    Example: lorafleet policy show
    """
    from lorafleet.cli import tables

    with context.obj.orchestrator() as api:
        policy, etag = api.tagged("/v1/policy")
        tables.show(tables.fields(policy | {"etag": etag.strip('"')}))


@policy_app.command("set")
def policy_set(
    context: typer.Context,
    changes: Annotated[list[str], typer.Argument(help="name=value, as `policy show` has them")],
    if_match: Annotated[
        str | None, typer.Option(help="only if the policy is still this one: the etag that `policy show` says")
    ] = None,
) -> None:
    """Change parts of the policy, effective at once.

    Examples:

      lorafleet policy set loading=eager reserve_slots=0

      lorafleet policy set loading=eager --if-match 3c1f9c6d2ab04e11
    """
    body = dict(map(plan.setting, changes))
    with context.obj.orchestrator() as api:
        from lorafleet.cli import tables

        tables.show(tables.fields(api.call("PATCH", "/v1/policy", body, headers=_if_match(if_match))))


def _if_match(etag: str | None) -> dict[str, str]:
    return {} if etag is None else {"if-match": etag if etag == "*" else f'"{etag.strip(chr(34))}"'}


# --- what goes on ------------------------------------------------------------------------------------------------


@app.command()
def explain(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="a user's message", show_default=False)] = None,
    model: Annotated[
        str, typer.Option(help="base model, adapter, alias, or base:adapter; default: the base model")
    ] = "",
    lora_id: Annotated[str | None, typer.Option(help="adapter, as a request's lora_id names it")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="make recorded decisions again: a file of `decisions --json`, or - for standard input"),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="with --replay: by this policy instead of the recorded one")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the router's whole answer, with the record")] = False,
) -> None:
    """Where the router would send this prompt now, and every replica's terms in seconds. Sends nothing.

    The winner has an arrow: the least cost, or one within a few percent of it. The cost is kappa * (prefill +
    adapter), and the other terms as they are. `trust` says how far the cached blocks are to be believed: exact,
    degraded, or an estimate.

    With --replay, decisions of the past are made again from their records; several become one line each, and the
    status is 1 when one comes out differently by its own policy.

    Examples:

      lorafleet explain "Which customers paid late?" --model sql-expert/v1

      lorafleet decisions --limit 1 --json | lorafleet explain --replay -

      lorafleet decisions --limit 1000 --json | lorafleet explain --replay - --policy least_loaded
    """
    if (prompt is None) == (replay is None):
        raise CommandFailed('name one: a prompt (lorafleet explain "...") or --replay FILE', status=2)
    if policy and replay is None:
        raise CommandFailed(
            "--policy goes with --replay; a live request is decided by the router's own policy", status=2
        )
    with context.obj.router() as api:
        if replay is not None:
            _replay(api, replay, policy, as_json=as_json)
            return
        body = {"model": model or _base_model(api), "messages": [{"role": "user", "content": prompt}]}
        answer = api.call("POST", "/v1/route", body | ({"lora_id": lora_id} if lora_id else {}))
    _explain(answer, as_json=as_json)


@app.command()
def decisions(
    context: typer.Context,
    request: Annotated[
        str | None, typer.Argument(help="one in full: a request's id (the answer's x-request-id)", show_default=False)
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="a lora_id, lora_id@digest, or base")] = None,
    worker: Annotated[str | None, typer.Option(help="where it went")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many at most; the router keeps 1,000")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="everything, each with the record to make it again")] = False,
) -> None:
    """The last decisions, newest first: predicted and the engine's own cached tokens, waits, first data.

    Times: waited s in the router for room at an engine, first data s from there to the first token (or the whole
    answer, when it is not streamed).

    Examples:

      lorafleet decisions --adapter sql-expert/v1 --limit 5

      lorafleet decisions 5f1c0e3b9f8e4b6f8d3c1a2b4c5d6e7f

      lorafleet decisions --worker w1 --json > w1.json
    """
    from lorafleet.cli import tables

    with context.obj.router() as api:
        query = {"adapter": adapter, "worker": worker, "request": request, "limit": limit}
        answer = api.call("GET", "/v1/decisions", **query)
    if as_json:
        _json(answer)
    elif request is None:
        tables.show(tables.decisions(answer["data"]))
        _say_missing(answer)
    elif not answer["data"]:
        raise CommandFailed(
            f"{request}: not among what this router keeps, its last 1,000 decisions and of more than 100 a second a"
            " sample; or another router made it"
            + (", or a process of this one that did not answer in time" if answer.get("missing") else "")
        )
    else:
        # The newest first: one that was tried again elsewhere has several.
        for item in answer["data"]:
            _explain(item)


def _say_missing(answer: Mapping[str, Any]) -> None:
    if missing := answer.get("missing"):
        slots = ", ".join(map(str, missing))
        typer.echo(f"without those of the router's processes that did not answer in time (slot {slots})", err=True)


def _explain(answer: Mapping[str, Any], *, as_json: bool = False) -> None:
    from lorafleet.cli import tables

    if as_json:
        _json(answer)
        return
    typer.echo(tables.headline(answer))
    if answer["scores"]:
        tables.show(tables.decision(answer))
    for line in tables.left_out(answer):
        typer.echo(line)
    if answer.get("note"):
        typer.echo(answer["note"])


def _replay(api: "RestClient", file: Path, policy: str | None, *, as_json: bool) -> None:
    from lorafleet.cli import tables
    from lorafleet.cli.decisions import again, recorded

    first = recorded(file)
    made = again(api, first, policy)
    # A bare record does not say how it was decided.
    differ = sum(
        then.get("worker_id", now["worker_id"]) != now["worker_id"] for then, now in zip(first, made, strict=True)
    )
    if as_json:
        _json({"data": made})
    elif len(made) == 1:
        _explain(made[0])
    else:
        tables.show(tables.replays(first, made))
        typer.echo(f"{len(made) - differ} of {len(made)} as before")
    if differ and policy is None:
        raise CommandFailed(
            f"{differ} of {len(made)} decided otherwise than recorded: this router's cost model is another"
        )


def _json(what: Any) -> None:
    import json

    typer.echo(json.dumps(what, indent=2))


def _base_model(api: "RestClient") -> str:
    for item in api.call("GET", "/v1/models")["data"]:
        if not item.get("parent"):
            return str(item["id"])
    raise CommandFailed("the router knows no base model yet; name one with --model")


@app.command()
def top(
    context: typer.Context,
    every_s: Annotated[float, typer.Option(min=0.2, help="seconds between looks")] = 1.0,
) -> None:
    """Workers and adapters, live; one look when the output is not a terminal. Ctrl-C ends it.

    Example: lorafleet top --every-s 5
    """
    from lorafleet.cli import top

    with context.obj.orchestrator() as api:
        top.run(api, every_s=every_s)


# --- keys --------------------------------------------------------------------------------------------------------


@keys_app.command("new")
def keys_new(
    file: Annotated[Path, typer.Option(help="the key file; made when missing")],
    tenant: Annotated[
        str | None, typer.Option(help="whose key it is, with the scope infer; none: the key of an operator")
    ] = None,
    scopes: Annotated[
        str,
        typer.Option(
            help="some of infer, load, register, drain, metrics, admin, with commas; all but infer without --tenant"
        ),
    ] = "infer",
    note: Annotated[str, typer.Option(help="for whoever reads the file")] = "",
    requests_per_minute: Annotated[
        int | None, typer.Option(help="how many requests this key may make; none: any number", show_default=False)
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="prompt and answer tokens; none: any number", show_default=False)
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(help="how many may be under way at once; none: any number", show_default=False)
    ] = None,
) -> None:
    """Make a key: printed once, here; the file gets only its hash. Running servers see it within a second or two.

    Example: lorafleet keys new --tenant acme --scopes infer --requests-per-minute 600 --file keys.yaml
    """
    from lorafleet.cli.keys import add_key

    wanted = [scope.strip() for scope in scopes.split(",") if scope.strip()]
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    typer.echo(add_key(file, tenant, wanted, note, limits))


def main() -> None:
    """The console script: a Failure is one line on stderr and its status."""
    try:
        app()
    except CommandFailed as exc:
        sys.stdout.flush()
        typer.echo(f"lorafleet: {exc}", err=True)
        raise SystemExit(exc.status) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
