// Workers: load, what each holds and where, rates, the agent's log.
import { html, useMemo, useStore } from "../lib.js";
import { all, get, now, useLoad, useRange } from "../api.js";
import { Chart } from "../chart.js";
import { Table } from "../table.js";
import { Facts, Head, Loaded, Panel, State } from "../parts.js";
import { AdapterLink, Link } from "../route.js";
import { ago, bytes, clock, digest12, missing, number, plural, seconds, share, span } from "../format.js";
import { traffic, WorkerTable } from "./fleet.js";
import { EventLines, HistoryLines } from "./activity.js";
import { AllowCopy, UnloadCopy, WorkerActions } from "./actions.js";
import { SharesPanel } from "./shares.js";

export function WorkersPage() {
  const found = useLoad(() => all("/v1/workers"), []);
  const incidents = useLoad((signal) => get("/v1/history?kind=incident&severity=warning&limit=500", { signal }), []);
  const last = useMemo(() => new Map([...(incidents.data?.data || [])].reverse().map((entry) => [entry.subject, entry])), [incidents.data]);
  return html`<${Head} title="Workers"/>
    <${Loaded} of=${found}>${(workers) => html`<${Slots} workers=${workers}/><${WorkerTable} workers=${workers} incidents=${last}/>`}<//>
    <${Routers}/>`;
}

// Free slots by base model and the largest rank that a worker takes.
function Slots({ workers }) {
  const pools = new Map();
  for (const worker of workers) {
    if (worker.state !== "ready" || worker.refusal) continue;
    const key = `${worker.base_model}\t${worker.capacity.max_lora_rank ?? 0}`;
    const pool = pools.get(key) || { base: worker.base_model, rank: worker.capacity.max_lora_rank ?? 0, workers: 0, free: 0, slots: 0 };
    pool.workers += 1;
    pool.free += worker.capacity.available_slots || 0;
    pool.slots += (worker.capacity.available_slots || 0) + (worker.capacity.loaded_count || 0);
    pools.set(key, pool);
  }
  return html`<div class="tiles">${[...pools.values()].sort((left, right) => right.rank - left.rank).map((pool) => html`<div class="tile" key=${pool.base + pool.rank}>
    <span class="label">Free slots up to rank ${pool.rank}</span><span class="value">${pool.free}<small>of ${pool.slots}</small></span><span class="under">${pool.base} · ${plural(pool.workers, "worker")}</span></div>`)}</div>`;
}

function Routers() {
  const found = useLoad((signal) => get("/v1/routers", { signal }), [], { follow: "ticks" });
  const count = (counts) => Object.values(counts || {}).reduce((whole, one) => whole + one, 0);
  return html`<${Panel} title="Routers" note="those that reported within the last hour"><${Loaded} of=${found}>${(list) => html`<${Table} label="Routers" name="routers" rows=${list.data} rowKey=${(row) => row.id} sort="id" empty="No router reports to this orchestrator." columns=${[
    { id: "id", label: "router", value: (row) => row.id, cell: (row) => html`<span class="name">${row.id}</span>` },
    { id: "state", label: "state", value: (row) => row.state, cell: (row) => html`<${State} is=${row.state}/>` },
    { id: "in_flight", label: "at engines", numeric: true, value: (row) => row.now?.in_flight ?? null, cell: (row) => number(row.now?.in_flight) },
    { id: "waiting", label: "wait for room", numeric: true, value: (row) => count(row.now?.waiting) },
    { id: "held", label: "wait for a load", numeric: true, value: (row) => count(row.now?.held) },
    { id: "policy", label: "policy", hide: "narrow", value: (row) => row.now?.policy ?? missing },
    { id: "version", label: "version", hide: "narrow", value: (row) => row.now?.version ?? "older" },
    { id: "age", label: "last report", numeric: true, hide: "medium", value: (row) => row.age_s, cell: (row) => span(row.age_s) + " ago" },
  ]}/>`}<//><//>`;
}

export function WorkerPage({ id }) {
  const rangeS = useRange(), circuits = useStore(now)?.now.circuits || {};
  const address = "/v1/workers/" + encodeURIComponent(id);
  const found = useLoad((signal) => Promise.all([get(address, { signal }), get(address + "/report", { signal })]), [id]);
  const series = useLoad((signal) => traffic("worker", id, rangeS, signal), [id, rangeS], { follow: "ticks" });
  const log = useLoad((signal) => get(address + "/log?lines=200", { signal }).catch((error) => ({ lines: [], error: error.message })), [id], { follow: "ticks" });
  const history = useLoad((signal) => get(`/v1/history?limit=60&worker=${encodeURIComponent(id)}`, { signal }), [id]);
  const crumbs = html`<${Link} to="workers">Workers<//> /`;
  const worker = found.data?.[0];
  return html`<${Head} title=${id} crumbs=${[crumbs]} hasRange state=${worker && html`<${State} is=${worker.state}/>`}>${worker && html`<${WorkerActions} worker=${worker}/>`}<//>
    <${Loaded} of=${found}>${([item, report]) => html`
      ${item.refusal && html`<p class="notice bad">It takes no adapters: ${item.refusal}</p>`}
      ${item.orphans?.length > 0 && html`<p class="notice"><b>${plural(item.orphans.length, "adapter")} here ${item.orphans.length === 1 ? "is" : "are"} not registered</b>, and ${item.orphans.length === 1 ? "gets" : "get"} no requests: <${Link} to="adapters" query=${{ show: "orphans" }}>adopt or unload<//>.</p>`}
      ${item.drain && html`<${Drain} drain=${item.drain}/>`}
      ${item.kept_out?.length > 0 && html`<${Panel} title="Kept out" note="by an operator: these get no copy here">${item.kept_out.map((name) => html`<div class="bar" key=${name}><${AdapterLink} id=${name}/><${AllowCopy} worker=${id} name=${name}/></div>`)}<//>`}
      <${Panel}><${Facts} rows=${[
        ["Base model", report.model.base_model], ["Engine", `${report.transport.dialect} ${report.engine_version || ""}`], ["LoRA kernels", report.lora.punica || "not known"], ["Circuit", html`<${State} is=${circuits[id] || "closed"}/>`],
        ["Running / waiting", `${report.load.running} / ${report.load.waiting}`], ["KV cache in use", share(report.load.kv_usage)], ["Waiting for a slot", number(report.load.waiting_for_slot)],
        ["Slots in use", `${item.capacity.loaded_count ?? 0} of ${(item.capacity.loaded_count ?? 0) + (item.capacity.available_slots ?? 0)}, rank up to ${item.capacity.max_lora_rank ?? missing}`],
        ["Prefill, learned", report.load.prefill_tokens_per_s ? number(report.load.prefill_tokens_per_s) + " tokens/s" : "not yet"], ["Decode, learned", report.load.decode_tokens_per_s ? number(report.load.decode_tokens_per_s) + " tokens/s" : "not yet"],
        ["A load takes", report.load.load_seconds ? seconds(report.load.load_seconds) : "not measured yet"], ["Ghosts", number(item.capacity.ghosts ?? 0)], ["Room on disk", bytes(item.capacity.disk_room_bytes)],
        ["Zone / node", [item.zone, item.node].filter(Boolean).join(" / ") || missing], ["Agent", html`<code>${item.agent_url || "none"}</code>`], ["Engine address", html`<code>${item.engine_url}</code>`],
        report.state_reason && ["Why", report.state_reason],
      ]}/><//>
      <${Holds} report=${report} worker=${id}/>`}<//>
    <${Loaded} of=${series} shape="charts">${({ points }) => html`<div class="grid">
      <${Chart} title="Requests" note="a second, sent here" at=${points.at} format=${(value) => number(value)} series=${[{ label: "all", values: points.requests_per_s, fill: true }, { label: "failed", values: points.errors_per_s, at: 5 }]}/>
      <${Chart} title="In the engine" note="requests" at=${points.at} format=${(value) => number(value)} series=${["running", "waiting", "waiting_for_slot"].map((name, order) => ({ label: name.replaceAll("_", " "), values: points.gauges[name] || points.at.map(() => null), at: [0, 1, 3][order], fill: !order }))}/>
      <${Chart} title="KV cache in use" at=${points.at} max=${1} format=${(value) => share(value)} series=${[{ label: "in use", values: points.gauges.kv_usage || points.at.map(() => null), at: 2, fill: true }]}/>
      <${Chart} title="Time to first token" at=${points.at} format=${seconds} least=${0.005} series=${[{ label: "p50", values: points.first_token_s.p50, at: 2 }, { label: "p95", values: points.first_token_s.p95, at: 0 }, { label: "p99", values: points.first_token_s.p99, at: 5 }]}/>
      <${Chart} title="Tokens" note="a second" at=${points.at} format=${(value) => number(value)} series=${[{ label: "output", values: points.output_tokens_per_s, at: 2, fill: true }, { label: "prompt", values: points.prompt_tokens_per_s, at: 7 }]}/>
      <${Chart} title="Prompt cache" note="share of prompt tokens" at=${points.at} max=${1} format=${(value) => share(value)} series=${[{ label: "real", values: points.hit_real, at: 2, fill: true }, { label: "predicted", values: points.hit_predicted, at: 7, dash: [5, 4] }]}/></div>`}<//>
    <div class="grid two"><${SharesPanel} title="Its adapters by traffic" kind="worker" name=${id} by="adapter" rangeS=${rangeS}/>
      <${SharesPanel} title="By tenant" kind="worker" name=${id} by="tenant" rangeS=${rangeS}/></div>
    <div class="grid two"><${Panel} title="History" note="of this worker and its engine"><${Loaded} of=${history}>${(page) => html`<${HistoryLines} entries=${page.data}/>`}<//><//>
      <${Panel} title="Events"><${EventLines} most=${20} about=${id}/><//></div>
    <${Panel} title="The agent's log" note="its last lines"><${Loaded} of=${log}>${(tail) => tail.error ? html`<p class="muted">${tail.error}</p>` : html`<pre class="log" tabindex="0" role="region" aria-label="Log lines of the agent">${tail.lines.join("\n") || "nothing logged yet"}</pre>`}<//><//>`;
}

function Drain({ drain }) {
  return html`<p class="notice"><b>Draining: ${drain.phase}.</b> ${drain.moved} of ${drain.moves} adapters are ready elsewhere${drain.left.length ? `, ${drain.left.length} to go (${seconds(drain.expected_s)})` : ""}; ${plural(drain.requests, "request")} still here.
    ${Object.entries(drain.stuck).map(([adapter, why]) => html`<br/>${adapter} finds no other place: ${why}`)}</p>`;
}

function Holds({ report, worker }) {
  const loaded = new Set(report.lora.loaded_loras.map((one) => one.digest));
  const rows = [...report.lora.loaded_loras.map((one) => ({ ...one, where: one.location })), ...report.lora.available_loras.filter((one) => !loaded.has(one.digest)).map((one) => ({ ...one, where: "disk" }))];
  const more = report.lora.available_count - report.lora.available_loras.length;
  return html`<${Panel} title="What it holds" note=${`${report.lora.loaded_loras.length} in the engine, ${report.lora.available_count} on disk, ${report.lora.capacity.ghosts} ghosts`}>
    <${Table} label="Adapters of this worker" name="holds" rows=${rows} rowKey=${(row) => row.lora_id + row.digest + row.where} sort="where" maxHeight="short" empty="No adapter is here." columns=${[
      { id: "id", label: "adapter", value: (row) => row.lora_id, cell: (row) => html`<${AdapterLink} id=${row.lora_id}/>` },
      { id: "where", label: "where", value: (row) => ["device", "host", "disk", "remote"].indexOf(row.where), cell: (row) => html`<span class="tag">${row.where}</span>` },
      { id: "state", label: "state", value: (row) => row.state, cell: (row) => html`<${State} is=${row.state}/>` },
      { id: "act", label: "actions", cell: (row) => row.where !== "disk" && row.where !== "remote" && row.state !== "failed" && html`<${UnloadCopy} worker=${worker} name=${row.digest ? row.lora_id : row.engine_name}/>` },
      { id: "requests", label: "requests", numeric: true, value: (row) => row.request_count ?? null, cell: (row) => number(row.request_count) },
      { id: "rank", label: "rank", numeric: true, hide: "narrow", value: (row) => row.rank || null, cell: (row) => number(row.rank || null) },
      { id: "size", label: "size", numeric: true, hide: "narrow", value: (row) => row.size_bytes || null, cell: (row) => bytes(row.size_bytes) },
      { id: "memory", label: "in the engine", numeric: true, hide: "medium", title: "memory that the engine holds for it", value: (row) => row.memory_mb || null, cell: (row) => bytes(row.memory_mb ? row.memory_mb * 1e6 : null) },
      { id: "load", label: "loaded in", numeric: true, hide: "medium", value: (row) => row.load_seconds ?? null, cell: (row) => seconds(row.load_seconds ?? null) },
      { id: "used", label: "last used", hide: "medium", value: (row) => row.last_used || "", cell: (row) => row.last_used ? ago(row.last_used) : missing },
      { id: "digest", label: "digest", hide: "medium", value: (row) => row.digest, cell: (row) => html`<code>${digest12(row.digest)}</code>` },
      { id: "error", label: "note", hide: "narrow", value: (row) => row.error || row.note || "", cell: (row) => html`<span class="clip ${row.error ? "bad-text" : ""}" title=${row.error || row.note}>${row.error || row.note || ""}</span>` },
    ]}/>${more > 0 && html`<p class="note">${more} more are on its disk.</p>`}<//>`;
}
