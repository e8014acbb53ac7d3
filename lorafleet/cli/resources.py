"""The table of a fleet's resources: the route, the columns and the actions of each.

To show a new field of an answer, add a column here. Commands that take more than a name are beside their subject:
`adapters`, `names`, `workers`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lorafleet.cli.columns import TIME, Column, Item, ListView, Shown, time_text
from lorafleet.cli.context import names_of
from lorafleet.cli.verbs import Action, Resource

_DIGEST_DIGITS = 12


def _tenants_text(tenants: Sequence[str] | None) -> str:
    """The tenants that may use an adapter, as one text; None means every tenant."""
    return "everyone" if tenants is None else ", ".join(tenants)


def _acceptance_text(found: Mapping[str, Item]) -> str:
    """Whether workers' answers are the trainer's, as one text: the results, and what differs by worker."""
    differing = [f"{worker}: {one['why']}" for worker, one in found.items() if one["result"] == "differs"]
    return "; ".join(differing) or ", ".join(sorted({one["result"] for one in found.values()}))


def _check_text(answer: Item) -> str:
    """What a comparison with an acceptance file has found, a line a worker."""
    results = {worker: f"{one['result']}: {one['why']}" for worker, one in answer["acceptance"].items()}
    lines = [f"{worker}: {text}" for worker, text in {**results, **answer["errors"]}.items()]
    return "\n".join(lines) or f"{answer['lora_id']} is ready on no worker: its next load is compared"


ADAPTERS = Resource(
    command="adapters",
    about="Adapters: register, show, change, remove.",
    route="/v1/adapters",
    metavar="LORA_ID",
    example="sql-expert/v1",
    view=ListView(
        (
            Column("lora_id"),
            Column("state", "status.state"),
            Column("ready", "status.replicas.ready"),
            Column("desired", "status.replicas.desired"),
            Column("rank", "status.card.rank"),
            Column("digest", "spec.digest", short=_DIGEST_DIGITS),
            Column("workers", "status.workers"),
            Column("tenants", "spec.tenants", form=_tenants_text),
            Column("base model", "spec.base_model", shown=Shown.wide),
            Column("alpha", "status.card.alpha", shown=Shown.wide),
            Column("modules", "status.card.target_modules", shown=Shown.wide),
            Column("dtype", "status.card.dtype", shown=Shown.wide),
            Column("effect", "status.card.effect", shown=Shown.wide),
            Column("bytes", "status.card.size_bytes", shown=Shown.wide),
            Column("requests/s", "status.requests_per_s", shown=Shown.wide),
            Column("idle s", "status.idle_s", shown=Shown.wide),
            Column("policy", "spec.policy", shown=Shown.wide),
            Column("source", "spec.source", shown=Shown.wide),
            Column("error", "status.error"),
            Column("note", "status.note", shown=Shown.if_any),
            Column("acceptance", "status.acceptance", form=_acceptance_text, shown=Shown.if_any),
        ),
        names=("lora_id",),
    ),
    list_help="List all adapters: state, replicas, workers.",
    list_example="adapters list -o name | xargs -n1 lorafleet adapters retry",
    show_help="Show one adapter, and the etag of its registration.",
    written=lambda item: item["spec"]["policy"] | {"tenants": item["spec"]["tenants"]},
    actions=(
        Action(
            words="rm",
            help="Remove an adapter: unload it everywhere, after its requests in flight.",
            method="DELETE",
            says="{name} is being removed",
        ),
        Action(
            words="retry",
            help="Clear an adapter's failure and quarantine, and load it again.",
            path="/retry",
            says="{name} is tried again; see: lorafleet adapters show {name}",
        ),
        Action(
            words="check",
            help="Compare each worker's answers with the adapter's acceptance file now.",
            path="/check",
            says=_check_text,
        ),
    ),
)


def _targets_text(targets: Sequence[Item]) -> str:
    """The targets of an alias with their weights."""
    return ", ".join(f"{target['lora_id']} ({target['weight']:g})" for target in targets)


def _pending_targets_text(alias: Item) -> str | None:
    """The targets that an alias is about to get; None for one that has them."""
    return _targets_text(alias["spec"]["targets"]) if alias["status"]["pending"] else None


def pending_text(pending: Item | None) -> str | None:
    """The reason why an alias has not changed yet; None for an alias without a pending change."""
    return None if pending is None else _lacks_text(pending["lacks"]) or pending["error"]


def _lacks_text(lacks: Mapping[str, str]) -> str:
    """One text with each adapter and its missing condition, such as a ready replica."""
    return "; ".join(f"{lora_id}: {missing}" for lora_id, missing in sorted(lacks.items()))


ALIASES = Resource(
    command="aliases",
    about="Aliases: names for one or more adapters, with weights.",
    route="/v1/aliases",
    metavar="ALIAS",
    example="sql-expert",
    view=ListView(
        (
            Column("alias", "name"),
            Column("targets (weight)", "status.targets", form=_targets_text),
            Column("pending", _pending_targets_text, shown=Shown.wide),
            Column("waits for", "status.pending", form=pending_text, shown=Shown.wide),
        ),
        names=("name",),
    ),
    list_help="List all aliases and their targets.",
    show_help="Show an alias, its targets, and the change that waits.",
    actions=(
        Action(words="rm", help="Remove an alias; its adapters stay.", method="DELETE", says="{name} is removed"),
    ),
)

COMPARISON = ListView(
    (
        Column("target", "lora_id"),
        Column("share"),
        # A target whose traffic the reader may not see has no figures.
        Column("requests", "total.requests"),
        Column("errors", "total.errors"),
        Column("refused", "total.refusals"),
        Column("first token p50 s", "total.first_token_s", lambda first: (first or {}).get("p50")),
        Column("p95 s", "total.first_token_s", lambda first: (first or {}).get("p95")),
        Column("s per token", "total.token_s"),
        Column("output tokens", "total.output_tokens"),
        Column("cache hits", "total.hit_real"),
        Column("first token p99 s", "total.first_token_s.p99", shown=Shown.wide),
        Column("whole p95 s", "total.whole_s.p95", shown=Shown.wide),
        Column("cold starts", "total.cold_starts", shown=Shown.wide),
        Column("mean wait s", "total.waited_s", shown=Shown.wide),
        Column("worse"),
    ),
    names=("lora_id",),
)


def rollout_line(item: Item) -> str:
    """A rollout's state in one line."""
    now = item["status"]
    to = ", ".join(target["lora_id"] for target in now["to"])
    state = "paused" if now["paused"] else now["state"]
    line = f"{item['name']} -> {to}: {state}, step {now['step'] + 1} of {len(now['steps'])}, weight {now['weight']:g}"
    return line + "".join(f" ({detail})" for detail in (_lacks_text(now["lacks"]), now["reason"]) if detail)


def _rollout_story(item: Item) -> Sequence[str]:
    """A rollout's state, and the traffic of both versions."""
    return [rollout_line(item), *(f"  {name}: {_counts_text(item['status'][name])}" for name in ("old", "new"))]


def _counts_text(counts: Item) -> str:
    """A version's requests, errors and mean time to first token."""
    mean = counts["mean_first_token_s"]
    first = "" if mean is None else f", first token after {mean:.3g} s"
    return f"{counts['requests']} requests ended, {counts['errors']} errors ({counts['error_rate']:.1%}){first}"


ROLLOUTS = Resource(
    command="rollout",
    about="Rollouts: move an alias to another version in steps.",
    route="/v1/aliases/{}/rollout",
    metavar="ALIAS",
    example="sql-expert",
    show_help="Show the rollout in progress, or how the last one ended.",
    story=_rollout_story,
    actions=(
        Action(
            words="pause",
            help="Pause a rollout at its step; it still goes back if the new version is worse.",
            method="PATCH",
            body={"paused": True},
            says=rollout_line,
        ),
        Action(
            words="resume", help="Resume a paused rollout.", method="PATCH", body={"paused": False}, says=rollout_line
        ),
        Action(
            words="abort",
            help="End a rollout; the alias returns to its former target at once.",
            method="DELETE",
            says=rollout_line,
        ),
    ),
)

PUBLISHED = Resource(
    command="published",
    about="Published names: list, show, remove.",
    route="/v1/published",
    example="team-a/policy",
    view=ListView(
        (
            Column("name"),
            Column("points at", "status.lora_id"),
            Column("digest", "status.digest", short=_DIGEST_DIGITS),
            Column("workers", "status.workers"),
            Column("kept", "status.versions", form=len),
            Column("of at most", "status.keep_versions"),
            Column("note", "status.note", shown=Shown.if_any),
            Column("tenant", "spec.tenant"),
            Column(
                "all versions", "status.versions", lambda kept: [each["lora_id"] for each in kept or ()], Shown.wide
            ),
            Column("replicas", "spec.replicas", shown=Shown.wide),
            Column("max staleness s", "status.max_staleness_s", shown=Shown.wide),
            Column("in place of the base model", "status.shadows_base", shown=Shown.wide),
        ),
        names=("name",),
    ),
    list_help="List the published names: the version that each points at, where it is ready, and how many are kept.",
    list_example="published list -o wide",
    show_help="Show a published name and all versions of it that are kept.",
    actions=(
        Action(
            words="rm",
            help="Remove a published name with all its versions, each after its requests in flight.",
            method="DELETE",
            says="{name} is being removed, with all its versions",
        ),
    ),
)

PAUSES = Resource(
    command="pauses",
    about="Pauses: new requests of a tenant, or of all, that routers hold.",
    route="/v1/pauses",
    view=ListView(
        (
            Column("holds requests of", "scope"),
            Column("mode"),
            Column("by", "owner"),
            Column("since", "began_at", time_text),
            Column("ends by itself", "expires_at", time_text),
            Column("still run", "running"),
            Column("routers behind", "routers_behind"),
            Column("tenant", shown=Shown.wide),
            Column("namespace", shown=Shown.wide),
        ),
        names=("scope",),
    ),
    list_help="List the pauses in force: whose requests they hold, who made them, and when they end by themselves.",
)

PLACEMENTS = Resource(
    command="placements",
    about="Placements: which adapter is on which worker.",
    route="/v1/placements",
    view=ListView(
        (
            Column("lora_id"),
            Column("worker", "worker_id"),
            Column("state"),
            Column("location"),
            Column("desired", form=lambda is_desired: "yes" if is_desired else "no"),
            Column("digest", shown=Shown.wide),
        ),
        names=("lora_id", "worker_id"),
    ),
)


def drain_text(drain: Mapping[str, Any] | None) -> str:
    """The progress of a worker's drain in one line; "" for a worker that does not drain."""
    if drain is None:
        return ""
    left = len(drain["left"])
    if drain["phase"] == "drained":
        return f"drained, {left} not moved" if left else "drained"
    parts = [f"{drain['moved']} of {drain['moves']} adapters moved"]
    if drain["phase"] == "finishing":
        return ", ".join([*parts, f"{drain['requests']} requests left"])
    if left:
        parts.append(f"{drain['left_bytes'] / 1e6:.0f} MB left")
    if left > len(drain["stuck"]):
        parts.append(f"about {drain['expected_s']:.0f} s")
    if drain["deadline_in_s"] is not None:
        parts.append(f"at most {drain['deadline_in_s']:.0f} s")
    if drain["stuck"]:
        parts.append(f"{len(drain['stuck'])} fit nowhere now")
    return ", ".join(parts)


WORKERS = Resource(
    command="workers",
    about="Workers: an engine with its agent.",
    route="/v1/workers",
    metavar="WORKER",
    example="w1",
    view=ListView(
        (
            Column("worker", "id"),
            Column("state", lambda item: f"{item['state']}, pod ends" if item.get("is_terminating") else item["state"]),
            Column("drain", form=drain_text, shown=Shown.if_any),
            Column("zone", shown=Shown.if_any),
            Column("node", shown=Shown.if_any),
            Column("base model", "base_model"),
            Column("adapters"),
            Column("free slots", lambda item: item["capacity"].get("available_slots")),
            Column("capacity", shown=Shown.wide),
            Column("orphans", shown=Shown.wide),
            Column("kept out", "kept_out", shown=Shown.if_any),
            Column("agent", "agent_url"),
            Column("engine", "engine_url"),
            Column("LoRA kernels", "punica", shown=Shown.wide),
            Column("takes no adapters", "refusal", shown=Shown.if_any),
        ),
        names=("id",),
    ),
    list_help="List all workers: state, adapters, free slots.",
    show_help="Show one worker: state, capacity, adapters, files, load, and how far a drain is.",
    actions=(
        Action(
            words="cordon",
            help="Place no new adapters on a worker; it keeps serving those it has.",
            path="/cordon",
            says="{name} is cordoned",
        ),
        Action(
            words="uncordon",
            help="Use a cordoned or drained worker again.",
            path="/uncordon",
            says="{name} is in use again",
        ),
    ),
)

POLICY = Resource(
    command="policy",
    about="The global placement policy.",
    route="/v1/policy",
    show_help="Show the policy in force and its etag.",
)

ORPHANS = Resource(
    command="orphans",
    about="Orphans: adapters on workers that are not registered.",
    route="/v1/orphans",
    view=ListView(
        (
            Column("lora_id"),
            Column("digest", "card.digest", short=_DIGEST_DIGITS),
            Column("workers"),
            Column("base model", "card.base_model"),
            Column("rank", "card.rank"),
            Column("source", "card.source"),
            Column("named by settings", "is_configured", lambda is_configured: "yes" if is_configured else "no"),
            Column("loaded by", "is_foreign", lambda is_foreign: "another client" if is_foreign else "the fleet"),
            Column("engine name", "engine_name", shown=Shown.wide),
            Column("bytes", "card.size_bytes", shown=Shown.wide),
            Column("cannot be adopted because", "problem"),
        ),
        names=("lora_id",),
    ),
    list_help="List adapters on workers that are not registered: another client loaded them, the store was lost or"
    " restored, or a worker's settings name them and they cannot be adopted.",
)


def _change_details(item: Item) -> object:
    """The details of a history entry: the body of a change; severity, cause and next step of an incident."""
    if item.get("severity") is None:
        return item["body"]
    cause = str(item["body"].get("cause", "")).partition("\n")[0]
    said = f"{item['severity']}: {cause}" if cause else str(item["severity"])
    return f"{said}. Next: {item['next_step']}" if item.get("next_step") else said


HISTORY = ListView(
    (
        Column("id", shown=Shown.wide),
        Column(TIME, "at", time_text),
        Column("what", "kind"),
        Column("of", "subject"),
        Column("by", "actor"),
        Column("details", _change_details),
        Column(
            "all details", lambda item: item["body"] if item.get("severity") is not None else None, shown=Shown.wide
        ),
    ),
    names=("subject",),
)


def usage_view(group_by: Sequence[str], currency: str | None) -> ListView:
    """The columns of usage that is grouped by these fields, with costs in this currency."""
    return ListView(
        (
            *(Column(name.replace("_", " "), f"group.{name}") for name in group_by),
            Column("requests", "usage.requests"),
            Column("succeeded", "usage.succeeded", shown=Shown.wide),
            Column("refused", "usage.refused", shown=Shown.wide),
            Column("failed", "usage.failed"),
            Column("cancelled", "usage.cancelled", shown=Shown.wide),
            Column("prompt tokens", "usage.prompt_tokens"),
            Column("cached", "usage.cached_tokens"),
            Column("completion tokens", "usage.completion_tokens"),
            Column("prefill s", "usage.prefill_s"),
            Column("decode s", "usage.decode_s"),
            Column("slot s", "usage.slot_s"),
            Column("loads", "usage.loads"),
            Column("fetched bytes", "usage.fetched_bytes", shown=Shown.wide),
            *(() if currency is None else (Column(f"cost ({currency})", "cost"),)),
        ),
        names=tuple(f"group.{name}" for name in group_by),
    )


DECISIONS = ListView(
    (
        Column(TIME, "at", time_text),
        Column("adapter"),
        Column("worker", "worker_id"),
        Column("prompt", "prompt_tokens"),
        Column("predicted", "cached_tokens"),
        Column("engine's", "engine_cached_tokens"),
        Column("trust"),
        Column("waited s", "waited_s"),
        Column("first data s", "first_data_s"),
        Column("policy", shown=Shown.wide),
        Column("tokens from", "tokens_from", shown=Shown.wide),
        Column("kappa", shown=Shown.wide),
        Column("rho", shown=Shown.wide),
        Column("request", "request_id"),
    ),
    names=("request_id",),
    part="the router's process in slot",
)

REQUESTS = ListView(
    (
        Column(TIME, "at", time_text),
        Column("status"),
        Column("code"),
        Column("limit"),
        Column("tenant"),
        Column("key"),
        Column("adapter"),
        Column("worker"),
        Column("seconds", "duration_s"),
        Column("asked", shown=Shown.wide),
        Column("attempts", shown=Shown.wide),
        Column("first data s", "first_data_s", shown=Shown.wide),
        Column("prompt", "prompt_tokens", shown=Shown.wide),
        Column("output", "completion_tokens", shown=Shown.wide),
        Column("cause", shown=Shown.wide),
        Column("request", "request_id"),
    ),
    names=("request_id",),
    part="router",
)

# For options that name one; arguments are completed by `Resource.argument`.
adapter_names = names_of(ADAPTERS.route, "lora_id")
worker_names = names_of(WORKERS.route, "id")
