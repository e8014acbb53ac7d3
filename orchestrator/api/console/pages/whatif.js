// What if: the placement under other demand, other workers, another policy. Nothing is done.
import { html, useEffect, useRef, useState } from "../lib.js";
import { all, call, get, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Field, Head, Loaded, Panel, Choice, useLater } from "../parts.js";
import { AdapterLink, WorkerLink } from "../route.js";
import { bytes, number, plural, seconds } from "../format.js";

const FACTORS = [0, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100];

export function WhatIfPage() {
  const found = useLoad((signal) => Promise.all([all("/v1/workers"), get("/v1/adapters?limit=2000", { signal })]), [], { follow: "none" });
  return html`<${Head} title="What if"/><${Loaded} of=${found}>${([workers, adapters]) => html`<${Question} workers=${workers} adapters=${adapters.data}/>`}<//>`;
}

function Question({ workers, adapters }) {
  const [gone, setGone] = useState(new Set()), [more, setMore] = useState(0), [factor, setFactor] = useState(3), [who, setWho] = useState(""), [plan, setPlan] = useState(null), [error, setError] = useState(""), [isBusy, setBusy] = useState(false), latest = useRef(0);
  const toggle = (id) => { const next = new Set(gone); next.has(id) ? next.delete(id) : next.add(id); setGone(next); };
  const ask = async (event) => {
    event?.preventDefault(); setBusy(true); setError("");
    const turn = latest.current += 1;  // an answer to an earlier question may come later
    const asked = who ? [who] : adapters.map((one) => one.lora_id);
    const body = { workers_gone: [...gone], workers_more: more ? [{ count: more }] : [], demand: FACTORS[factor] === 1 ? {} : Object.fromEntries(asked.map((id) => [id, { factor: FACTORS[factor] }])) };
    try {
      const answer = await call("POST", "/v1/placements/plan", { body });
      if (turn === latest.current) setPlan({ ...answer, gone: [...gone] });
    } catch (problem) { if (turn === latest.current) { setPlan(null); setError(problem.message); } }
    if (turn === latest.current) setBusy(false);
  };
  // Small fleets answer at once, so that the sliders show their effect while they move.
  const asks = useLater(`${factor} ${who} ${more} ${[...gone].join(" ")}`, 350), first = useRef(asks);
  useEffect(() => { if (asks !== first.current && adapters.length <= 300 && workers.length <= 50) { first.current = asks; ask(); } }, [asks]);
  return html`<div class="grid two"><${Panel} title="Suppose"><form class="form" onSubmit=${ask}>
      <${Field} label=${`Demand × ${FACTORS[factor]}`} hint="of the present demand"><input type="range" min="0" max=${FACTORS.length - 1} step="1" value=${factor} aria-valuetext=${`times ${FACTORS[factor]}`} onInput=${(event) => setFactor(Number(event.target.value))}/><//>
      <${Field} label="For"><${Choice} label="Adapter with this demand" value=${who} options=${[["", "every adapter"], ...adapters.slice(0, 1000).map((one) => [one.lora_id, one.lora_id])]} onChange=${setWho}/><//>
      <${Field} label=${`${plural(more, "worker")} more`} hint="empty, like the first ready one"><input type="range" min="0" max="20" value=${more} onInput=${(event) => setMore(Number(event.target.value))}/><//>
      <fieldset class="workers"><legend>Without</legend><div class="checks">${workers.slice(0, 200).map((one) => html`<label class="check" key=${one.id}><input type="checkbox" checked=${gone.has(one.id)} onChange=${() => toggle(one.id)}/><span>${one.id}</span></label>`)}</div></fieldset>
      <div class="bar"><button class="action primary" disabled=${isBusy}>${isBusy ? "Computing…" : "What would happen?"}</button>${gone.size > 0 && html`<button type="button" class="action" onClick=${() => setGone(new Set())}>All workers</button>`}<span class="note">nothing is done</span></div></form>
      ${error && html`<p class="notice bad" role="alert">${error}</p>`}<//>
    <${Outcome} plan=${plan} adapters=${adapters}/></div>${plan && html`<${Actions} plan=${plan}/>`}`;
}

// Adapters that have a copy now and have none after the plan: their next request has to load them.
export function losesAll(plan, adapters) {
  const held = new Map(adapters.map((one) => [one.lora_id, new Set(one.workers.filter((id) => !plan.gone.includes(id)))]));
  const at = (id) => held.get(id) || held.set(id, new Set()).get(id);
  for (const one of plan.actions) {
    if (one.operation === "load") at(one.lora_id).add(one.worker_id);
    if (one.operation === "unload" || one.operation === "drain") at(one.lora_id).delete(one.worker_id);
    if (one.evict) at(one.evict).delete(one.worker_id);
  }
  return adapters.filter((one) => one.workers.length && !held.get(one.lora_id).size).map((one) => one.lora_id);
}

function Outcome({ plan, adapters }) {
  if (!plan) return html`<${Panel} title="Then"><p class="muted">Choose what to suppose, and ask. The orchestrator runs its own placement on it, pass by pass, as it would in earnest.</p><//>`;
  const targets = Object.entries(plan.targets), lost = losesAll(plan, adapters), loads = plan.actions.filter((one) => one.operation === "load");
  const isOld = new Set(adapters.filter((one) => one.error && !one.workers.length).map((one) => one.lora_id)), unplaced = plan.unplaced.filter((id) => !isOld.has(id));
  const before = plan.unplaced.length - unplaced.length;
  return html`<${Panel} title="Then" note=${plan.is_settled === false ? "it would not settle within 30 passes" : ""}><div class="tiles">${[["Loads", plan.cost.loads, bytes(plan.cost.bytes)], ["Unloads", plan.cost.unloads, "copies that go"], ["Settled after", seconds(plan.cost.seconds), "until the last load has ended"], ["Without a place", unplaced.length, (unplaced.length ? "requests for them would wait" : "every adapter fits") + (before ? `; ${before} ${before === 1 ? "has" : "have"} none today` : "")], ["Last copy goes", lost.length, lost.length ? "loaded again when asked for" : "no adapter loses all copies"]]
      .map(([label, value, under]) => html`<div class="tile ${label === "Without a place" && value ? "bad" : ""}" key=${label}><span class="label">${label}</span><span class="value">${value}</span><span class="under">${under}</span></div>`)}</div>
    <ul class="lines">${loads.slice(0, 8).map((one, at) => html`<li key=${at}><b><${AdapterLink} id=${one.lora_id}/></b><span class="grow">is loaded on <${WorkerLink} id=${one.worker_id}/>${one.seconds ? ` in ${seconds(one.seconds)}` : ""}</span></li>`)}${lost.slice(0, 8).map((id) => html`<li key=${"l" + id}><b><${AdapterLink} id=${id}/></b><span class="grow warn-text">loses its last copy; its next request loads it again</span></li>`)}</ul>
    ${unplaced.length > 0 && html`<ul class="lines">${unplaced.slice(0, 30).map((id) => html`<li key=${id}><b><${AdapterLink} id=${id}/></b><span class="grow muted">${plan.reasons[id]}</span></li>`)}</ul>`}
    ${targets.length > 0 && html`<h3>Replicas wanted</h3><ul class="lines">${targets.slice(0, 50).map(([id, one]) => html`<li key=${id}><b><${AdapterLink} id=${id}/></b><span class="grow muted">${one.before} → ${one.after}</span></li>`)}</ul>`}<//>`;
}

const Actions = ({ plan }) => html`<${Panel} title="What the orchestrator would do" note=${plural(plan.actions.length, "action")}><${Table} label="Actions" rows=${plan.actions.map((one, at) => ({ ...one, at }))} rowKey=${(row) => row.at} sort="at" name="actions" empty="Nothing: the placement stays as it is." columns=${[
  { id: "at", label: "#", numeric: true, value: (row) => row.at, cell: (row) => row.at + 1 }, { id: "turn", label: "pass", numeric: true, hide: "narrow", value: (row) => row.turn },
  { id: "operation", label: "action", value: (row) => row.operation }, { id: "adapter", label: "adapter", value: (row) => row.lora_id, cell: (row) => html`<${AdapterLink} id=${row.lora_id}/>` }, { id: "worker", label: "worker", value: (row) => row.worker_id, cell: (row) => html`<${WorkerLink} id=${row.worker_id}/>` },
  { id: "reason", label: "why", value: (row) => row.reason, cell: (row) => html`<span class="muted wrap">${row.reason}${row.evict ? `; evicts ${row.evict}` : ""}</span>` }, { id: "size", label: "size", numeric: true, hide: "narrow", value: (row) => row.size_bytes, cell: (row) => bytes(row.size_bytes) }, { id: "seconds", label: "takes", numeric: true, hide: "narrow", value: (row) => row.seconds, cell: (row) => seconds(row.seconds) }]}/><//>`;
