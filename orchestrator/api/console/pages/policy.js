// The placement policy: each value with where it comes from; changes are shown, and what they would do, before they apply.
import { html, useState } from "../lib.js";
import { call, get, may, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Actor, Head, Loaded, Panel } from "../parts.js";
import { ago, bytes, plural, seconds } from "../format.js";
import { HistoryLines } from "./activity.js";
import { Act } from "./actions.js";

let fields = null;  // name -> {default, description, type, enum}, as the REST API describes them

async function described(signal) {
  fields ||= (await get("/openapi.json", { signal })).components.schemas.PlacementPolicy.properties;
  return fields;
}

export function PolicyPage() {
  const found = useLoad((signal) => Promise.all([get("/v1/policy", { signal }), described(signal), get("/v1/history?limit=200&kind=policy_changed", { signal })]), []);
  return html`<${Head} title="Policy"/><${Loaded} of=${found}>${([policy, known, history]) => html`
    <${Values} policy=${policy} known=${known} history=${history.data}/>
    <${Panel} title="History" note="who changed what; before and after"><${HistoryLines} entries=${history.data.slice(0, 30)}/><//>`}<//>`;
}

// The newest entry that changed each field.
function lastChanges(history) {
  const found = new Map();
  for (const entry of history) for (const name of Object.keys(entry.body || {})) if (!found.has(name)) found.set(name, entry);
  return found;
}

function source(value, field, entry) {
  if (entry) return html`<${Actor} is=${entry.actor}/>, <span title=${entry.at}>${ago(entry.at)}</span>${value === field.default ? " (the default)" : ""}`;
  return value === field.default ? html`<span class="muted">default</span>` : "set before the history begins";
}

const meaning = (field) => (field.description || "").replaceAll("`", "");
const parsed = (text, field) => field.enum ? text : text.trim() === "" ? NaN : Number(text);
const isGood = (value, field) => field.enum ? field.enum.includes(value) : Number.isFinite(value) && (field.type !== "integer" || Number.isInteger(value));

function Values({ policy, known, history }) {
  const [draft, setDraft] = useState({});
  const entries = lastChanges(history), canEdit = may("operate");
  const rows = Object.keys(known).filter((name) => name in policy).map((name) => ({ name, field: known[name], value: policy[name], text: draft[name] }));
  const edited = rows.filter((row) => row.text !== undefined && parsed(row.text, row.field) !== row.value);
  const isReady = edited.length > 0 && edited.every((row) => isGood(parsed(row.text, row.field), row.field));
  const changes = Object.fromEntries(edited.map((row) => [row.name, parsed(row.text, row.field)]));
  const set = (name, text) => setDraft({ ...draft, [name]: text });
  return html`<${Panel} title="Values in force" note="of the whole fleet; an adapter may have its own" actions=${canEdit && html`
      ${edited.length > 0 && html`<button type="button" class="action" onClick=${() => setDraft({})}>Discard</button>`}
      <${ApplyButton} policy=${policy} changes=${changes} isReady=${isReady} onApplied=${() => setDraft({})}/>`}>
    <${Table} label="Policy" name="policy" rows=${rows} rowKey=${(row) => row.name} columns=${[
      { id: "name", label: "field", value: (row) => row.name, cell: (row) => html`<code>${row.name}</code><span class="only-narrow wrap sub">${meaning(row.field)}</span>` },
      { id: "value", label: "value", cell: (row) => canEdit ? html`<${Input} row=${row} onInput=${(text) => set(row.name, text)}/>` : String(row.value) },
      { id: "default", label: "default", numeric: true, hide: "narrow", value: (row) => row.field.default, cell: (row) => String(row.field.default) },
      { id: "source", label: "set by", value: (row) => entries.get(row.name)?.at || "", cell: (row) => source(row.value, row.field, entries.get(row.name)) },
      { id: "what", label: "meaning", hide: "narrow", cell: (row) => html`<span class="wrap muted">${meaning(row.field)}</span>` }]}/><//>`;
}

function Input({ row, onInput }) {
  const text = row.text ?? String(row.value), isWrong = row.text !== undefined && !isGood(parsed(row.text, row.field), row.field);
  if (row.field.enum) return html`<select aria-label=${row.name} value=${text} onChange=${(event) => onInput(event.target.value)}>${row.field.enum.map((one) => html`<option key=${one} value=${one} selected=${one === text}>${one}</option>`)}</select>`;
  return html`<input type="number" class="value" step="any" aria-label=${row.name} aria-invalid=${isWrong ? "true" : undefined} value=${text} onInput=${(event) => onInput(event.target.value)}/>`;
}

function ApplyButton({ policy, changes, isReady, onApplied }) {
  const [plan, setPlan] = useState(null);
  const names = Object.keys(changes), former = Object.fromEntries(names.map((name) => [name, policy[name]]));
  const look = (event) => { if (event.target.closest("dialog")) return; setPlan(null); if (isReady) call("POST", "/v1/placements/plan", { body: { policy: changes } }).then(setPlan, (problem) => setPlan({ error: problem.message })); };
  let after = "*";  // the ETag that the change has left: an undo must not overwrite what others changed since
  const patch = async (values, etag) => { const answer = await call("PATCH", "/v1/policy", { body: values, headers: { "if-match": etag } }); after = answer.etag || "*"; };
  if (!names.length) return html`<span class="note">change a value to see what it would do</span>`;
  return html`<span onClickCapture=${look}><${Act} label=${`Review ${plural(names.length, "change")}`} tone="primary" title="Change the policy" verb="Apply" ready=${isReady} what=${isReady ? effect(plan) : "A value is no number, or not one of those that are known."}
    run=${async () => { await patch(changes, policy.etag || "*"); onApplied(); }} undo=${() => patch(former, after)} done=${`${names.join(", ")}: changed. In force with the next pass.`}>
    <ul class="lines diff">${names.map((name) => html`<li key=${name}><code>${name}</code><span class="grow"><del>${former[name]}</del> → <ins>${changes[name]}</ins></span></li>`)}</ul><//></span>`;
}

function effect(plan) {
  if (plan === null) return "Reading what it would do…";
  if (plan.error) return `What it would do is not known: ${plan.error}`;
  if (!plan.actions.length) return "With the present demand nothing is loaded or unloaded by it.";
  return `With the present demand: ${plural(plan.cost.loads, "load")} (${bytes(plan.cost.bytes)}), ${plural(plan.cost.unloads, "unload")}, done after ${seconds(plan.cost.seconds)}${plan.unplaced.length ? `; ${plural(plan.unplaced.length, "adapter")} would find no place` : ""}.`;
}
