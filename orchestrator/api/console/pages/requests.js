// Requests: where the last ones went and why; one decision's terms; the same under another policy.
import { html, useStore, useState } from "../lib.js";
import { call, get, now, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Choice, Facts, Field, Head, Loaded, Panel, Search, useLater } from "../parts.js";
import { Pauses } from "./pauses.js";
import { AdapterLink, Link, WorkerLink, place, setQuery } from "../route.js";
import { ZONE, clock, missing, number, seconds, share } from "../format.js";

export const TERMS = [["prefill_s", "prefill"], ["adapter_s", "adapter load"], ["slot_s", "slot"], ["queue_s", "queue"], ["harm_s", "harm to others"], ["crowd_s", "cache pressure"], ["decode_s", "decode"], ["zone_s", "other zone"]];
const COUNTED = { local: "by the router", remote: "by an engine", given: "by the client", approximate: "roughly" };
const POLICIES = ["kv_lora", "least_loaded", "round_robin", "session", "prefix_hash"];
const adapterOf = (name) => name === "base" ? "base" : name.replace(/@[0-9a-f]{12}$/, "");

export function RequestsPage() {
  const { query } = useStore(place);
  const adapter = query.get("adapter") || "", worker = query.get("worker") || "", asked = useLater(adapter, 300);
  const [paused, setPaused] = useState(false), [limit, setLimit] = useState(50);
  const found = useLoad((signal) => decisions(asked, worker, limit, signal), [asked, worker, paused, limit], { follow: paused ? "none" : "ticks" });
  const workers = useLoad((signal) => get("/v1/workers?limit=1000", { signal }), []);
  return html`<${Head} title="Requests"><button type="button" class="action" aria-pressed=${paused} onClick=${() => setPaused(!paused)}>${paused ? "Go on" : "Pause"}</button><//>
    <div class="bar"><${Search} value=${adapter} label="Adapter, base, or a request's id" placeholder="An adapter's name, base, or an x-request-id" onInput=${(text) => setQuery({ adapter: text })}/>
      <${Choice} label="Worker" value=${worker} options=${[["", "any worker"], ...(workers.data?.data || []).map((one) => [one.id, one.id])]} onChange=${(value) => setQuery({ worker: value })}/></div>
    <${Waiting}/>
    <${Panel} title="The last decisions" note=${`of all routers; under load a sample; times in ${ZONE}`}><${Loaded} of=${found}>${(list) => html`
      ${list.missing?.length > 0 && html`<p class="notice">${list.missing.length} of the routers did not answer: ${list.missing.join(", ")}</p>`}
      <${Table} label="Decisions" rows=${list.data} rowKey=${(row) => row.request_id + row.at} sort="-at" empty=${asked || worker ? "None of the decisions that routers keep is of that adapter, request or worker." : "No router has decided anything yet, or none has answered."} columns=${[
        { id: "at", label: "when", value: (row) => row.at, cell: (row) => clock(row.at) },
        { id: "request", label: "request", value: (row) => row.request_id, cell: (row) => html`<${Link} to=${"requests/" + row.request_id}><code>${row.request_id.slice(0, 12)}</code><//>` },
        { id: "adapter", label: "adapter", value: (row) => row.adapter, cell: (row) => adapterOf(row.adapter) === "base" ? "base model" : html`<${AdapterLink} id=${adapterOf(row.adapter)}/>` },
        { id: "worker", label: "worker", value: (row) => row.worker_id || "", cell: (row) => row.worker_id ? html`<${WorkerLink} id=${row.worker_id}/>` : missing },
        { id: "why", label: "why there", hide: "narrow", value: (row) => why(row), cell: (row) => html`<span class="muted">${why(row)}</span>` },
        { id: "waited", label: "waited", numeric: true, value: (row) => row.waited_s ?? 0, cell: (row) => seconds(row.waited_s ?? 0) },
        { id: "first", label: "first data", numeric: true, value: (row) => row.first_data_s ?? null, cell: (row) => seconds(row.first_data_s ?? null) },
        { id: "cached", label: "cached / prompt", numeric: true, hide: "medium", value: (row) => row.cached_tokens, cell: (row) => `${row.engine_cached_tokens ?? row.cached_tokens} / ${row.prompt_tokens}` }]}/>
      ${list.data.length >= limit && limit < 1000 && html`<div><button type="button" class="action" onClick=${() => setLimit(limit * 4)}>More</button></div>`}`}<//><//>
    <${Pauses}/><${Ask}/>`;
}

// Decisions of an adapter, or of the request with this id; of a worker, or of any.
async function decisions(asked, worker, limit, signal) {
  const ask = (more) => get(`/v1/decisions?limit=${limit}${more}${worker ? "&worker=" + encodeURIComponent(worker) : ""}`, { signal });
  if (!asked) return ask("");
  const [ofAdapter, ofRequest] = await Promise.all([ask("&adapter=" + encodeURIComponent(asked)), ask("&request=" + encodeURIComponent(asked))]);
  return { ...ofAdapter, data: [...ofRequest.data, ...ofAdapter.data] };
}

// Who waits now, by tenant: the requests below have been sent.
function Waiting() {
  const fleet = useStore(now);
  const names = [...new Set([...Object.keys(fleet?.waiting || {}), ...Object.keys(fleet?.held || {})])];
  const rows = names.map((name) => [name, fleet.waiting[name] || 0, fleet.held[name] || 0]).filter(([, room, load]) => room + load).sort((left, right) => right[1] + right[2] - left[1] - left[2]);
  if (!rows.length) return "";
  return html`<${Panel} title="Who waits now" note="requests in the routers, by tenant"><ul class="lines">${rows.slice(0, 12).map(([name, room, load]) => html`<li key=${name}><b><${Link} to=${"tenants/" + (name || "(none)")}>${name || "no tenant"}<//></b>
    <span class="grow muted">${[room && `${room} for room at an engine`, load && `${load} for an adapter's load`].filter(Boolean).join(", ")}</span></li>`)}</ul><//>`;
}

// The winner's reason in a few words: what it saved against the next best, by the term that differs most.
export function why(row) {
  const winner = row.scores.find((one) => one.winner), others = row.scores.filter((one) => !one.winner && !one.passed_over);
  if (!winner) return row.note || "no replica could take it";
  if (!others.length) return row.scores.length > 1 ? "the others would need a slot" : row.rejected?.length ? onlyOne(row) : "the only replica";
  const next = others.reduce((best, one) => one.cost_s < best.cost_s ? one : best);
  const gain = TERMS.map(([name, label]) => [next[name] - winner[name], label]).sort((left, right) => right[0] - left[0])[0];
  if (!(gain[0] > 0.0005)) return "as good as the others; chosen by chance among them";
  const words = { prefill: "more of the prompt in its cache", queue: "a shorter queue", "adapter load": "the adapter is loaded there", slot: "a free adapter slot", "harm to others": "it disturbs fewer others", "cache pressure": "more room in its cache", decode: "faster decoding", "other zone": "the same zone" };
  return `${words[gain[1]]}, ${seconds(gain[0])} less than ${next.worker_id}`;
}

const onlyOne = (row) => row.rejected.every((one) => /not resident/.test(one.reason)) ? "no other worker has the adapter loaded" : "no other worker could take it";

export function RequestPage({ id }) {
  const found = useLoad((signal) => get("/v1/decisions?limit=20&request=" + encodeURIComponent(id), { signal }), [id], { follow: "none" });
  return html`<${Head} title=${"Request " + id.slice(0, 12)} crumbs=${[html`<${Link} to="requests">Requests<//> /`]}/>
    <${Loaded} of=${found}>${(list) => list.data.length ? list.data.map((row, at) => html`<${Decision} row=${row} key=${row.at} title=${at ? "An earlier attempt" : "The decision"} canReplay/>`) : html`<p class="notice">No router has this request any more: each keeps its last 1,000 decisions, and under load a sample of them.</p>`}<//>`;
}

export function Decision({ row, title, canReplay = false }) {
  const [policy, setPolicy] = useState(""), [replayed, setReplayed] = useState(null), [error, setError] = useState("");
  const replay = async (name) => {
    setPolicy(name); setReplayed(null); setError("");
    if (!name) return;
    try { setReplayed(await call("POST", "/v1/decisions/replay", { body: { record: row.record, policy: name, request_id: row.request_id, at: row.at, tokens_from: row.tokens_from, scores: row.scores } })); }
    catch (problem) { setError(problem.message); }
  };
  return html`<${Panel} title=${title} note=${why(row)}><${Facts} rows=${[
      ["Went to", row.worker_id ? html`<${WorkerLink} id=${row.worker_id}/>` : "nowhere"], ["Adapter", adapterOf(row.adapter) === "base" ? "base model" : html`<${AdapterLink} id=${adapterOf(row.adapter)}/>`], ["When", clock(row.at, { date: true })], ["Policy", row.policy],
      ["Prompt", `${row.prompt_tokens} tokens, counted ${COUNTED[row.tokens_from] || `by ${row.tokens_from}`}`], ["Cached", `${row.cached_tokens} predicted, ${row.engine_cached_tokens ?? "not"} reported`], ["Waited", seconds(row.waited_s ?? null)], ["First data after", seconds(row.first_data_s ?? null)], ["Fleet in use (rho)", share(row.rho)], ["Weight of work (kappa)", number(row.kappa)], row.note && ["Note", row.note]]}/>
    <${Terms} row=${row}/>
    ${row.rejected?.length > 0 && html`<h3>Could not take it</h3><ul class="lines">${row.rejected.map((one) => html`<li key=${one.worker_id}><b><${WorkerLink} id=${one.worker_id}/></b><span class="grow muted">${one.reason}</span></li>`)}</ul>`}
    ${canReplay && row.record && html`<div class="bar"><label class="bar"><span>The same under</span><${Choice} label="Replay under policy" value=${policy} options=${[["", "choose a policy"], ...POLICIES.map((one) => [one, one])]} onChange=${replay}/></label><span class="note">computed again from its record; nothing is sent</span></div>
      ${error && html`<p class="notice bad" role="alert">${error}</p>`}
      ${replayed && html`<p class="notice" role="status"><b>${policy}</b> ${replayed.worker_id === row.worker_id ? "chooses the same worker" : html`would have chosen <${WorkerLink} id=${replayed.worker_id}/> instead of <${WorkerLink} id=${row.worker_id}/>`}.</p><${Terms} row=${replayed}/>`}`}<//>`;
}

export function Terms({ row }) {
  const factor = (name) => name === "prefill_s" || name === "adapter_s" ? row.kappa : 1;
  const rows = [...row.scores].sort((left, right) => right.winner - left.winner || left.passed_over - right.passed_over || left.cost_s - right.cost_s).slice(0, 64);
  const most = Math.max(...rows.map((one) => TERMS.reduce((sum, [name]) => sum + Math.max(0, one[name]) * factor(name), 0)), 1e-9);
  const used = TERMS.filter(([name]) => rows.some((one) => one[name] > 0));
  return html`<ul class="legend">${used.map(([name, label]) => html`<li key=${name}><i class="swatch s${TERMS.findIndex(([one]) => one === name)}"></i>${label}${factor(name) !== 1 ? ` × ${number(factor(name))}` : ""}</li>`)}</ul>
    <div class="terms" role="list" aria-label="Cost of each replica">${rows.map((one) => html`<div class="term-row ${one.winner ? "winner" : ""}" role="listitem" key=${one.worker_id}>
      <span class="who"><${WorkerLink} id=${one.worker_id}/>${one.passed_over ? html` <span class="tag">no slot</span>` : ""}</span>
      <span class="term-bar" role="img" aria-label=${used.map(([name, label]) => `${label} ${seconds(one[name] * factor(name))}`).join(", ") + `; ${one.cached_tokens} tokens cached`}>${used.map(([name]) => one[name] > 0 && html`<span class="s${TERMS.findIndex(([each]) => each === name)}" title=${`${name.replace("_s", "")} ${seconds(one[name] * factor(name))}`} style=${{ width: (Math.max(0, one[name]) * factor(name) * 100 / most).toFixed(2) + "%" }}></span>`)}</span>
      <b class="numeric">${seconds(one.cost_s)}</b></div>`)}</div>`;
}

// Where would this request go? Nothing is sent.
function Ask() {
  const [model, setModel] = useState(""), [prompt, setPrompt] = useState("Which customers ordered twice?"), [answer, setAnswer] = useState(null), [error, setError] = useState("");
  const names = useLoad((signal) => get("/v1/adapters?limit=500", { signal }), []);
  const ask = async (event) => {
    event.preventDefault(); setAnswer(null); setError("");
    try { setAnswer(await call("POST", "/v1/route", { body: { model, messages: [{ role: "user", content: prompt }] } })); } catch (problem) { setError(problem.message); }
  };
  return html`<${Panel} title="Where would it go?" note="a router decides about this chat; nothing is sent to an engine, nothing is loaded"><form class="form" onSubmit=${ask}>
    <${Field} label="Model, adapter or alias"><input type="text" list="names" value=${model} required onInput=${(event) => setModel(event.target.value)}/><//><datalist id="names">${(names.data?.data || []).map((one) => html`<option key=${one.lora_id} value=${one.lora_id}/>`)}</datalist>
    <${Field} label="Prompt"><textarea value=${prompt} onInput=${(event) => setPrompt(event.target.value)}></textarea><//>
    <div><button class="action primary" disabled=${!model}>Explain</button></div></form>
    ${error && html`<p class="notice bad" role="alert">${error}</p>`}${answer && html`<${Decision} row=${answer} title=${answer.worker_id ? `It would go to ${answer.worker_id}` : "It would go nowhere now"}/>`}<//>`;
}
