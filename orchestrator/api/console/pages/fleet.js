// The fleet: is it well, how fast is it, what needs somebody.
import { html, useMemo, useStore } from "../lib.js";
import { all, get, me, now, useLoad, useRange } from "../api.js";
import { Chart, Spark } from "../chart.js";
import { Table } from "../table.js";
import { Head, Loaded, Meter, Panel, State, Tile } from "../parts.js";
import { AdapterLink, Link, WorkerLink } from "../route.js";
import { ZONE, clock, lost, missing, number, plural, seconds, share } from "../format.js";
import { EventLines, HistoryLines } from "./activity.js";
import { ErrorCauses, loadChanges } from "./causes.js";
import { Pauses } from "./pauses.js";

export const traffic = (kind, name, rangeS, signal) => get(`/v1/traffic?kind=${kind}&name=${encodeURIComponent(name)}&range_s=${rangeS}`, { signal });
export const totals = (kind, rangeS, signal) => get(`/v1/traffic/totals?kind=${kind}&range_s=${rangeS}`, { signal }).then((found) => found.data);
const sum = (counts) => Object.values(counts || {}).reduce((whole, count) => whole + count, 0);

export function FleetPage() {
  return me.get()?.status.is_confined_to_tenant ? html`<${OwnPage} tenant=${me.get().spec.tenant}/>` : html`<${WholeFleetPage}/>`;
}

// What a key of one tenant sees first: its own traffic and adapters.
function OwnPage({ tenant }) {
  const rangeS = useRange();
  const series = useLoad((signal) => traffic("tenant", tenant, rangeS, signal), [rangeS], { follow: "ticks" });
  const failed = useLoad((signal) => get("/v1/adapters?state=failed&limit=20", { signal }), []);
  return html`<${Head} title=${tenant} hasRange/>
    <${Loaded} of=${series} shape="charts">${(found) => html`<${Tiles} found=${found}/><${Pauses} isQuiet/>
      ${failed.data?.data.length > 0 && html`<${Panel} title="Needs attention"><ul class="lines">${failed.data.data.map((one) => html`<li key=${one.lora_id}><${State} is="failed"/><b><${AdapterLink} id=${one.lora_id}/></b><span class="grow">${one.error}</span></li>`)}</ul><//>`}
      <${TrafficCharts} found=${found}/>`}<//>
    <${Panel} title="Now" note="what changes in its adapters, as it happens"><${EventLines} most=${12}/><//>`;
}

function WholeFleetPage() {
  const rangeS = useRange();
  const changes = useLoad((signal) => loadChanges(signal), []), keys = useLoad((signal) => totals("key", rangeS, signal), [rangeS], { follow: "ticks" });
  const marks = useMemo(() => (changes.data || []).map((entry) => ({ at: Date.parse(entry.at) / 1000 })), [changes.data]);
  const series = useLoad((signal) => traffic("fleet", "", rangeS, signal), [rangeS], { follow: "ticks" });
  return html`<${Head} title="Fleet" hasRange/>
    <${Loaded} of=${series} shape="charts">${(found) => html`<${Tiles} found=${found}/><${Pauses} isQuiet/><${Attention}/><${ErrorCauses} found=${found} changes=${changes.data || []} keys=${keys.data} load=${(seconds, signal) => traffic("fleet", "", seconds, signal)}/><${TrafficCharts} found=${found} marks=${marks} isFleet/>`}<//>
    <${Engines}/>
    <div class="grid two"><${Panel} title="Changes" note=${`by people; dotted lines in Errors and refusals; times in ${ZONE}`} actions=${html`<${Link} to="activity" query=${{ show: "changes" }}>All changes<//>`}><${Loaded} of=${changes}>${(list) => html`<${HistoryLines} entries=${list.filter((entry) => !entry.severity).slice(0, 8)} empty="Nobody has changed anything yet."/>`}<//><//><${Incidents}/></div>
    <${BaseModels} rangeS=${rangeS}/>`;
}

function Tiles({ found }) {
  const fleet = useStore(now), { total, points } = found;
  const waiting = fleet ? sum(fleet.now.waiting) : 0, held = fleet ? sum(fleet.now.held) : 0;
  const failing = total.requests ? total.errors / total.requests : null;
  const tiles = [
    ["Requests", number(last(points.requests_per_s)), "/s", `${number(total.requests)} in all`, points.requests_per_s, 0],
    ["First token, p95", seconds(total.first_token_s.p95), "", total.first_token_s.p95 === null ? "no streamed answers" : `p50 ${seconds(total.first_token_s.p50)} · p99 ${seconds(total.first_token_s.p99)}`, points.first_token_s.p95, 1],
    ["Output", number(last(points.output_tokens_per_s)), "tokens/s", `${number(total.output_tokens)} tokens`, points.output_tokens_per_s, 2],
    ["Cache hits", share(total.hit_real), "", `predicted ${share(total.hit_predicted)}${lost(total)}`, points.hit_real, 2],
    ["Waiting now", fleet ? number(waiting + held) : missing, "", whoWaits(fleet), points.gauges.waiting || [], 1, waiting + held > 20 ? "warn" : ""],
    ["Failed", failing === null ? missing : share(failing, failing && failing < 0.01 ? 2 : 1), "", `${number(total.errors)} errors · ${number(total.refusals)} refused`, points.errors_per_s, 5, failing > 0.01 ? "bad" : ""],
  ];
  return html`<div class="tiles">${tiles.map(([label, value, unit, under, values, at, tone]) => html`<${Tile} key=${label} label=${label} value=${value} unit=${unit} under=${under} tone=${tone} to=${BEHIND[label]?.[0]} query=${BEHIND[label]?.[1]}><${Spark} values=${values} at=${at}/><//>`)}</div>`;
}

// Where a tile leads: to who or what makes the figure.
const BEHIND = {
  Requests: ["adapters"], "First token, p95": ["adapters", { sort: "-p95" }], Output: ["adapters", { sort: "-output" }], "Cache hits": ["adapters", { sort: "hit" }],
  "Waiting now": ["tenants", { "sort-tenants": "-waiting" }], Failed: ["adapters", { sort: "-errors" }],
};

// The tenants with the most waiting requests.
function whoWaits(fleet) {
  if (!fleet) return "";
  const names = [...new Set([...Object.keys(fleet.now.waiting), ...Object.keys(fleet.now.held)])].map((name) => [name || "no tenant", (fleet.now.waiting[name] || 0) + (fleet.now.held[name] || 0)]).filter(([, count]) => count).sort((left, right) => right[1] - left[1]);
  return names.length ? names.slice(0, 2).map(([name, count]) => `${name} ${count}`).join(", ") + (names.length > 2 ? `, ${names.length - 2} more` : "") : "nobody";
}

const last = (values) => { for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at]; return null; };

// The charts of any series: the fleet's, an adapter's, a worker's, a tenant's.
export function TrafficCharts({ found, isFleet = false, marks }) {
  const { points } = found, at = points.at, each = `each ${found.step_s < 60 ? found.step_s + " s" : found.step_s / 60 + " min"}`;
  const codes = Object.entries(points.codes).filter(([code]) => code !== "499");
  const rate = (value) => number(value);
  return html`<div class="grid">
    <${Chart} title="Requests" note=${`a second, ${each}`} at=${at} format=${rate} series=${[
      { label: "all", values: points.requests_per_s, fill: true }, { label: "refused", values: points.refusals_per_s, at: 1 }, { label: "failed", values: points.errors_per_s, at: 5 }]}/>
    <${Chart} title="Time to first token" note="streamed answers" at=${at} format=${seconds} least=${0.005} series=${[
      { label: "p50", values: points.first_token_s.p50, at: 2 }, { label: "p95", values: points.first_token_s.p95, at: 0 }, { label: "p99", values: points.first_token_s.p99, at: 5 }]}/>
    <${Chart} title="Tokens" note="a second" at=${at} format=${rate} series=${[
      { label: "output", values: points.output_tokens_per_s, at: 2, fill: true }, { label: "prompt", values: points.prompt_tokens_per_s, at: 7 }]}/>
    <${Chart} title="Prompt cache" note="share of prompt tokens" at=${at} max=${1} format=${(value) => share(value)} series=${[
      { label: "real", values: points.hit_real, at: 2, fill: true }, { label: "predicted", values: points.hit_predicted, at: 7, dash: [5, 4] }]}/>
    ${isFleet && html`<${Chart} title="Queues" note="requests in all routers" at=${at} format=${rate} series=${[
      { label: "at engines", values: points.gauges.in_flight || blank(at), at: 0, fill: true }, { label: "wait for room", values: points.gauges.waiting || blank(at), at: 1 }, { label: "wait for a load", values: points.gauges.held || blank(at), at: 3 }]}/>`}
    <${Chart} title="Errors and refusals" note="answers a second, by code" at=${at} format=${rate} marks=${marks} series=${codes.length
      ? codes.map(([code, values], order) => ({ label: code, values, at: (5 + order * 3) % 8 })) : [{ label: "none", values: points.errors_per_s, at: 5 }]}/>
    <${Chart} title="Whole answers" note="until the last token" at=${at} format=${seconds} least=${0.005} series=${[
      { label: "p50", values: points.whole_s.p50, at: 2 }, { label: "p95", values: points.whole_s.p95, at: 0 }, { label: "p99", values: points.whole_s.p99, at: 5 }]}/>
    ${isFleet && html`<${Chart} title="Cold starts" note="requests that waited for a load" at=${at} format=${rate} series=${[{ label: "requests", values: points.cold_starts, at: 3, fill: true }]}/>
    <${Chart} title="Wait for room" note="mean, in the routers" at=${at} format=${seconds} least=${0.005} series=${[{ label: "mean", values: points.waited_s, at: 1, fill: true }]}/>`}
  </div>`;
}
const blank = (at) => at.map(() => null);

// The last incident of each kind at each worker, errors first: one that comes often hides no other.
export function groupedIncidents(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const of = `${entry.kind} ${entry.subject}`, group = groups.get(of), times = entry.body?.count || 1;
    group ? (group.times += times) : groups.set(of, { ...entry, times });
  }
  return [...groups.values()].sort((left, right) => (right.severity === "error") - (left.severity === "error") || right.id - left.id);
}

function Incidents() {
  const found = useLoad((signal) => Promise.all(["error", "warning"].map((severity) => get(`/v1/history?kind=incident&severity=${severity}&limit=100`, { signal }))), []);
  return html`<${Panel} title="Incidents" note=${`the last of each kind, errors first; times in ${ZONE}`} actions=${html`<${Link} to="activity" query=${{ show: "incident" }}>All, starts too<//>`}><${Loaded} of=${found} rows=${4}>${([errors, all]) => html`<${HistoryLines} entries=${groupedIncidents([...errors.data, ...all.data.filter((entry) => entry.severity !== "error")].sort((left, right) => right.id - left.id)).slice(0, 8)} empty="None is recorded."/>`}<//><//>`;
}

function Attention() {
  const fleet = useStore(now);
  const found = useLoad((signal) => Promise.all([
    get("/v1/adapters?has_error=true&limit=20", { signal }), all("/v1/workers"), get("/v1/orphans?limit=20", { signal }), get("/v1/aliases?limit=1000", { signal }),
  ]), []);
  if (!found.data) return html`<${Loaded} of=${found} rows=${1}/>`;
  const [failed, workers, orphans, aliases] = found.data;
  const rows = [];
  for (const adapter of failed.data) rows.push([`a-${adapter.lora_id}`, adapter.replicas.ready ? "fewer copies" : adapter.state === "failed" ? "failed" : "cannot load", html`<${AdapterLink} id=${adapter.lora_id}/>`, adapter.error]);
  for (const worker of workers) {
    if (worker.state === "lost" || worker.state === "unmanaged") rows.push([`w-${worker.id}`, worker.state, html`<${WorkerLink} id=${worker.id}/>`, worker.state === "lost" ? "neither agent nor engine answers" : "its engine serves on, its agent does not answer"]);
    else if (worker.refusal) rows.push([`w-${worker.id}`, "cordoned", html`<${WorkerLink} id=${worker.id}/>`, worker.refusal]);
    for (const [adapter, why] of Object.entries(worker.drain?.stuck || {})) rows.push([`d-${worker.id}-${adapter}`, "draining", html`<${WorkerLink} id=${worker.id}/>`, `${adapter} finds no other place: ${why}`]);
  }
  for (const [worker, state] of Object.entries(fleet?.now.circuits || {})) rows.push([`c-${worker}`, state === "open" ? "open" : "half_open", html`<${WorkerLink} id=${worker}/>`, "its circuit is " + state.replace("_", "-") + ": routers send it no or few requests"]);
  for (const alias of aliases.data) if (alias.pending?.state === "failed") rows.push([`l-${alias.name}`, "failed", html`<${Link} to=${"aliases/" + alias.name}>${alias.name}<//>`, alias.pending.error]);
  if (orphans.data.length) rows.push(["orphans", "unknown", html`<${Link} to="adapters" query=${{ show: "orphans" }}>${plural(orphans.data.length, "orphan")}<//>`, "workers hold adapters that are not registered"]);
  if (!rows.length) return "";
  return html`<${Panel} title="Needs attention" note=${plural(rows.length, "thing")}><ul class="lines">${rows.slice(0, 12).map(([key, state, what, why]) => html`<li key=${key}><${State} is=${state} tone=${state === "unknown" ? "warn" : undefined}/><b>${what}</b><span class="grow">${why}</span></li>`)}</ul><//>`;
}

function Engines() {
  const found = useLoad(() => all("/v1/workers"), []);
  return html`<${Panel} title="Engines" id="engines" note=${found.data ? plural(found.data.length, "worker") : ""} actions=${html`<${Link} to="workers">All about workers<//>`}>
    <${Loaded} of=${found}>${(workers) => html`<${WorkerTable} workers=${workers} name="engines"/>`}<//><//>`;
}

// incidents: the last bad one of each worker, by its id; null: no such column
export function WorkerTable({ workers, name = "", incidents = null }) {
  const circuits = useStore(now)?.now.circuits || {};
  const slots = (worker) => (worker.capacity.loaded_count || 0) + (worker.capacity.available_slots || 0);
  const load = (worker) => worker.load || {};
  return html`<${Table} label="Workers" name=${name} rows=${workers} rowKey=${(worker) => worker.id} sort="id" empty="No worker has registered." columns=${[
    { id: "id", label: "worker", value: (worker) => worker.id, cell: (worker) => html`<${WorkerLink} id=${worker.id}/>` },
    { id: "state", label: "state", value: (worker) => worker.state, cell: (worker) => html`<${State} is=${worker.state}/>` },
    { id: "kv", label: "KV cache", numeric: true, value: (worker) => load(worker).kv_usage ?? null, cell: (worker) => load(worker).kv_usage === undefined ? missing : html`<${Meter} value=${load(worker).kv_usage} of=${1} format=${(value) => share(value)} label=${`KV cache ${share(load(worker).kv_usage)} in use`}/>` },
    { id: "running", label: "running", numeric: true, value: (worker) => load(worker).running ?? null, cell: (worker) => number(load(worker).running) },
    { id: "waiting", label: "waiting", numeric: true, value: (worker) => load(worker).waiting ?? null, cell: (worker) => number(load(worker).waiting) },
    { id: "slots", label: "adapter slots", numeric: true, value: (worker) => worker.capacity.available_slots ?? null, cell: (worker) => html`<${Meter} value=${worker.capacity.loaded_count || 0} of=${slots(worker)} tone="plain" format=${() => `${worker.capacity.loaded_count || 0}/${slots(worker)}`} label=${`${worker.capacity.loaded_count || 0} of ${slots(worker)} adapter slots in use`}/>` },
    { id: "circuit", label: "circuit", hide: "narrow", value: (worker) => circuits[worker.id] || "closed", cell: (worker) => html`<${State} is=${circuits[worker.id] || "closed"}/>` },
    ...(incidents ? [{ id: "incident", label: "last incident", hide: "narrow", value: (worker) => incidents.get(worker.id)?.at || "", cell: (worker) => { const one = incidents.get(worker.id); return one ? html`<${Link} to=${"workers/" + worker.id}>${one.kind.replaceAll("_", " ")}<//> <time datetime=${one.at}>${clock(one.at)}</time>` : missing; } }] : []),
    { id: "decode", label: "decode", hide: "medium", numeric: true, title: "tokens a second of one request, learned", value: (worker) => load(worker).decode_tokens_per_s || null, cell: (worker) => load(worker).decode_tokens_per_s ? number(load(worker).decode_tokens_per_s) + " t/s" : missing },
    { id: "prefill", label: "prefill", hide: "medium", numeric: true, title: "tokens a second, learned", value: (worker) => load(worker).prefill_tokens_per_s || null, cell: (worker) => load(worker).prefill_tokens_per_s ? number(load(worker).prefill_tokens_per_s) + " t/s" : missing },
    { id: "base", label: "base model", hide: incidents ? "wide" : "medium", value: (worker) => worker.base_model },
    { id: "node", label: "zone / node", hide: incidents ? "wide" : "medium", value: (worker) => [worker.zone, worker.node].filter(Boolean).join(" / "), cell: (worker) => [worker.zone, worker.node].filter(Boolean).join(" / ") || missing },
  ]}/>`;
}

function BaseModels({ rangeS }) {
  const found = useLoad((signal) => totals("base", rangeS, signal), [rangeS], { follow: "ticks" });
  return html`<${Panel} title="The base models' own traffic" note="requests that name no adapter"><${Loaded} of=${found}>${(rows) => html`<${TotalsTable} label="Base models" rows=${rows} word="base model" name="base"/>`}<//><//>`;
}

export function TotalsTable({ label, rows, word, cell, name, more = [], empty = "No requests in this time." }) {
  return html`<${Table} label=${label} name=${name} rows=${rows} rowKey=${(row) => row.name} sort="-requests" empty=${empty} columns=${[
    { id: "name", label: word, value: (row) => row.name, cell: cell || ((row) => html`<span class="name">${row.name || "(none)"}</span>`) }, ...more, ...totalColumns((row) => row)]}/>`;
}

export const totalColumns = (of) => [
  { id: "requests", label: "requests", numeric: true, value: (row) => of(row)?.requests ?? 0, cell: (row) => number(of(row)?.requests ?? 0) },
  { id: "p95", label: "first token p95", numeric: true, value: (row) => of(row)?.first_token_s.p95 ?? null, cell: (row) => seconds(of(row)?.first_token_s.p95 ?? null) },
  { id: "output", label: "output tokens", numeric: true, hide: "narrow", value: (row) => of(row)?.output_tokens ?? 0, cell: (row) => number(of(row)?.output_tokens ?? 0) },
  { id: "hit", label: "cache hits", numeric: true, hide: "narrow", value: (row) => of(row)?.hit_real ?? null, cell: (row) => share(of(row)?.hit_real ?? null) },
  { id: "waited", label: "mean wait", numeric: true, hide: "medium", value: (row) => of(row)?.waited_s ?? null, cell: (row) => seconds(of(row)?.waited_s ?? null) },
  { id: "errors", label: "errors", numeric: true, value: (row) => of(row)?.errors ?? 0, cell: (row) => html`<span class=${of(row)?.errors ? "bad-text" : ""}>${number(of(row)?.errors ?? 0)}</span>` },
];
