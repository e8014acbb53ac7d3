// Pauses: whose requests routers hold, who said so, until when, and what waits; beginning and ending one.
import { html, useStore, useState } from "../lib.js";
import { call, get, may, me, now, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Actor, Choice, Field, Loaded, Panel } from "../parts.js";
import { clock, number, plural, span } from "../format.js";
import { Act } from "./actions.js";

const MODES = [["keep", "what runs goes on"], ["wait", "answer when nothing runs any more"], ["abort", "end what runs"]];
const ALL = "every tenant";
const whose = (pause) => pause.tenant === null ? ALL : `tenant ${pause.tenant}${pause.namespace ? `, namespace ${pause.namespace}` : ""}`;
const query = (pause) => `?tenant=${encodeURIComponent(pause.tenant ?? "")}&namespace=${encodeURIComponent(pause.namespace)}`;

// The pauses in force. `isQuiet`: nothing is shown while there are none.
export function Pauses({ isQuiet = false }) {
  const found = useLoad((signal) => get("/v1/pauses", { signal }), []);
  const fleet = useStore(now);
  if (isQuiet && !found.data?.data.length) return "";
  const left = (pause) => Math.max(0, Date.parse(pause.expires_at) / 1000 - (fleet?.at ?? Date.now() / 1000));
  return html`<${Panel} title="Pauses" note="new requests that routers hold; each ends by itself" actions=${html`<${PauseButton}/>`}><${Loaded} of=${found}>${(list) => html`<${Table} label="Pauses" name="pauses" rows=${list.data} rowKey=${(row) => row.scope} sort="whose" empty="Nothing is paused." columns=${[
    { id: "whose", label: "requests of", value: whose, cell: (row) => html`<span class="name">${whose(row)}</span>` },
    { id: "waits", label: "wait", numeric: true, title: "requests of this tenant, or of all, that a pause holds", value: (row) => waits(row, fleet), cell: (row) => html`<span class=${waits(row, fleet) ? "warn-text" : ""}>${number(waits(row, fleet))}</span>` },
    { id: "runs", label: "run on", numeric: true, value: (row) => row.running, cell: (row) => number(row.running) },
    { id: "ends", label: "ends in", numeric: true, value: left, cell: (row) => html`<span title=${row.expires_at}>${span(left(row))}</span>` },
    { id: "owner", label: "paused by", value: (row) => row.owner, cell: (row) => html`<${Actor} is=${row.owner}/>` },
    { id: "began", label: "since", hide: "narrow", value: (row) => row.began_at, cell: (row) => clock(row.began_at) },
    { id: "mode", label: "mode", hide: "narrow", value: (row) => row.mode },
    { id: "behind", label: "routers behind", hide: "medium", numeric: true, title: "live routers that do not hold yet", value: (row) => row.routers_behind },
    { id: "end", label: "actions", cell: (row) => html`<${EndButton} pause=${row} waiting=${waits(row, fleet)} leftS=${left(row)}/>` }]}/>`}<//><//>`;
}

function waits(pause, fleet) {
  const counts = fleet?.now.paused || {};
  return pause.tenant === null ? Object.values(counts).reduce((sum, count) => sum + count, 0) : counts[pause.tenant] || 0;
}

// Whether the reader's own calls concern this pause; another's takes scope operate.
function isOwn(pause) {
  const mine = me.get();
  return pause.tenant === mine?.spec.tenant && pause.namespace === (mine?.spec.namespace || "");
}

function EndButton({ pause, waiting, leftS }) {
  const scope = isOwn(pause) && pause.tenant !== null ? "register" : "operate";
  const canRenew = isOwn(pause) && may(pause.tenant === null ? "admin" : "register");
  return html`<${Act} label="End" title=${`End the pause of ${whose(pause)}`} verb="End it" scope=${scope} what=${`${plural(waiting, "request")} that ${waiting === 1 ? "waits" : "wait"} start at once, and new ones are not held any more. ${pause.owner} may pause again.`}
    run=${() => call("DELETE", "/v1/pauses" + (may("operate") ? query(pause) : ""))} undo=${canRenew && leftS > 5 ? () => call("POST", "/v1/pauses", { body: { mode: "keep", lease_s: leftS } }) : undefined} done="The pause is over."/>`;
}

function PauseButton() {
  const mine = useStore(me), [mode, setMode] = useState("keep"), [leaseS, setLease] = useState(300);
  const of = mine?.spec.tenant ? `tenant ${mine.spec.tenant}${mine.spec.namespace ? `, namespace ${mine.spec.namespace}` : ""}` : ALL;
  const runs = { keep: "Those under way go on.", wait: "Those under way go on, and this waits until they are over.", abort: "Those under way are ended." }[mode];
  return html`<${Act} label="Pause requests" title=${`Pause the requests of ${of}`} verb="Pause" scope=${mine?.spec.tenant ? "register" : "admin"} tone=${mode === "abort" ? "danger" : ""} ready=${leaseS > 0} what=${`Routers hold every new request of ${of} for ${span(leaseS)}, unless it is ended before. ${runs} Clients see no error: their requests wait.`}
    run=${() => call("POST", "/v1/pauses", { body: { mode, lease_s: leaseS } })} undo=${() => call("DELETE", "/v1/pauses")} done="The pause is in force at every router.">
    <${Field} label="Meanwhile"><${Choice} label="What happens to requests that run" value=${mode} options=${MODES} onChange=${setMode}/><//>
    <${Field} label="Seconds"><input type="number" min="1" max="3600" value=${leaseS} onInput=${(event) => setLease(Number(event.target.value) || 0)}/><//><//>`;
}
