// Orphans: adapters on workers that are not registered, such as those that a script loaded past the fleet.
import { html, useState } from "../lib.js";
import { CallError, call, get, useLoad } from "../api.js";
import { Table } from "../table.js";
import { Choice, Field, Loaded } from "../parts.js";
import { WorkerLink, go, href } from "../route.js";
import { bytes, digest12, missing, plural } from "../format.js";
import { Act, path } from "./actions.js";

export function Orphans() {
  const found = useLoad((signal) => get("/v1/orphans?limit=1000", { signal }), []);
  return html`<${Loaded} of=${found}>${(list) => html`<${Table} label="Orphans" rows=${list.data} rowKey=${(row) => [row.lora_id, row.card.digest, row.engine_name].join(" ")} sort="id" empty="Every adapter on a worker is registered." columns=${[
    { id: "id", label: "adapter", value: (row) => row.lora_id, cell: (row) => html`<span class="name">${row.lora_id}</span>` },
    { id: "workers", label: "workers", value: (row) => row.workers.join(", "), cell: (row) => row.workers.map((id, at) => html`${at ? ", " : ""}<${WorkerLink} id=${id}/>`) },
    { id: "act", label: "actions", cell: (row) => !row.problem && html`<span class="bar nowrap"><${AdoptButton} orphan=${row}/><${UnloadButton} orphan=${row}/></span>` },
    { id: "from", label: "loaded by", value: (row) => row.is_configured ? "named by the workers' settings" : row.is_foreign ? "another client" : "this fleet, before its store was lost" },
    { id: "rank", label: "rank", numeric: true, hide: "medium", value: (row) => row.card.rank || null, cell: (row) => row.card.rank || missing },
    { id: "size", label: "size", numeric: true, hide: "medium", value: (row) => row.card.size_bytes || null, cell: (row) => bytes(row.card.size_bytes || null) },
    { id: "digest", label: "digest", hide: "narrow", value: (row) => row.card.digest, cell: (row) => html`<code>${digest12(row.card.digest)}</code>` },
    { id: "problem", label: "can be adopted", value: (row) => row.problem || "yes", cell: (row) => row.problem ? html`<span class="wrap">${row.problem}</span>` : "yes" }]}/>`}<//>`;
}

const USERS = [["nobody", "operators alone"], ["tenants", "these tenants"], ["everyone", "everyone"]];

async function adopt(orphan, tenants) {
  const { data } = await call("POST", "/v1/orphans/adopt", { body: { lora_ids: [orphan.lora_id], tenants } });
  const failed = data.find((one) => one.error);
  if (failed) throw new CallError(failed.error, failed.status, failed.code);
}

function AdoptButton({ orphan }) {
  const [users, setUsers] = useState("nobody"), [names, setNames] = useState("");
  const named = names.split(",").map((one) => one.trim()).filter(Boolean);
  const moves = orphan.is_foreign ? ` It is loaded on ${plural(orphan.workers.length, "worker")} under the fleet's name for it; the script's copy goes when that is ready, and clients that call the engine under the old name get 404 from then on.` : " It stays loaded where it is.";
  return html`<${Act} label="Adopt" scope="admin" title=${`Adopt ${orphan.lora_id}`} verb="Adopt it" ready=${users !== "tenants" || named.length > 0} what=${`Register it with the bytes that are there: routers list it, and ${{ nobody: "operators alone", tenants: named.join(", ") || "these tenants", everyone: "everyone" }[users]} may use it.${moves} To be rid of it afterwards, delete it.`}
    run=${() => adopt(orphan, { nobody: [], tenants: named, everyone: null }[users])} done=${() => { go(href("adapters/" + orphan.lora_id)); return `${orphan.lora_id} is registered.`; }}>
    <${Field} label="Who may use it"><${Choice} label="Who may use it" value=${users} options=${USERS} onChange=${setUsers}/><//>
    ${users === "tenants" && html`<${Field} label="Tenants" hint="separated by commas"><input type="text" value=${names} onInput=${(event) => setNames(event.target.value)}/><//>`}<//>`;
}

function UnloadButton({ orphan }) {
  const unload = async () => {
    await adopt(orphan, []);
    try { await call("DELETE", "/v1/adapters/" + path(orphan.lora_id)); } catch (problem) { throw new CallError(`It is registered, for operators alone, and not deleted: ${problem.message}`, problem.status, problem.code); }
  };
  return html`<${Act} label="Unload" tone="danger" scope="admin" title=${`Unload ${orphan.lora_id}`} verb="Unload it" what=${`Register it for nobody, and delete it at once: it leaves ${orphan.workers.join(", ")}, and workers that are away now when they return. Its requests finish first. ${orphan.is_foreign ? "End the script that loads it before: it would load it again. " : ""}This cannot be taken back.`}
    run=${unload} done=${`${orphan.lora_id} is being unloaded.`}/>`;
}
