// A published name: its versions, which one is live, and moving it to another that is kept.
import { html, useState } from "../lib.js";
import { call, get, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Actor, Facts, Field, Head, Loaded, Panel, State } from "../parts.js";
import { AdapterLink, Link, WorkerLink, go, href } from "../route.js";
import { ago, clock, digest12, missing, plural, span } from "../format.js";
import { HistoryLines } from "./activity.js";
import { Act, path } from "./actions.js";

const stale = (seconds) => seconds ? span(seconds) : "no limit";

export function PublishedPage({ name }) {
  const found = useLoad((signal) => Promise.all([get("/v1/published/" + path(name), { signal }), get(`/v1/history?limit=50&kind=name_published&kind=name_deleted&subject=${encodeURIComponent(name)}`, { signal })]), [name]);
  const item = found.data?.[0], latest = found.data?.[1].data.find((entry) => entry.kind === "name_published");
  return html`<${Head} title=${name} crumbs=${[html`<${Link} to="aliases">Aliases<//> /`]}>${item && html`<${KeepButton} item=${item}/><${DeleteButton} item=${item}/>`}<//>
    <${Loaded} of=${found}>${([one, history]) => html`
      <${Panel}><${Facts} rows=${[
        ["Current version", one.lora_id ? html`<${AdapterLink} id=${one.lora_id}/>` : "none is ready yet"], ["Digest", html`<code title=${one.digest}>${digest12(one.digest)}</code>`], ["Put there by", latest ? html`<${Actor} is=${latest.actor}/>, ${ago(latest.at)}` : missing],
        ["Ready on", one.workers.length ? one.workers.map((id, at) => html`${at ? ", " : ""}<${WorkerLink} id=${id}/>`) : "no worker"], ["Must be ready on", one.replicas === "all" ? "every worker, before the name moves" : plural(one.replicas, "worker")],
        ["Versions kept", plural(one.keep_versions, "newest version")], ["A former version goes after", stale(one.max_staleness_s)], ["Tenant", one.tenant ? html`<${Link} to=${"tenants/" + one.tenant}>${one.tenant}<//>` : "none: everyone may use it"], one.shadows_base && ["Base model", "for its key it takes the place of the base model"],
      ]}/><//>
      <${Panel} title="Versions" note="those that are kept"><${Table} label="Versions" name="versions" rows=${one.versions} rowKey=${(row) => row.lora_id} sort="-version" empty="No version is kept." columns=${[
        { id: "version", label: "version", numeric: true, value: (row) => row.version },
        { id: "adapter", label: "adapter", value: (row) => row.lora_id, cell: (row) => html`<${AdapterLink} id=${row.lora_id}/>` },
        { id: "state", label: "state", value: (row) => stateOf(row, one), cell: (row) => html`<${State} is=${stateOf(row, one)}/>` },
        { id: "at", label: "put there", value: (row) => row.published_at || "", cell: (row) => row.published_at ? clock(row.published_at) : missing },
        { id: "left", label: "left", hide: "narrow", value: (row) => row.superseded_at || "", cell: (row) => row.superseded_at ? clock(row.superseded_at) : missing },
        { id: "digest", label: "digest", hide: "narrow", value: (row) => row.digest, cell: (row) => html`<code>${digest12(row.digest)}</code>` },
        { id: "act", label: "actions", cell: (row) => stateOf(row, one) === "kept" && html`<${PointButton} item=${one} version=${row}/>` }]}/><//>
      <${Panel} title="History" note="who put which version live, and when"><${HistoryLines} entries=${history.data}/><//>`}<//>`;
}

const stateOf = (version, item) => version.lora_id === item.lora_id ? "live" : version.published_at ? "kept" : "loading";
// A load may take its time, and a person sees that it goes on.
const publish = (item, body) => call("POST", "/v1/published/" + path(item.name), { body: { timeout_s: 100, ...body } });

function PointButton({ item, version }) {
  const isLost = item.keep_versions < 2;
  return html`<${Act} label="Point here" scope="register" title=${`Point ${item.name} at version ${version.version}`} verb="Point here" what=${`Load ${version.lora_id} on ${item.replicas === "all" ? "every worker" : plural(item.replicas, "worker")}, then send new requests for ${item.name} to it, at every router at once. Those under way finish on ${item.lora_id || "their version"}. On any error the name stays where it is.${isLost ? ` One version is kept: ${item.lora_id} is deleted then, and this cannot be taken back.` : ""}`}
    run=${() => publish(item, { digest: version.digest })} undo=${!isLost && item.digest ? () => publish(item, { digest: item.digest }) : undefined} done=${(now) => `${item.name} is ${now.lora_id}.`}/>`;
}

function KeepButton({ item }) {
  const [keep, setKeep] = useState(""), [staleS, setStale] = useState("");
  if (!item.digest) return "";
  const given = (text, before) => text.trim() === "" ? before : Number(text);
  const next = { keep_versions: given(keep, item.keep_versions), max_staleness_s: given(staleS, item.max_staleness_s) };
  const isLess = next.keep_versions < item.keep_versions || (next.max_staleness_s && (!item.max_staleness_s || next.max_staleness_s < item.max_staleness_s));
  const body = (settings) => ({ digest: item.digest, ...settings });
  const before = { keep_versions: item.keep_versions, max_staleness_s: item.max_staleness_s };
  const changed = Object.keys(next).filter((name) => next[name] !== before[name]);
  return html`<${Act} label="What is kept" scope="register" title=${`Which versions of ${item.name} are kept`} verb="Set" ready=${changed.length > 0 && next.keep_versions >= 1 && next.max_staleness_s >= 0}
    what=${changed.length ? `${changed.map((name) => `${name}: ${before[name]} → ${next[name]}`).join("; ")}. The name stays at ${item.lora_id}.${isLess ? " Versions beyond that are deleted with the next pass, and do not come back." : ""}` : "Nothing is changed yet."}
    run=${() => publish(item, body(next))} undo=${() => publish(item, body(before))} done="It is set.">
    <${Field} label="Newest versions that stay (keep_versions)" hint="at least 1; the live one is among them"><input type="number" min="1" max="100" placeholder=${item.keep_versions} value=${keep} onInput=${(event) => setKeep(event.target.value)}/><//>
    <${Field} label="Seconds until a former version goes (max_staleness_s)" hint="0: no limit"><input type="number" min="0" placeholder=${item.max_staleness_s} value=${staleS} onInput=${(event) => setStale(event.target.value)}/><//><//>`;
}

function DeleteButton({ item }) {
  return html`<${Act} label="Delete" tone="danger" scope="register" title=${`Delete the name ${item.name}`} verb="Delete it" what=${`Requests for ${item.name} get 404 at once; those under way finish. Its ${plural(item.versions.length, "version")} leave every worker. This cannot be taken back: publish the bytes again to have it back.`}
    run=${() => call("DELETE", "/v1/published/" + path(item.name))} done=${() => { go(href("aliases")); return `${item.name} is being deleted.`; }}/>`;
}
