// Shares of traffic: an adapter's by worker and by tenant, a worker's by adapter and by tenant.
import { html } from "../lib.js";
import { get, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Loaded, Meter, Panel } from "../parts.js";
import { AdapterLink, Link, WorkerLink } from "../route.js";
import { number, seconds, share } from "../format.js";

const OTHERS = "(others)";
const NOBODY = { worker: "no worker", adapter: "base model", tenant: "no tenant" };
const LINKS = {
  worker: (name) => html`<${WorkerLink} id=${name}/>`,
  adapter: (name) => html`<${AdapterLink} id=${name}/>`,
  tenant: (name) => html`<${Link} to=${"tenants/" + name} class="name">${name}<//>`,
};
const shownName = (by, name) => name && name !== OTHERS ? LINKS[by](name) : html`<span class="muted">${name || NOBODY[by]}</span>`;

// kind: "adapter" or "worker"; by: what its requests are divided by.
export function SharesPanel({ title, kind, name, by, rangeS }) {
  const found = useLoad((signal) => get(`/v1/traffic/shares?kind=${kind}&name=${encodeURIComponent(name)}&by=${by}&range_s=${rangeS}`, { signal }), [kind, name, by, rangeS], { follow: "ticks" });
  const isTimed = kind === "adapter" && by === "worker";
  return html`<${Panel} title=${title} note=${rangeS > 3600 ? "in whole ten minutes" : "in whole minutes"}><${Loaded} of=${found}>${(list) => html`<${Table} label=${title} name=${"by-" + by} rows=${list.data} rowKey=${(row) => row.name} sort="-requests" maxHeight="short" empty="No requests in this time." columns=${[
    { id: "name", label: by, value: (row) => row.name, cell: (row) => shownName(by, row.name) },
    { id: "share", label: "share", numeric: true, value: (row) => row.share, cell: (row) => html`<${Meter} value=${row.share} of=${1} tone="plain" format=${(value) => share(value)} label=${`${share(row.share)} of its requests`}/>` },
    { id: "requests", label: "requests", numeric: true, value: (row) => row.requests, cell: (row) => number(row.requests) },
    isTimed && { id: "p95", label: "p95", title: "time to first token, p95", numeric: true, value: (row) => row.first_token_s.p95, cell: (row) => seconds(row.first_token_s.p95) },
    { id: "cold", label: "cold starts", numeric: true, value: (row) => row.cold_starts, cell: (row) => number(row.cold_starts) },
    { id: "errors", label: "errors", numeric: true, value: (row) => row.errors, cell: (row) => html`<span class=${row.errors ? "bad-text" : ""}>${number(row.errors)}</span>` },
    { id: "hit", label: "cache hits", numeric: true, hide: "wide", value: (row) => row.hit_real, cell: (row) => share(row.hit_real) },
    { id: "output", label: "output tokens", numeric: true, hide: "wide", value: (row) => row.output_tokens, cell: (row) => number(row.output_tokens) },
  ].filter(Boolean)}/>`}<//><//>`;
}
