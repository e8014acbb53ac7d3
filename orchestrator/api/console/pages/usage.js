// What was used: the ledger of a month, by tenant, key, adapter or base model, with costs if there is a price file.
import { html, useState } from "../lib.js";
import { get, save, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Choice, Loaded, Panel, say } from "../parts.js";
import { missing, number, seconds, span } from "../format.js";

const FIELDS = [["tenant", "by tenant"], ["key", "by key"], ["adapter", "by adapter"], ["version", "by version"], ["base_model", "by base model"], ["hour", "by hour"]];
const NONE = { tenant: "no tenant", key: "no key", adapter: "base models", version: missing, base_model: "unknown model" };
const MOST = 1000, MONTHS = 13;

// The last months as [value, label], this one first; a month is one of UTC, as in the ledger.
export function months(now = new Date()) {
  return Array.from({ length: MONTHS }, (_, back) => {
    const at = new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1));
    return [at.toISOString().slice(0, 7), at.toLocaleDateString([], { month: "long", year: "numeric", timeZone: "UTC" })];
  });
}

// The query of a month's usage by one field; `tenant`: of that one alone, "" of keys without one, null of all.
export function usageQuery(month, by, tenant) {
  const [year, monthNumber] = month.split("-").map(Number);
  const query = new URLSearchParams({ group_by: by, since: `${month}-01`, until: new Date(Date.UTC(year, monthNumber, 1)).toISOString() });
  if (tenant !== null) query.set("tenant", tenant);
  return query;
}

export function Usage({ tenant = null }) {
  const all = months(), [month, setMonth] = useState(all[0][0]), [by, setBy] = useState(tenant === null ? "tenant" : "adapter");
  const query = usageQuery(month, by, tenant), fields = tenant === null ? FIELDS : FIELDS.filter(([name]) => name !== "tenant");
  const found = useLoad((signal) => get(`/v1/usage?${query}&limit=${MOST}`, { signal }), [month, by, tenant], { follow: "none" });
  const download = () => save(`/v1/usage?${query}&format=csv`, `usage-${month}-by-${by}.csv`).catch((error) => say(error.message, { tone: "bad" }));
  const actions = html`<${Choice} label="Month" value=${month} options=${all} onChange=${setMonth}/> <${Choice} label="Usage by" value=${by} options=${fields} onChange=${setBy}/> <button type="button" class="action" onClick=${download}>Download CSV</button>`;
  return html`<${Panel} title="Usage" note="the ledger's month, in UTC; for bills" actions=${actions}><${Loaded} of=${found}>${(answer) => html`<${Table} label="Usage" name="usage" rows=${answer.data} rowKey=${(row) => Object.values(row.group).join()} sort=${by === "hour" ? "group" : answer.currency === null ? "-requests" : "-cost"} empty="Nothing was used in this month." columns=${columns(answer)}/>
    ${answer.next !== null && html`<p class="muted">The first ${MOST} rows; the CSV file has all.</p>`}`}<//><//>`;
}

function columns({ data, currency }) {
  const by = Object.keys(data[0]?.group || {})[0] || "", sum = (id, label, form = number, more = {}) => ({ id, label, numeric: true, value: (row) => row.usage[id], cell: (row) => form(row.usage[id]), ...more });
  return [
    { id: "group", label: by.replace("_", " "), value: (row) => row.group[by], cell: (row) => html`<span class="name">${row.group[by] || NONE[by]}</span>` },
    sum("requests", "requests"), sum("failed", "failed", number, { hide: "medium" }), sum("prompt_tokens", "prompt tokens"), sum("cached_tokens", "cached", number, { title: "prompt tokens that engines found in their caches" }), sum("completion_tokens", "completion tokens"),
    sum("prefill_s", "prefill", seconds, { hide: "medium", title: "engine time of prompts" }), sum("decode_s", "decode", seconds, { hide: "medium", title: "engine time of answers" }),
    sum("slot_s", "in slots", span, { hide: "medium", title: "time for which engines held adapters, of all engines together" }), sum("loads", "loads", number, { hide: "medium" }),
    ...(currency === null ? [] : [{ id: "cost", label: `cost (${currency})`, numeric: true, value: (row) => row.cost, cell: (row) => row.cost.toFixed(2) }]),
  ];
}
