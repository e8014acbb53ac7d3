// Several adapters at once: chosen in the table, retried or deleted one by one.
import { html, useMemo, useState } from "../lib.js";
import { call, may } from "../api.js";
import { Table } from "../table.js";
import { plural } from "../format.js";
import { Act, path } from "./actions.js";

const AT_A_TIME = 8;
const named = (ids) => ids.slice(0, 6).join(", ") + (ids.length > 6 ? ` and ${ids.length - 6} more` : "");

// The table of adapters; `columns[0]` has the names, and the boxes that choose them.
export function AdapterTable({ rows, columns }) {
  const [chosen, setChosen] = useState(new Set());
  const toggle = (id) => setChosen((before) => { const next = new Set(before); next.has(id) ? next.delete(id) : next.add(id); return next; });
  const canChoose = may("tenant-admin");
  const shown = useMemo(() => canChoose ? [{ ...columns[0], cell: (row) => html`<span class="check"><input type="checkbox" aria-label=${`Choose ${row.lora_id}`} checked=${chosen.has(row.lora_id)} onChange=${() => toggle(row.lora_id)}/>${columns[0].cell(row)}</span>` }, ...columns.slice(1)] : columns, [columns, chosen, canChoose]);
  const picked = rows.filter((row) => chosen.has(row.lora_id));
  return html`${picked.length > 0 && html`<${Chosen} picked=${picked} rows=${rows} setChosen=${setChosen}/>`}
    <${Table} label="Adapters" rows=${rows} rowKey=${(row) => row.lora_id} sort="-requests" empty="No adapter matches." columns=${shown}/>`;
}

function Chosen({ picked, rows, setChosen }) {
  const all = picked.map((row) => row.lora_id), failed = picked.filter((row) => row.state === "failed").map((row) => row.lora_id);
  const done = (id) => setChosen((before) => new Set([...before].filter((one) => one !== id)));
  return html`<div class="bar" role="group" aria-label="Chosen adapters"><b>${plural(picked.length, "adapter")} chosen</b>
    ${failed.length > 0 && html`<${Act} label=${`Retry ${failed.length}`} title=${`Retry ${plural(failed.length, "adapter")}`} scope="tenant-admin" verb="Retry" what=${`Forget why these failed, and try to load them again: ${named(failed)}.`} run=${() => forEach(failed, (id) => call("POST", `/v1/adapters/${path(id)}/retry`), done)} done=${`${plural(failed.length, "adapter")}: tried again.`}/>`}
    <${Act} label=${`Delete ${all.length}`} tone="danger" title=${`Delete ${plural(all.length, "adapter")}`} scope="tenant-admin" verb="Delete them" what=${`Drain and unload everywhere, and forget: ${named(all)}. Requests for them get 404 at once; those under way finish. This cannot be taken back.`} run=${() => forEach(all, (id) => call("DELETE", "/v1/adapters/" + path(id)), done)} done=${`${plural(all.length, "adapter")}: being deleted.`}/>
    ${picked.length < rows.length && html`<button type="button" class="link" onClick=${() => setChosen(new Set(rows.map((row) => row.lora_id)))}>Choose all ${rows.length} shown</button>`}
    <button type="button" class="link" onClick=${() => setChosen(new Set())}>Choose none</button></div>`;
}

// Runs a call for each, some at a time; those that are done are not chosen any more, errors of the others are one error.
async function forEach(ids, run, done) {
  const left = [...ids], errors = [];
  const worker = async () => {
    for (let id = left.shift(); id !== undefined; id = left.shift()) {
      try { await run(id); done(id); } catch (problem) { errors.push(problem.message); }
    }
  };
  await Promise.all(Array.from({ length: AT_A_TIME }, worker));
  if (errors.length) throw new Error(`${ids.length - errors.length} of ${ids.length} done. ${errors.slice(0, 3).join(" · ")}${errors.length > 3 ? ` · and ${errors.length - 3} more` : ""}`);
}
