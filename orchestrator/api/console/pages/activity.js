// What happened: the history of the fleet, and its events as they come.
import { html, useMemo, useStore, useState } from "../lib.js";
import { events, get, useLoad } from "../api.js";
import { Choice, Head, Loaded, Panel, Search, useLater } from "../parts.js";
import { Link, place, setQuery } from "../route.js";
import { clock, seconds } from "../format.js";

const GROUPS = {
  "": "everything", incidents: "incidents", changes: "changes by people", loads: "loads and unloads",
};
const isLoad = (kind) => /load/.test(kind);
const isIncident = (kind) => /engine|worker_(started|killed|lost|hung|back|died|restarted)|incident|circuit|api_server|router_/.test(kind);
const TONE = (kind) => /fail|lost|killed|died|hung|opened|rolled_back|crash/.test(kind) ? "bad-text" : /delet|drain|cordon|abort|unload/.test(kind) ? "warn-text" : "";

export function EventLines({ most = 30, about }) {
  const shown = useStore(events).filter((event) => !about || event.lora_id === about || event.worker_id === about).slice(0, most);
  if (!shown.length) return html`<p class="muted">Nothing has changed since this page was opened. <${Link} to="activity">The history<//> has what was before.</p>`;
  return html`<ul class="lines">${shown.map((event) => html`<li key=${event.id}><time datetime=${event.at}>${clock(event.at)}</time><b class=${TONE(event.type)}>${event.type.replaceAll("_", " ").toLowerCase()}</b>
    <span class="grow">${event.lora_id && html`<${Link} to=${"adapters/" + event.lora_id}>${event.lora_id}<//>`} ${event.worker_id && html`on <${Link} to=${"workers/" + event.worker_id}>${event.worker_id}<//>`} <span class="muted">${event.message}</span></span></li>`)}</ul>`;
}

export function subjectLink(entry) {
  if (!entry.subject) return "";
  if (/^worker|^engine/.test(entry.kind)) return html`<${Link} to=${"workers/" + entry.subject}>${entry.subject}<//>`;
  if (/^alias/.test(entry.kind)) return html`<${Link} to=${"aliases/" + entry.subject}>${entry.subject}<//>`;
  return html`<${Link} to=${"adapters/" + entry.subject}>${entry.subject}<//>`;
}

export function HistoryLines({ entries }) {
  if (!entries.length) return html`<p class="empty">Nothing is recorded.</p>`;
  return html`<ul class="lines">${entries.map((entry) => html`<li key=${entry.id}><time datetime=${entry.at} title=${entry.at}>${clock(entry.at)}</time><b class=${TONE(entry.kind)}>${entry.kind.replaceAll("_", " ")}</b>
    <span class="grow">${subjectLink(entry)} <span class="muted">${bodyText(entry.body, entry.kind)}</span></span><span class="note">${entry.actor}</span></li>`)}</ul>`;
}

export function bodyText(body, kind = "") {
  if (/^(un)?load$/.test(kind) && body?.worker_id) {
    const took = body.duration_sec ? ` in ${seconds(body.duration_sec)}` : "";
    return `on ${body.worker_id}, ${body.outcome === "ok" ? "done" : body.outcome || ""}${took}${body.reason ? `: ${body.reason}` : ""}${body.error ? `; ${body.error}` : ""}`;
  }
  return Object.entries(body || {}).filter(([, value]) => value !== null && value !== "" && value !== undefined)
    .map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "object" ? JSON.stringify(value) : value}`).join(" · ").slice(0, 400);
}

export function ActivityPage() {
  const { query } = useStore(place);
  const group = query.get("show") || "", subject = query.get("about") || "";
  const asked = useLater(subject, 250);
  const [cursor, setCursor] = useState([]);
  const before = cursor[cursor.length - 1];
  const found = useLoad((signal) => get(`/v1/history?limit=300${asked ? "&subject=" + encodeURIComponent(asked) : ""}${before ? "&cursor=" + before : ""}`, { signal }), [asked, before]);
  return html`<${Head} title="Activity"/>
    <div class="bar"><${Search} value=${subject} label="An adapter, an alias or a worker, by its whole name" onInput=${(text) => { setCursor([]); setQuery({ about: text }); }}/>
      <${Choice} label="Show" value=${group} options=${Object.entries(GROUPS)} onChange=${(value) => setQuery({ show: value })}/></div>
    <div class="two-columns"><${Panel} title="History" note="the newest first; kept over restarts">
      <${Loaded} of=${found}>${(page) => html`<${HistoryLines} entries=${page.data.filter((entry) => matches(entry, group))}/>
        <div class="bar">${cursor.length > 0 && html`<button type="button" class="action" onClick=${() => setCursor(cursor.slice(0, -1))}>Newer</button>`}
        ${page.next && html`<button type="button" class="action" onClick=${() => setCursor([...cursor, page.next])}>Older</button>`}</div>`}<//><//>
      <${Panel} title="Live"><${EventLines} most=${40}/><//></div>`;
}

function matches(entry, group) {
  if (!group) return true;
  if (group === "loads") return isLoad(entry.kind);
  if (group === "incidents") return isIncident(entry.kind);
  return !isLoad(entry.kind) && !isIncident(entry.kind);
}
