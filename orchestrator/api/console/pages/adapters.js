// Adapters: find one; then where it is and why, how it does, and what to do when it does not.
import { html, useMemo, useStore } from "../lib.js";
import { all, get, me, useLoad, useRange } from "../api.js";
import { Table } from "../table.js";
import { Choice, Facts, Head, Loaded, Panel, Search, State, useLater } from "../parts.js";
import { AdapterLink, Link, WorkerLink, href, place, setQuery } from "../route.js";
import { bytes, digest12, lost, missing, number, plural, seconds, share, span } from "../format.js";
import { totalColumns, totals, traffic, TrafficCharts } from "./fleet.js";
import { EventLines, HistoryLines } from "./activity.js";
import { WhySlow } from "./causes.js";
import { Orphans } from "./orphans.js";
import { AdapterTable } from "./selection.js";
import { SharesPanel } from "./shares.js";
import { AdapterActions, RegisterButton, RebalanceButton, UploadButton } from "./actions.js";

const unique = (values) => [...new Set(values.filter(Boolean))].sort();

export function AdaptersPage() {
  const { query } = useStore(place), rangeS = useRange();
  const text = query.get("q") || "", state = query.get("state") || "", tenant = query.get("tenant") || "", base = query.get("base") || "", show = query.get("show") || "table";
  const asked = useLater(text.toLowerCase());
  const found = useLoad((signal) => Promise.all([all("/v1/adapters?limit=2000"), totals("adapter", rangeS, signal)]), [rangeS]);
  const rows = useMemo(() => {
    if (!found.data) return [];
    const [adapters, sums] = found.data, byName = new Map(sums.map((one) => [one.name, one]));
    return adapters.map((adapter) => ({ ...adapter, sums: byName.get(adapter.lora_id) }));
  }, [found.data]);
  const shown = useMemo(() => rows.filter((row) => (!asked || row.lora_id.toLowerCase().includes(asked)) && (!state || stateOf(row) === state)
    && (!tenant || (row.tenants || []).includes(tenant)) && (!base || row.base_model === base)), [rows, asked, state, tenant, base]);
  return html`<${Head} title="Adapters" hasRange><${RebalanceButton}/><${UploadButton}/><${RegisterButton}/><//>
    <div class="bar"><${Search} value=${text} label="Search adapters" placeholder="Search by name" onInput=${(value) => setQuery({ q: value })}/>
      <${Choice} label="State" value=${state} options=${[["", "any state"], ...unique(rows.map(stateOf)).map((one) => [one, one])]} onChange=${(value) => setQuery({ state: value })}/>
      <${Choice} label="Tenant" value=${tenant} options=${[["", "any tenant"], ...unique(rows.flatMap((row) => row.tenants || [])).map((one) => [one, one])]} onChange=${(value) => setQuery({ tenant: value })}/>
      <${Choice} label="Base model" value=${base} options=${[["", "any base model"], ...unique(rows.map((row) => row.base_model)).map((one) => [one, one])]} onChange=${(value) => setQuery({ base: value })}/>
      <${Choice} label="Show as" value=${show} options=${[["table", "table"], ["map", "placement map"], ["orphans", "orphans"]]} onChange=${(value) => setQuery({ show: value === "table" ? "" : value })}/>
      <span class="note">${found.data ? `${shown.length === rows.length ? "" : shown.length + " of "}${plural(rows.length, "adapter")}` : ""}</span></div>
    ${show === "orphans" ? html`<${Orphans}/>` : html`<${Loaded} of=${found}>${() => show === "map" ? html`<${PlacementMap} rows=${shown}/>` : html`<${AdapterTable} rows=${shown} columns=${COLUMNS}/>`}<//>`}`;
}

// The state, or that it has none of the copies that it should have, and a reason why.
export const stateOf = (row) => (row.error && row.state === "registered" ? "cannot load" : row.state);

const COLUMNS = [
  { id: "id", label: "adapter", value: (row) => row.lora_id, cell: (row) => html`<${AdapterLink} id=${row.lora_id}/>` },
  { id: "state", label: "state", value: stateOf, cell: (row) => html`<span title=${row.error || ""}><${State} is=${stateOf(row)}/></span>` },
  { id: "replicas", label: "ready", numeric: true, title: "replicas ready / wanted", value: (row) => row.replicas.ready, cell: (row) => html`<span class=${row.replicas.ready < row.replicas.desired ? "warn-text" : ""}>${row.replicas.ready}/${row.replicas.desired}</span>` },
  ...totalColumns((row) => row.sums),
  { id: "prompt", label: "prompt", numeric: true, hide: "wide", title: "mean tokens of a prompt", value: (row) => promptOf(row.sums), cell: (row) => number(promptOf(row.sums), 0) },
  { id: "cold", label: "cold starts", numeric: true, hide: "wide", value: (row) => row.sums?.cold_starts ?? 0, cell: (row) => number(row.sums?.cold_starts ?? 0) },
  { id: "workers", label: "workers", hide: "narrow", value: (row) => row.workers.join(" "), cell: (row) => html`<span class="clip">${row.workers.slice(0, 3).map((one, at) => html`${at ? ", " : ""}<${WorkerLink} id=${one}/>`)}${row.workers.length > 3 ? ` +${row.workers.length - 3}` : ""}</span>` },
  { id: "tenants", label: "tenants", hide: "wide", value: (row) => (row.tenants || ["everyone"]).join(", "), cell: (row) => html`<span class="clip">${row.tenants ? row.tenants.join(", ") || "none" : "everyone"}</span>` },
  { id: "rank", label: "rank", numeric: true, hide: "wide", value: (row) => row.card?.rank ?? null, cell: (row) => number(row.card?.rank ?? null) },
  { id: "base", label: "base model", hide: "wide", value: (row) => row.base_model || "", cell: (row) => row.base_model || missing },
];
const promptOf = (sums) => (sums && sums.requests > sums.refusals ? Math.round(sums.prompt_tokens / (sums.requests - sums.refusals)) : null);

// Adapters by workers: one mark for each copy.
function PlacementMap({ rows }) {
  const found = useLoad(() => Promise.all([all("/v1/workers"), all("/v1/placements?limit=10000")]), []);
  const columns = useMemo(() => {
    if (!found.data) return null;
    const [workers, placements] = found.data, at = new Map(workers.map((worker, index) => [worker.id, index])), held = new Map();
    for (const item of placements) held.has(item.lora_id) ? held.get(item.lora_id).push(item) : held.set(item.lora_id, [item]);
    const width = workers.length * 12;
    const mark = (item) => item.state === "ready" ? "" : item.state === "failed" ? "bad" : item.desired ? "warn" : "plain";
    return [COLUMNS[0], COLUMNS[1], { id: "map", label: `${plural(workers.length, "worker")}, ${workers[0]?.id ?? ""} to ${workers.at(-1)?.id ?? ""}`, value: (row) => (held.get(row.lora_id) || []).length,
      cell: (row) => html`<span class="map-row" role="img" aria-label=${(held.get(row.lora_id) || []).map((item) => `${item.worker_id} ${item.state}`).join(", ") || "nowhere"} style=${{ width: width + "px" }}>
        ${(held.get(row.lora_id) || []).map((item) => html`<i class=${mark(item)} title=${`${item.worker_id}: ${item.state}, ${item.location}`} style=${{ left: (at.get(item.worker_id) ?? 0) * 12 + "px" }}></i>`)}</span>` }];
  }, [found.data]);
  return html`<${Loaded} of=${found}>${() => html`<p class="note"><span class="state good">● ready</span> · <span class="state warn">◐ wanted, loading or draining</span> · <span class="state bad">▲ failed</span> · one column a worker, in the order of their names</p><${Table} label="Placement map" name="map" rows=${rows} rowKey=${(row) => row.lora_id} sort="-map" columns=${columns} empty="No adapter matches."/>`}<//>`;
}

// What to do about an error, by its code.
const NEXT = [
  [/rank_too_big|max_lora_rank/, "No worker takes this rank. Start workers with a larger --max-lora-rank, or train with a smaller one."],
  [/source_forbidden|forbidden|credentials|401|403/, "Give the workers credentials for the source (secret_ref), then retry."],
  [/source_missing|not_found|404/, "The source has no such file: register another source under a new lora_id."],
  [/weights_not_finite/, "Its weights are NaN, infinite or far too large: the training run has diverged. Publish its last checkpoint before that."],
  [/weights_too_large/, "Its change of the weights is far too large, and the policy refuses that. Publish an earlier checkpoint, check lora_alpha, or set large_weights: note."],
  [/incomplete|weights_empty|weights_corrupt|config_invalid/, "Files are missing or damaged at its source: save the adapter again (adapter_config.json and adapter_model.safetensors), then retry."],
  [/digest_mismatch/, "The source's bytes changed. Register them as a new version."],
  [/no_effect|zero/, "Its weights change nothing in this engine: check the modules it was trained on."],
  [/not_accepted/, "Its log-probabilities in the engine are not the trainer's, and its policy requires that. See docs/acceptance.md: certify and publish it again, or set acceptance: warn."],
  [/modules_ignored/, "The engine lacks a part of its modules. Set ignored_modules: accept in its policy to serve it all the same."],
  [/no free slot|no slot/, "Every slot is in use: unpin or delete an adapter, raise the priority of this one, or add workers."],
  [/no_worker|worker_unreachable|unreachable/, "The worker did not answer. It is tried again elsewhere; look at the worker."],
  [/base_model|wrong_base/, "It was trained on another base model than the workers serve."],
];
export const nextStep = (error) => NEXT.find(([pattern]) => pattern.test(error))?.[1] || "Mend the cause, then retry: it forgets the failure and loads again.";

// The model card, beside base model, digest and source, which are known before it.
const cardFacts = (card) => [
  ["Rank / alpha", card ? `${number(card.rank || null)} / ${number(card.alpha)}` : missing], ["Modules", card?.target_modules.join(", ") || missing], ["Numbers", card?.dtype || missing], ["Size", bytes(card?.size_bytes || null)],
  ["Effect on answers", card?.effect ? html`<${State} is=${card.effect}/>` : "not checked"],
];

// What the comparison with its acceptance file found, worker by worker.
const acceptanceOf = (item) => {
  const found = Object.entries(item.acceptance || {});
  if (!found.length) return item.card?.acceptance_file ? "not compared yet" : "no acceptance file";
  return html`<ul class="lines">${found.map(([worker, one]) => html`<li key=${worker}><b><${WorkerLink} id=${worker}/></b> <${State} is=${one.result}/> <span class="muted">${one.why}</span></li>`)}</ul>`;
};

export function AdapterPage({ id }) {
  const rangeS = useRange(), path = id.split("/").map(encodeURIComponent).join("/");
  const found = useLoad((signal) => Promise.all([
    get("/v1/adapters/" + path, { signal }), get("/v1/placements?limit=1000&lora_id=" + encodeURIComponent(id), { signal }), get("/v1/aliases?limit=1000", { signal }),
    get("/v1/published?limit=1000", { signal }).catch(() => ({ data: [] })), get("/v1/workers?limit=1000", { signal }),
  ]), [id]);
  const series = useLoad((signal) => traffic("adapter", id, rangeS, signal), [id, rangeS], { follow: "ticks" });
  const history = useLoad((signal) => get(`/v1/history?limit=60&adapter=${encodeURIComponent(id)}`, { signal }), [id]);
  const adapter = found.data?.[0];
  return html`<${Head} title=${id} crumbs=${[html`<${Link} to="adapters">Adapters<//> /`]} hasRange state=${adapter && html`<${State} is=${stateOf(adapter)}/>`}>${adapter && html`<${AdapterActions} adapter=${adapter}/>`}<//>
    <${Loaded} of=${found}>${([item, placements, aliases, published, workers]) => html`
      ${item.error && html`<div class="notice bad" role="alert"><b>${item.error}</b><br/>${nextStep(item.error)}</div>`}
      ${item.note && html`<p class="notice">${item.note}</p>`}
      ${item.kept_out_of?.length > 0 && html`<p class="notice">An operator keeps it out of ${item.kept_out_of.map((worker, at) => html`${at ? ", " : ""}<${WorkerLink} id=${worker}/>`)}, where it can be let in again.</p>`}
      <${Panel}><${Facts} rows=${[
        ["Replicas ready / wanted", `${item.replicas.ready} / ${item.replicas.desired}`], ["Requests now", number(item.requests_per_s, 2) + " /s"], ["Base model", item.base_model || "not inspected yet"], ...cardFacts(item.card),
        ["Tenants", item.tenants ? item.tenants.join(", ") || "none" : "everyone"], ["Loading", policyText(item.policy)],
        ["Asked last", item.idle_s === null ? (item.requests_per_s > 0 ? "now" : "not known") : span(item.idle_s) + " ago"], ["Digest", html`<code title=${item.digest}>${digest12(item.digest)}</code>`], ["Source", html`<code>${item.source}</code>`, true],
        ["Trainer's log-probabilities", acceptanceOf(item), true],
      ]}/><//>
      <div class="grid two"><${Panel} title="Where it is, and why"><${Copies} item=${item} placements=${placements.data} workers=${workers.data} history=${history.data}/><//>
        <${Panel} title="Names that lead here"><${Names} id=${id} aliases=${aliases.data} published=${published.data}/><//></div>`}<//>
    <${Loaded} of=${series} shape="charts">${(one) => html`<${WhySlow} total=${one.total} workers=${(found.data?.[4].data || []).filter((each) => adapter?.workers.includes(each.id))}/><${Totals} total=${one.total} rangeS=${rangeS}/><${TrafficCharts} found=${one}/>`}<//>
    <div class="grid two"><${SharesPanel} title="By worker" kind="adapter" name=${id} by="worker" rangeS=${rangeS}/>
      ${!me.get()?.status.is_confined_to_tenant && html`<${SharesPanel} title="By tenant" kind="adapter" name=${id} by="tenant" rangeS=${rangeS}/>`}</div>
    <div class="grid two"><${Panel} title="History"><${Loaded} of=${history}>${(page) => html`<${HistoryLines} entries=${page.data}/>`}<//><//><${Panel} title="Events"><${EventLines} most=${20} about=${id}/><//></div>`;
}

function Totals({ total }) {
  const tiles = [["Requests", number(total.requests), `${number(total.errors)} errors, ${number(total.refusals)} refused`], ["First token, p95", seconds(total.first_token_s.p95), `p50 ${seconds(total.first_token_s.p50)} · p99 ${seconds(total.first_token_s.p99)}`],
    ["Mean wait for room", seconds(total.waited_s), "in the routers"], ["Cold starts", number(total.cold_starts), total.cold_s === null ? "nobody waited for a load" : `${seconds(total.cold_s)} each`],
    ["Cache hits", share(total.hit_real), `predicted ${share(total.hit_predicted)}${lost(total)}`], ["Tokens", number(total.output_tokens), `${number(total.prompt_tokens)} in prompts`]];
  return html`<div class="tiles">${tiles.map(([label, value, under]) => html`<div class="tile" key=${label}><span class="label">${label}</span><span class="value">${value}</span><span class="under">${under}</span></div>`)}</div>`;
}

const policyText = (policy) => [policy.loading || "as the fleet's policy", policy.pinned && "pinned", policy.min_replicas !== null && policy.min_replicas !== undefined && `at least ${policy.min_replicas}`, policy.max_replicas && `at most ${policy.max_replicas}`, policy.priority ? `priority ${policy.priority}` : "", policy.ttl_s ? `unloaded after ${span(policy.ttl_s)} idle` : "", policy.acceptance && `acceptance: ${policy.acceptance}`].filter(Boolean).join(", ");

function Copies({ item, placements, workers, history }) {
  const reasons = new Map();
  for (const entry of history?.data || []) {
    const worker = entry.body?.worker_id || entry.body?.worker;
    if (worker && /load/.test(entry.kind) && !reasons.has(worker)) reasons.set(worker, entry);
  }
  if (!placements.length) return html`<p class="muted">It is on no worker, and none is to have it${item.error ? ": it cannot be loaded, see above" : ["eager", "everywhere"].includes(item.policy.loading) ? "" : ": it is loaded with its first request"}.</p>`;
  return html`<ul class="lines">${placements.map((copy) => { const why = reasons.get(copy.worker_id); return html`<li key=${copy.worker_id}><b><${WorkerLink} id=${copy.worker_id}/></b><${State} is=${copy.desired && copy.state === "remote" ? "wanted" : copy.state}/><span class="tag">${copy.location}</span>
    <span class="grow muted">${copy.desired ? "wanted here" : "kept, not wanted"}${why?.body?.reason ? `: ${why.body.reason}` : ""}${why?.body?.duration_s ? `, loaded in ${seconds(why.body.duration_s)}` : ""}</span></li>`; })}</ul>`;
}

function Names({ id, aliases, published }) {
  const rows = [];
  const names = new Set(published.map((one) => one.name));
  for (const alias of aliases.filter((one) => !names.has(one.name))) {
    const target = alias.targets.find((one) => one.lora_id === id), coming = alias.pending && alias.spec.targets.find((one) => one.lora_id === id);
    const whole = alias.targets.reduce((sum, one) => sum + one.weight, 0);
    if (target) rows.push([alias.name, html`<${Link} to=${"aliases/" + alias.name}>${alias.name}<//>`, `alias, ${share(whole ? target.weight / whole : 0)} of its sessions`]);
    else if (coming) rows.push([alias.name, html`<${Link} to=${"aliases/" + alias.name}>${alias.name}<//>`, "alias, about to shift here"]);
  }
  for (const one of published) {
    const version = (one.versions || []).find((each) => each.lora_id === id);
    if (version || one.lora_id === id) rows.push([one.name, html`<${Link} to=${"published/" + one.name}>${one.name}<//>`, one.lora_id === id ? "published name, this is its current version" : "published name, an older version"]);
  }
  if (!rows.length) return html`<p class="muted">No alias, rollout or published name leads here. Clients ask for it by its own name.</p>`;
  return html`<ul class="lines">${rows.map(([key, what, why]) => html`<li key=${key}><b>${what}</b><span class="grow muted">${why}</span></li>`)}</ul>`;
}
