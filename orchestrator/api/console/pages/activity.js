// What happened: the history of the fleet, and its events as they come.
import { html, useStore, useState } from "../lib.js";
import { events, get, useLoad } from "../api.js";
import { Actor, Choice, Head, Loaded, Panel, Search, useLater } from "../parts.js";
import { Link, place, setQuery } from "../route.js";
import { ZONE, clock, digest12, missing, plural, seconds, share } from "../format.js";

const GROUPS = { "": "everything", incident: "incidents", changes: "changes by people", loads: "loads and unloads" };
export const KINDS = {
  changes: ["adapter_registered", "adapter_adopted", "adapter_changed", "adapter_deleted", "adapter_retried", "alias_set", "alias_deleted", "alias_rollout", "name_published", "name_deleted", "policy_changed", "worker_cordoned", "worker_draining", "worker_uncordoned", "copy_kept_out", "copy_allowed"],
  loads: ["load", "unload", "drain"], incident: ["incident"], "": [],
};
const TONES = { error: "bad-text", warning: "warn-text" };
const tone = (kind) => /fail|lost|killed|died|hung|rolled_back|crash/i.test(kind) ? "bad-text" : /delet|drain|cordon|abort|opened/i.test(kind) ? "warn-text" : "";

export function EventLines({ most = 30, about }) {
  const shown = useStore(events).filter((event) => !about || event.lora_id === about || event.worker_id === about).slice(0, most);
  if (!shown.length) return html`<p class="muted">Nothing since this page was opened. <${Link} to="activity">The history<//> has what was before.</p>`;
  return html`<ul class="lines">${shown.map((event) => html`<li key=${event.id}><time datetime=${event.at}>${clock(event.at)}</time><b class=${tone(event.type)}>${event.type.replaceAll("_", " ").toLowerCase()}</b>
    <span class="grow">${event.lora_id && html`<${Link} to=${"adapters/" + event.lora_id}>${event.lora_id}<//>`} ${event.worker_id && html`on <${Link} to=${"workers/" + event.worker_id}>${event.worker_id}<//>`} <span class="muted">${event.message}</span></span></li>`)}</ul>`;
}

const ofWorker = (entry) => entry.severity || /^worker_/.test(entry.kind);

export function subjectLink(entry) {
  if (!entry.subject) return "";
  const where = ofWorker(entry) ? "workers/" : /^alias/.test(entry.kind) ? "aliases/" : /^name_/.test(entry.kind) ? "published/" : "adapters/";
  return html`<${Link} to=${where + entry.subject}>${entry.subject}<//>`;
}

export function HistoryLines({ entries, empty = "Nothing is recorded." }) {
  if (!entries.length) return html`<p class="empty">${empty}</p>`;
  return html`<ul class="lines">${entries.map((entry) => html`<li key=${entry.id}><time datetime=${entry.at} title=${entry.at}>${clock(entry.at)}</time><b class=${TONES[entry.severity] || tone(entry.kind)}>${entry.kind.replaceAll("_", " ")}</b>
    ${entry.times > 1 && html`<span class="tag">${entry.times} times</span>`}<span class="grow">${subjectLink(entry)} <span class="muted">${bodyText(entry)}</span>${entry.next_step && html`<br/><span>${entry.next_step}</span>`}${outputOf(entry)}</span><${Actor} is=${entry.actor}/></li>`)}</ul>`;
}

// The output of an engine that came with an incident's cause.
function outputOf(entry) {
  const lines = String((entry.severity && entry.body?.cause) || "").split("\n").slice(1);
  return lines.length ? html`<details><summary>the engine's output</summary><pre class="log" tabindex="0">${lines.filter((line) => line !== "its output ends:").join("\n")}</pre></details>` : "";
}

const weights = (targets) => {
  if (!targets) return "nothing";
  const whole = targets.reduce((sum, [, weight]) => sum + weight, 0);
  return targets.map(([name, weight]) => `${name} ${share(whole ? weight / whole : 0)}`).join(", ");
};
const HIDDEN = new Set(["at", "key", "epoch", "router_id"]);

// What an entry says, in words.
export function bodyText({ kind, body, severity }) {
  if (!body) return "";
  if ((kind === "load" || kind === "unload") && body.worker_id) {
    const took = body.duration_sec ? ` in ${seconds(body.duration_sec)}` : "";
    return `on ${body.worker_id}, ${body.outcome === "ok" ? "done" : body.outcome || ""}${took}${body.reason ? `: ${body.reason}` : ""}${body.error ? `; ${body.error}` : ""}`;
  }
  if (kind === "alias_set" && Array.isArray(body.targets)) return `${weights(body.targets)}, before: ${weights(body.was)}${body.why ? `; ${body.why}` : ""}`;
  if (kind === "policy_changed") return Object.entries(body).map(([name, [before, after]]) => `${name}: ${before} → ${after}`).join(" · ");
  if (kind === "name_published") return `${body.lora_id} (${digest12(body.digest)})${body.is_new ? "" : ", kept from before"}; before: ${body.was ? weights(body.was) : "nothing"}`;
  if (kind === "alias_rollout") return [body.what.replaceAll("_", " "), Array.isArray(body.to) && `to ${weights(body.to)}`, body.why].filter(Boolean).join("; ");
  const cause = String(body.cause || "").split("\n")[0];
  if (severity) return cause.includes(" back after ") ? cause : [cause, body.seconds ? `after ${seconds(body.seconds)}` : "", body.adapters ? `${plural(body.adapters, "adapter")} back` : "", body.count > 1 ? `${body.count} times` : ""].filter(Boolean).join(", ");
  return Object.entries(body).filter(([name, value]) => !HIDDEN.has(name) && value !== null && value !== "")
    .map(([name, value]) => `${name.replaceAll("_", " ")}: ${valueText(name, value)}`).join(" · ").slice(0, 400);
}

// A field of an entry; a pair is what it was and what it is.
function valueText(name, value, isWhole = true) {
  if (Array.isArray(value) && isWhole && value.length === 2) return value.map((each) => valueText(name, each, false)).join(" → ");
  if (value === null || value === undefined) return name === "tenants" ? "everyone" : missing;
  if (Array.isArray(value)) return value.map((each) => valueText(name, each, false)).join(", ") || "none";
  if (typeof value === "object") return Object.entries(value).map(([key, each]) => `${key.replaceAll("_", " ")} ${valueText(key, each)}`).join(", ");
  return name === "digest" ? digest12(String(value)) : String(value);
}

export function ActivityPage() {
  const { query } = useStore(place);
  const group = query.get("show") || "", subject = query.get("about") || "";
  const asked = useLater(subject, 250);
  const [cursor, setCursor] = useState([]);
  const before = cursor[cursor.length - 1];
  const found = useLoad((signal) => get(`/v1/history?limit=100${KINDS[group].map((kind) => "&kind=" + kind).join("")}${asked ? "&subject=" + encodeURIComponent(asked) : ""}${before ? "&cursor=" + before : ""}`, { signal }), [asked, before, group]);
  return html`<${Head} title="Activity"/>
    <div class="bar"><${Search} value=${subject} label="An adapter, an alias or a worker, by its whole name" onInput=${(text) => { setCursor([]); setQuery({ about: text }); }}/>
      <${Choice} label="Show" value=${group} options=${Object.entries(GROUPS)} onChange=${(value) => { setCursor([]); setQuery({ show: value }); }}/></div>
    <div class="two-columns"><${Panel} title="History" note=${`the newest first; kept over restarts; times in ${ZONE}`}>
      <${Loaded} of=${found}>${(page) => html`<${HistoryLines} entries=${page.data}/>
        <div class="bar">${cursor.length > 0 && html`<button type="button" class="action" onClick=${() => setCursor(cursor.slice(0, -1))}>Newer</button>`}
        ${page.next && html`<button type="button" class="action" onClick=${() => setCursor([...cursor, page.next])}>Older</button>`}</div>`}<//><//>
      <${Panel} title="Live"><${EventLines} most=${40}/><//></div>`;
}
