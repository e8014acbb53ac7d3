// Requests: what became of each and why; one decision's terms; the same under another policy.
import { html, useStore, useState } from "../lib.js";
import { call, get, keyNotes, now, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Choice, Facts, Field, Head, Loaded, Panel, Search, State, useLater } from "../parts.js";
import { Pauses } from "./pauses.js";
import { AdapterLink, Link, WorkerLink, place, setQuery } from "../route.js";
import { ZONE, clock, missing, number, seconds, share } from "../format.js";

export const TERMS = [["prefill_s", "prefill"], ["adapter_s", "adapter load"], ["slot_s", "slot"], ["queue_s", "queue"], ["step_s", "engine step"], ["harm_s", "harm to others"], ["crowd_s", "cache pressure"], ["evict_s", "pushed out"], ["decode_s", "decode"], ["zone_s", "other zone"]];
const COUNTED = { local: "by the router", remote: "by an engine", given: "by the client", approximate: "roughly" };
const POLICIES = ["kv_lora", "least_loaded", "round_robin", "session", "prefix_hash"];
const adapterOf = (name) => name === "base" ? "base" : name.replace(/@[0-9a-f]{12}$/, "");

const STATUSES = [["", "any answer"], ["failed", "every error"], ["429", "429: refused by a limit"], ["4xx", "4xx"], ["5xx", "5xx"], ["499", "499: the client left"], ["200", "200"]];
const FILTERS = ["worker", "tenant", "key", "status"];

export function RequestsPage() {
  const { query } = useStore(place), notes = useStore(keyNotes);
  const adapter = query.get("adapter") || "", asked = useLater(adapter, 300), chosen = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) || ""]));
  const [paused, setPaused] = useState(false), [limit, setLimit] = useState(50);
  const found = useLoad((signal) => lastRequests(asked, chosen, limit, signal), [asked, ...Object.values(chosen), paused, limit], { follow: paused ? "none" : "ticks" });
  const names = useLoad((signal) => Promise.all([get("/v1/workers?limit=1000", { signal }).catch(() => ({ data: [] })), get("/v1/keys", { signal })]), []);
  const [workers, keys] = names.data || [{ data: [] }, { data: [] }], tenants = [...new Set(keys.data.map((one) => one.spec.tenant).filter(Boolean))].sort();
  const filter = (name, label, any, options) => html`<${Choice} label=${label} value=${chosen[name]} options=${[["", any], ...withChosen(options, chosen[name])]} onChange=${(value) => setQuery({ [name]: value })}/>`;
  const isFiltered = asked || Object.values(chosen).some(Boolean);
  return html`<${Head} title="Requests"><button type="button" class="action" aria-pressed=${paused} onClick=${() => setPaused(!paused)}>${paused ? "Go on" : "Pause"}</button><//>
    <div class="bar"><${Search} value=${adapter} label="Adapter, base, or a request's id" placeholder="An adapter's name, base, or an x-request-id" onInput=${(text) => setQuery({ adapter: text })}/>
      <${Choice} label="Answer" value=${chosen.status} options=${STATUSES} onChange=${(value) => setQuery({ status: value })}/>
      ${filter("tenant", "Tenant", "any tenant", tenants.map((one) => [one, one]))}${filter("key", "Key", "any key", keys.data.map((one) => [one.key_id, one.spec.note || one.key_id]))}${filter("worker", "Worker", "any worker", workers.data.map((one) => [one.id, one.id]))}</div>
    <${Waiting}/>
    <${Panel} title="The last requests" note=${`of all routers, refused ones included; times in ${ZONE}`}><${Loaded} of=${found} rows=${12}>${(list) => html`
      ${list.missing?.length > 0 && html`<p class="notice">${list.missing.length} of the routers did not answer: ${list.missing.join(", ")}</p>`}
      <${Table} label="Requests" rows=${list.data} rowKey=${(row) => row.request_id + row.at} sort="-at" empty=${isFiltered ? "None of the requests that routers keep is such a one." : "No router has had a request yet, or none has answered."} columns=${[
        { id: "at", label: "ended", value: (row) => row.at, cell: (row) => clock(row.at) },
        { id: "request", label: "request", value: (row) => row.request_id, cell: (row) => html`<${Link} to=${"requests/" + row.request_id}><code>${row.request_id.slice(0, 12)}</code><//>` },
        { id: "status", label: "answer", value: (row) => row.status, cell: (row) => html`<${Answer} row=${row}/>` },
        { id: "tenant", label: "tenant", value: (row) => row.tenant, cell: (row) => row.tenant ? html`<${Link} to=${"tenants/" + row.tenant}>${row.tenant}<//>` : missing },
        { id: "key", label: "key", hide: "narrow", value: (row) => notes.get(row.key) || row.key, cell: (row) => row.key ? html`<span class="clip" title=${row.key}>${notes.get(row.key) || html`<code>${row.key}</code>`}</span>` : missing },
        { id: "adapter", label: "adapter", value: (row) => row.adapter || row.asked, cell: (row) => html`<${Target} row=${row}/>` },
        { id: "worker", label: "worker", value: (row) => row.worker || "", cell: (row) => row.worker ? html`<${WorkerLink} id=${row.worker}/>` : missing },
        { id: "why", label: "why", hide: "medium", value: (row) => reason(row), cell: (row) => html`<span class="clip reason ${row.code ? "" : "muted"}" title=${reason(row)}>${reason(row)}</span>` },
        { id: "waited", label: "waited", numeric: true, hide: "wide", value: (row) => waited(row), cell: (row) => seconds(waited(row)) },
        { id: "first", label: "first data", numeric: true, value: (row) => row.first_data_s ?? null, cell: (row) => seconds(row.first_data_s ?? null) },
        { id: "whole", label: "whole", numeric: true, hide: "wide", value: (row) => row.duration_s, cell: (row) => seconds(row.duration_s) },
        { id: "cached", label: "cached / prompt", numeric: true, hide: "wide", value: (row) => row.cached_tokens, cell: (row) => row.prompt_tokens === null ? missing : `${row.cached_tokens ?? "?"} / ${row.prompt_tokens}` }]}/>
      ${list.data.length >= limit && limit < 1000 && html`<div><button type="button" class="action" onClick=${() => setLimit(Math.min(1000, limit * 4))}>More</button></div>`}`}<//><//>
    <${Pauses}/><${Ask}/>`;
}

// A name in the address that no list has, such as a key that was removed, is an option, too.
const withChosen = (options, value) => (!value || options.some(([id]) => id === value) ? options : [...options, [value, value]]);

// Requests of an adapter, or the one with this id, each with why it went where it did.
async function lastRequests(asked, chosen, limit, signal) {
  const more = Object.entries(chosen).map(([name, value]) => (value ? `&${name}=${encodeURIComponent(value)}` : "")).join("");
  const ask = (adapter) => get(`/v1/requests?limit=${limit}${more}${adapter ? "&adapter=" + encodeURIComponent(adapter) : ""}`, { signal });
  const one = asked ? get("/v1/requests/" + encodeURIComponent(asked), { signal }).catch((error) => { if (error.status === 404) return { data: [] }; throw error; }) : { data: [] };
  const [list, ofId, decided] = await Promise.all([ask(asked), one, get(`/v1/decisions?limit=${limit}${asked ? "" : more.includes("worker") ? "&worker=" + encodeURIComponent(chosen.worker) : ""}`, { signal })]);
  const decisions = new Map(decided.data.map((row) => [row.request_id, row]));
  return { ...list, data: [...ofId.data, ...list.data].map((row) => ({ ...row, decision: row.decisions?.[0] || decisions.get(row.request_id) })) };
}

const waited = (row) => ["pause", "hold", "queue", "failed_attempts"].reduce((whole, name) => whole + (row.stages[name] || 0), 0);

// Why a request failed, or else why it went where it did.
const reason = (row) => (row.limit ? `reached ${limitText(row.limit)}` : row.cause || (row.decision ? why(row.decision) : ""));

const LIMIT_NAMES = { requests_per_minute: "requests a minute", tokens_per_minute: "tokens a minute", bytes_per_minute: "bytes a minute", concurrent_requests: "requests at once" };
export const limitText = (limit) => {
  const name = limit.replace(/^tenant_/, "");
  return LIMIT_NAMES[name] ? `the ${name === limit ? "key" : "tenant"}'s ${LIMIT_NAMES[name]}` : limit;
};

function Answer({ row }) {
  if (row.status === null) return html`<${State} is="runs" tone="plain"/>`;
  const tone = row.status >= 500 || (row.code && row.status < 400) ? "bad" : row.status >= 400 ? "warn" : "good";
  return html`<${State} is=${`${row.status} ${row.code}`.trim()} tone=${tone}/>`;
}

// The adapter that a request got; before it was known, the name that it asked for.
function Target({ row }) {
  if (!row.adapter) return html`<span class="muted">${row.asked || missing}</span>`;
  const name = adapterOf(row.adapter);
  return name === "base" ? "base model" : html`<${AdapterLink} id=${name}/>`;
}

// Who waits now, by tenant: the requests below have been sent.
function Waiting() {
  const fleet = useStore(now);
  const names = [...new Set([...Object.keys(fleet?.now.waiting || {}), ...Object.keys(fleet?.now.held || {})])];
  const rows = names.map((name) => [name, fleet.now.waiting[name] || 0, fleet.now.held[name] || 0]).filter(([, room, load]) => room + load).sort((left, right) => right[1] + right[2] - left[1] - left[2]);
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
  const found = useLoad((signal) => Promise.all([get("/v1/requests/" + encodeURIComponent(id), { signal }), get("/v1/decisions?limit=20&request=" + encodeURIComponent(id), { signal }).catch(() => ({ data: [] }))]), [id], { follow: "none" });
  return html`<${Head} title=${"Request " + id.slice(0, 12)} crumbs=${[html`<${Link} to="requests">Requests<//> /`]}/>
    <${Loaded} of=${found} rows=${8}>${([list, decided]) => html`${list.data.map((row, at) => html`<${Story} row=${row} key=${row.at} title=${at ? "An earlier request with this id" : "What became of it"} hasDecision=${decided.data.length > 0}/>`)}
      ${decided.data.map((row, at) => html`<${Decision} row=${row} key=${row.at} title=${at ? "An earlier attempt" : "The decision"} canReplay/>`)}`}<//>`;
}

const STAGES = [["read", "read", "until its body was there"], ["prepare", "prepare", "name, tokens, hashes, decision"], ["pause", "paused", "for the end of a pause"], ["hold", "held", ""], ["queue", "queued", ""], ["failed_attempts", "failed attempts", "lost at workers that failed it"],
  ["first_data", "first data", "from dispatch to the first token, or to a whole answer"], ["relay", "relay", "the rest of the answer"], ["no_data", "no data", "at an engine that sent nothing"], ["whole", "whole", "it was not begun"]];
const ENDED_IN = { read: "it was refused before it was read", resolve: "its name led to nothing it may use", tokenize: "its prompt was being counted", hold: "it waited for its adapter", decide: "it waited for room at an engine", open: "it was sent to an engine", relay: "its answer was on the way" };

// What became of a request: the limit first where one was reached, then who, where, and the seconds of each stage.
function Story({ row, title, hasDecision }) {
  const notes = useStore(keyNotes), stages = STAGES.filter(([name]) => row.stages[name] >= 0.0005 || name === "whole" && row.stages[name]), whole = stages.reduce((sum, [name]) => sum + row.stages[name], 0);
  const cause = { hold: row.held_for, queue: row.queued_for };
  return html`<${Panel} title=${title} note=${row.router && `router ${row.router}`}>
    <p><${Answer} row=${row}/></p>
    ${(row.cause || row.limit) && html`<div class="notice ${row.status >= 400 || row.code ? "bad" : ""}" role="note">${row.limit && html`<p><b>Limit reached: ${limitText(row.limit)}${LIMIT_NAMES[row.limit] ? html` (<code>${row.limit}</code>)` : ""}.</b></p>`}<p>${row.cause}</p>${row.next_step && html`<p><b>Next:</b> ${row.next_step}.</p>`}</div>`}
    <${Facts} rows=${[["Ended", clock(row.at, { date: true })], row.stage && ["Ended when", ENDED_IN[row.stage] || row.stage], ["Tenant", row.tenant ? html`<${Link} to=${"tenants/" + row.tenant}>${row.tenant}<//>` : "none"],
      ["Key", row.key ? html`${notes.get(row.key) || ""} <code>${row.key}</code> <${Link} to="requests" query=${{ key: row.key }}>its requests<//>` : "none"], ["Asked for", row.asked || missing], ["Adapter", html`<${Target} row=${row}/>`],
      ["Worker", row.worker ? html`<${WorkerLink} id=${row.worker}/>` : "none"], ["Attempts", String(row.attempts ?? 0)], row.failures?.length > 0 && ["Failed attempts", row.failures.map((one) => `${one.worker}: ${one.reason.replaceAll("_", " ")}`).join("; "), true],
      ["Call", `${row.method || ""} ${row.path || ""}`], row.prompt_tokens !== null && row.prompt_tokens !== undefined && ["Tokens", `${row.prompt_tokens} prompt, ${row.cached_tokens ?? "?"} of them cached, ${row.completion_tokens ?? 0} output`], ["Request id", html`<code>${row.request_id}</code>`, true]]}/>
    ${whole > 0 && html`<h3>Where its ${seconds(whole)} went</h3><div class="term-bar" role="img" aria-label=${stages.map(([name, label]) => `${label} ${seconds(row.stages[name])}`).join(", ")}>${stages.map(([name], at) => html`<span class="s${at % 8}" style=${{ width: share(row.stages[name] / whole, 2).replace(" ", "") }}></span>`)}</div>
      <ul class="lines">${stages.map(([name, label, about], at) => html`<li key=${name}><i class="swatch s${at % 8}"></i><b>${seconds(row.stages[name])} ${label}</b><span class="grow muted">${cause[name] ? `for ${cause[name]}` : about}</span></li>`)}</ul>`}
    ${row.worker && !hasDecision && html`<p class="note">The whole decision is not kept any more: routers keep their last 1,000, under load a sample.${row.terms ? ` ${row.terms.worker_id} cost ${seconds(row.terms.cost_s)}: ${TERMS.filter(([name]) => row.terms[name] > 0.0005).map(([name, label]) => `${label} ${seconds(row.terms[name])}`).join(", ") || "nothing to speak of"}.` : ""}</p>`}<//>`;
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
