// Tenants and keys: who uses how much, who waits, which key is refused.
import { html, useState, useStore } from "../lib.js";
import { get, now, useLoad, useRange } from "../api.js";
import { Table } from "../table.js";
import { Command, Dialog, Head, Loaded, Meter, Panel, State, Tile } from "../parts.js";
import { Link } from "../route.js";
import { clock, missing, number, plural, seconds, share } from "../format.js";
import { totalColumns, totals, traffic, TrafficCharts } from "./fleet.js";
import { stateOf } from "./adapters.js";
import { Usage } from "./usage.js";

// What of 429s is by a limit: of the codes that routers report, "429 rate_limited concurrent_requests" -> count.
const byLimit = (row, limit) => Object.entries(row?.codes || {}).filter(([name]) => name.startsWith("429") && name.endsWith(" " + limit)).reduce((whole, [, count]) => whole + count, 0);
const refused = (row, code = "429") => Object.entries(row?.codes || {}).filter(([name]) => name.startsWith(code)).reduce((whole, [, count]) => whole + count, 0);

export function TenantsPage({ tenant }) {
  const rangeS = useRange();
  if (tenant) return html`<${TenantPage} tenant=${tenant === "(none)" ? "" : tenant} rangeS=${rangeS}/>`;
  return html`<${Head} title="Tenants and keys" hasRange/><${Tenants} rangeS=${rangeS}/><${Keys} rangeS=${rangeS}/><${Usage}/>`;
}

function Tenants({ rangeS }) {
  const found = useLoad((signal) => totals("tenant", rangeS, signal), [rangeS], { follow: "ticks" });
  const fleet = useStore(now), waiting = (name) => (fleet?.now.waiting[name] || 0) + (fleet?.now.held[name] || 0);
  return html`<${Panel} title="Tenants" note="use in the time chosen above; who waits now"><${Loaded} of=${found}>${(rows) => html`<${Table} label="Tenants" name="tenants" rows=${withWaiting(rows, fleet)} rowKey=${(row) => row.name} sort="-requests" empty="No requests in this time." columns=${[
    { id: "name", label: "tenant", value: (row) => row.name, cell: (row) => html`<${Link} to=${"tenants/" + (row.name || "(none)")} class="name">${row.name || "no tenant"}<//>` },
    { id: "waiting", label: "wait now", numeric: true, value: (row) => waiting(row.name), cell: (row) => html`<span class=${waiting(row.name) ? "warn-text" : ""}>${waiting(row.name)}</span>` },
    ...totalColumns((row) => row),
    { id: "limited", label: "429", numeric: true, title: "answers 429: the key's limits, or no room at the engines", value: (row) => refused(row), cell: (row) => html`<span class=${refused(row) ? "warn-text" : ""}>${number(refused(row))}</span>` },
    { id: "prompt", label: "prompt tokens", numeric: true, hide: "medium", value: (row) => row.prompt_tokens, cell: (row) => number(row.prompt_tokens) }]}/>`}<//><//>`;
}

function withWaiting(rows, fleet) {
  const known = new Set(rows.map((row) => row.name));
  const more = [...new Set([...Object.keys(fleet?.now.waiting || {}), ...Object.keys(fleet?.now.held || {})])].filter((name) => !known.has(name));
  return [...rows, ...more.map((name) => ({ name, requests: 0, errors: 0, codes: {}, output_tokens: 0, prompt_tokens: 0, hit_real: null, waited_s: null, first_token_s: { p95: null } }))];
}

const LIMITS = { requests_per_minute: "requests/min", tokens_per_minute: "tokens/min", bytes_per_minute: "bytes/min", concurrent_requests: "at once" };
const PERIODS = ["day", "month"], UNITS = ["tokens", "engine_seconds"];
for (const period of PERIODS) for (const unit of UNITS) { const name = `${unit}_per_${period}`, label = `${unit.replace("_", "-")}/${period}`; LIMITS[name] = label; LIMITS["soft_" + name] = label + " (soft line)"; }
for (const [name, label] of Object.entries(LIMITS)) LIMITS["tenant_" + name] = label + " of the tenant";

function Keys({ rangeS }) {
  const found = useLoad(async (signal) => { const keys = get("/v1/keys", { signal }); return Promise.all([keys, totals("key", rangeS, signal), totals("key", RECENT_S, signal), keys.then((all) => spentBy(all.data, signal))]); }, [rangeS], { follow: "ticks" });
  return html`<${Panel} title="Keys" note="the note in the key file, and the first digits of the key's hash; the keys themselves are known to nobody here"><${Loaded} of=${found}>${([keys, sums, recent, spent]) => {
    const lately = new Map(recent.map((row) => [row.name, row])), byId = new Map(sums.map((row) => [row.name, row])), known = new Set(keys.data.map((key) => key.key_id));
    const rows = [...keys.data.map((key) => ({ ...key.spec, key_id: key.key_id, sums: byId.get(key.key_id) })), ...sums.filter((row) => !known.has(row.name)).map((row) => ({ key_id: row.name, tenant: null, scopes: [], limits: {}, expires_at: null, isGone: true, sums: row }))];
    return html`<${Table} label="Keys" name="keys" rows=${rows} rowKey=${(row) => row.key_id} sort="-requests" empty="No key file is set: everybody on this machine may do everything." columns=${[
      { id: "key", label: "key", value: (row) => row.note || row.key_id, cell: (row) => html`${row.note ? html`<span class="clip note-of-key" title=${row.note}>${row.note}</span> ` : ""}<code>${row.key_id}</code>${row.isGone ? html` <span class="tag">not in key files</span>` : row.issuer ? html` <span class="tag" title=${row.issuer}>token</span>` : ""}` },
      { id: "tenant", label: "tenant", value: (row) => row.tenant || "", cell: (row) => row.tenant ? html`<${Link} to=${"tenants/" + row.tenant}>${row.tenant}<//>` : "no tenant" },
      { id: "scopes", label: "scopes", hide: "wide", value: (row) => row.scopes.join(", "), cell: (row) => row.scopes.map((scope) => html`<span class="tag">${scope}</span> `) },
      ...totalColumns((row) => row.sums).filter((column) => ["requests", "output", "errors"].includes(column.id)).map((column) => (column.id === "requests" ? column : { ...column, hide: "wide" })),
      { id: "limited", label: "429", numeric: true, value: (row) => refused(row.sums), cell: (row) => html`<span class=${refused(row.sums) ? "warn-text" : ""}>${number(refused(row.sums))}</span>` },
      { id: "limits", label: "limits, and use of them", title: "mean of the last 5 minutes, without refused requests; of budgets, what this day or month in UTC has", value: (row) => Object.keys(row.limits).length, cell: (row) => html`<${Limits} row=${row} lately=${lately.get(row.key_id)} spent=${spent}/>` },
      { id: "expires", label: "expires", hide: "medium", value: (row) => row.expires_at || "", cell: (row) => row.expires_at ? html`<span class=${new Date(row.expires_at) < Date.now() ? "bad-text" : ""}>${clock(row.expires_at, { date: true })}</span>` : "never" },
      { id: "change", label: "actions", cell: (row) => !row.isGone && !row.issuer && html`<${KeyCommands} row=${row}/>` }]}/>`;
  }}<//><//>`;
}

// Keys are in files that services follow, so a command changes them, and no call does.
function KeyCommands({ row }) {
  const [isOpen, setOpen] = useState(false), close = () => setOpen(false);
  return html`<button type="button" class="link" aria-label=${`Revoke or rotate key ${row.key_id}`} onClick=${() => setOpen(true)}>Revoke, rotate</button>
    ${isOpen && html`<${Dialog} title=${`Key ${row.key_id}`} onClose=${close} footer=${html`<button type="button" class="action" onClick=${close}>Close</button>`}>
      <p>Keys are entries of a file that every service follows (<code>--key-files</code>; with <code>lorafleet up</code> its <code>--key-file</code>). These commands change it, where that file is; put its path in place of <code>keys.yaml</code>.</p>
      <h3>Rotate</h3><p class="muted">Prints a new key with the same tenant, scopes and limits, once. Both are valid for a day.</p><${Command} label=${`Rotate key ${row.key_id}`} text=${`lorafleet keys rotate ${row.key_id} --grace 24h --file keys.yaml`}/>
      <h3>Revoke</h3><p class="muted">Every service refuses it within a second. It cannot be taken back: make a new key instead.</p><${Command} label=${`Revoke key ${row.key_id}`} text=${`lorafleet keys revoke ${row.key_id} --file keys.yaml`}/>
      <p class="muted">On Kubernetes the file is a Secret, or <code>auth.keys</code> of the chart's values: change your copy with these commands, then apply it.</p><//>`}`;
}

const RECENT_S = 300;  // a limit is of a minute: a mean over hours would show a key far from it that is refused now

// What a key used of its limits in a minute, by its sums of the last `RECENT_S`; refused requests used nothing.
export function recentUse(sums) {
  const minutes = RECENT_S / 60;
  return { requests_per_minute: ((sums?.requests || 0) - refused(sums)) / minutes, tokens_per_minute: ((sums?.prompt_tokens || 0) + (sums?.output_tokens || 0)) / minutes };
}

const MOST_SPENT = 1000;  // keys or tenants in one answer of the ledger

// "<key|tenant> <day|month>" -> id -> what it has spent, of the periods for which some key or tenant has a budget.
async function spentBy(keys, signal) {
  const names = keys.flatMap(({ spec }) => [...Object.keys(spec.limits), ...Object.keys(spec.tenant_limits || {})]), today = new Date().toISOString();
  const since = { day: today.slice(0, 10) + "T00:00:00Z", month: today.slice(0, 7) + "-01" };
  const asked = PERIODS.filter((period) => names.some((name) => name.endsWith("_per_" + period))).flatMap((period) => ["key", "tenant"].map((by) => [by, period]));
  // Without a ledger the meters are left out.
  return Object.fromEntries(await Promise.all(asked.map(async ([by, period]) => [`${by} ${period}`, await get(`/v1/usage?group_by=${by}&since=${since[period]}&limit=${MOST_SPENT}`, { signal }).then((answer) => Object.fromEntries(answer.data.map((item) => [item.group[by], item.usage])), () => null)])));
}

// What a key and its tenant have spent of their budgets, by the names that `Limits` shows.
export function budgetUse(row, spent) {
  const found = {};
  for (const [by, id, prefix] of [["key", row.key_id, ""], ["tenant", row.tenant, "tenant_"]]) for (const period of PERIODS) {
    const all = spent[`${by} ${period}`], usage = all?.[id];
    if (!all || id === null) continue;
    const amounts = { tokens: (usage?.prompt_tokens || 0) + (usage?.completion_tokens || 0), engine_seconds: (usage?.prefill_s || 0) + (usage?.decode_s || 0) };
    for (const unit of UNITS) for (const line of ["", "soft_"]) found[`${prefix}${line}${unit}_per_${period}`] = amounts[unit];
  }
  return found;
}

function Limits({ row, lately, spent }) {
  const ofTenant = Object.entries(row.tenant_limits || {}).map(([name, limit]) => ["tenant_" + name, limit]);
  const entries = [...Object.entries(row.limits), ...ofTenant];
  if (!entries.length) return html`<span class="muted">none</span>`;
  const used = { ...recentUse(lately), ...budgetUse(row, spent) };
  const urgency = ([name, limit]) => byLimit(row.sums, name) || (used[name] ?? 0) / limit - 1, shown = [...entries].sort((left, right) => urgency(right) - urgency(left)).slice(0, 2);
  return html`<span class="limits" title=${entries.map(([name, limit]) => `${number(limit)} ${LIMITS[name] || name}`).join(", ")}>${shown.map(([name, limit]) => { const hits = byLimit(row.sums, name), said = hits ? html` <span class="bad-text">${number(hits)} refused</span>` : ""; return used[name] !== undefined ? html`<span key=${name} class="limit"><${Meter} value=${used[name]} of=${limit} tone=${hits ? "bad" : undefined} format=${(value) => `${number(value)} of ${number(limit)}`} label=${`${number(used[name])} of ${limit} ${LIMITS[name]}`}/> <span class="sub">${LIMITS[name]}</span>${said}</span> ` : html`<span class="limit" key=${name}><span class="tag">${number(limit)} ${LIMITS[name] || name}</span>${said}</span> `; })}</span>${entries.length > shown.length ? html` <span class="sub">+${entries.length - shown.length}</span>` : ""}`;
}

function TenantPage({ tenant, rangeS }) {
  const series = useLoad((signal) => traffic("tenant", tenant, rangeS, signal), [tenant, rangeS], { follow: "ticks" });
  const adapters = useLoad((signal) => get("/v1/adapters?limit=1000&tenant=" + encodeURIComponent(tenant), { signal }), [tenant]);
  return html`<${Head} title=${tenant || "Requests without a tenant"} crumbs=${[html`<${Link} to="tenants">Tenants<//> /`]} hasRange/>
    <${Loaded} of=${series} shape="charts">${(found) => html`<div class="tiles">${[
      ["Requests", number(found.total.requests), `${number(refused(found.total))} answered 429`], ["Prompt tokens", number(found.total.prompt_tokens), "in this time"], ["Output tokens", number(found.total.output_tokens), "in this time"],
      ["First token, p95", seconds(found.total.first_token_s.p95), `p50 ${seconds(found.total.first_token_s.p50)}`], ["Mean wait", seconds(found.total.waited_s), "for room at an engine"]]
      .map(([label, value, under]) => html`<${Tile} key=${label} label=${label} value=${value} under=${under}/>`)}</div><${TrafficCharts} found=${found}/>`}<//>
    <${Usage} tenant=${tenant}/>
    ${tenant && html`<${Panel} title="Adapters that it may use" note="requests of all tenants"><${Loaded} of=${adapters}>${(list) => html`<ul class="lines">${ownFirst(list.data).map((one) => html`<li key=${one.lora_id}><b><${Link} to=${"adapters/" + one.lora_id}>${one.lora_id}<//></b><${State} is=${stateOf(one)}/><span class="grow muted">${one.tenants ? "" : "open to everyone, "}${number(one.requests_per_s, 2)} requests/s now</span></li>`)}</ul>${!list.data.length && html`<p class="empty">None. Its adapters are those that name it in their tenants.</p>`}`}<//><//>`}`;
}

const ownFirst = (adapters) => [...adapters].sort((left, right) => !left.tenants - !right.tenants);
