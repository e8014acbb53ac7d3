// Actions: each says first what it will do, and is taken back where that is possible. A key without the scope sees none.
import { html, useStore, useState } from "../lib.js";
import { all, call, changes, get, may, me, useLoad } from "../api.js";
import { Dialog, Field, say } from "../parts.js";
import { go, href } from "../route.js";
import { bytes, plural, share, span } from "../format.js";

export const path = (name) => name.split("/").map(encodeURIComponent).join("/");
const refresh = () => changes.set(changes.get() + 1);

// A button that asks before it acts. `undo`: takes it back, for some seconds.
export function Act({ label, title, what, run, done, undo, tone = "", scope = "operate", children, ready = true, verb }) {
  const [isOpen, setOpen] = useState(false), [error, setError] = useState(""), [isBusy, setBusy] = useState(false);
  useStore(me);
  if (!may(scope)) return "";
  const act = async (event) => {
    event?.preventDefault(); setBusy(true); setError("");
    try {
      const result = await run();
      setOpen(false);
      say(typeof done === "function" ? done(result) : done, { undo: undo && (async () => { try { await undo(); say("Taken back."); refresh(); } catch (problem) { say(problem.message, { tone: "bad" }); } }) });
      refresh();
    } catch (problem) { setError(problem.message); }
    setBusy(false);
  };
  return html`<button type="button" class="action ${tone}" onClick=${() => { setError(""); setOpen(true); }}>${label}</button>
    ${isOpen && html`<${Dialog} title=${title || label} onClose=${() => setOpen(false)} footer=${html`<button type="button" class="action" onClick=${() => setOpen(false)}>Cancel</button><button type="button" class="action primary ${tone}" disabled=${isBusy || !ready} onClick=${act}>${isBusy ? "…" : verb || label}</button>`}>
      <form class="form" onSubmit=${act}>${children}<p>${typeof what === "function" ? what() : what}</p>${undo ? html`<p class="note">It can be taken back.</p>` : ""}${error && html`<p class="notice bad" role="alert">${error}</p>`}<button hidden></button></form><//>`}`;
}

export function AdapterActions({ adapter }) {
  const at = "/v1/adapters/" + path(adapter.lora_id), pinned = adapter.policy.pinned;
  const [replicas, setReplicas] = useState(Math.max(1, adapter.replicas.desired));
  const patch = (policy) => call("PATCH", at, { body: { policy } });  // the one field: others may have changed the rest
  return html`
    ${adapter.state === "failed" && html`<${Act} label="Retry" scope="tenant-admin" tone="primary" what=${`Forget why ${adapter.lora_id} failed, and try to load it again.`} run=${() => call("POST", at + "/retry")} done="It is tried again."/>`}
    <${Act} label="Load" scope="tenant-admin" title=${`Load ${adapter.lora_id}`} what=${`Ask for ${plural(replicas, "replica")}. A load may evict a less used adapter; replicas that nobody asks for go again later.`} run=${() => call("POST", at + "/ensure", { body: { replicas } })} done="It is asked for.">
      <${Field} label="Replicas"><input type="number" min="1" max="64" value=${replicas} onInput=${(event) => setReplicas(Number(event.target.value) || 1)}/><//><//>
    <${Act} label=${pinned ? "Unpin" : "Pin"} scope="tenant-admin" what=${pinned ? `Let ${adapter.lora_id} be evicted like any other adapter when room is needed.` : `Keep ${adapter.lora_id} where it is: it is never evicted for another adapter.`} run=${() => patch({ pinned: !pinned })} undo=${() => patch({ pinned })} done=${pinned ? "Unpinned." : "Pinned."}/>
    <${Act} label="Delete" tone="danger" scope="tenant-admin" title=${`Delete ${adapter.lora_id}`} what=${`Drain it on ${plural(adapter.workers.length, "worker")}, unload it everywhere and forget it. Requests for it get 404 at once; those under way finish. This cannot be taken back; it can be registered again from ${adapter.source}.`} run=${() => call("DELETE", at)} done="It is being deleted." verb="Delete it"/>`;
}

export function RegisterButton() {
  const [id, setId] = useState(""), [source, setSource] = useState(""), [tenants, setTenants] = useState(""), [checked, setChecked] = useState(null);
  const body = () => ({ lora_id: id.trim(), source: source.trim(), ...(tenants.trim() ? { tenants: tenants.split(",").map((one) => one.trim()).filter(Boolean) } : {}) });
  const check = async () => { setChecked({ text: "checking…" }); try { const found = await call("POST", "/v1/adapters?dry_run=1", { body: body() }); setChecked({ text: `A worker has read it: rank ${found.card?.rank ?? "?"}, base model ${found.base_model ?? "?"}. Nothing is stored.` }); } catch (problem) { setChecked({ text: problem.message, isBad: true }); } };
  return html`<${Act} label="Register" tone="primary" title="Register an adapter" scope="tenant-admin" verb="Register" ready=${id.trim() && source.trim()} what="Workers verify it, and load it when it is asked for. Its bytes are fixed from then on: other bytes are another name."
    run=${() => call("POST", "/v1/adapters", { body: body() })} undo=${() => call("DELETE", "/v1/adapters/" + path(id.trim()))} done=${() => { const name = id.trim(); go(href("adapters/" + name)); return `${name} is registered.`; }}>
    <${Field} label="Name" hint="such as sql-expert/v2"><input type="text" value=${id} onInput=${(event) => setId(event.target.value)} required/><//>
    <${Field} label="Source" hint="hf://, s3://, gs://, az://, https:// or file://, as workers reach it"><input type="text" value=${source} onInput=${(event) => setSource(event.target.value)} required/><//>
    <${Field} label="Tenants" hint="separated by commas; empty: everyone may use it"><input type="text" value=${tenants} onInput=${(event) => setTenants(event.target.value)}/><//>
    <div class="bar"><button type="button" class="action" disabled=${!id.trim() || !source.trim()} onClick=${check}>Check first</button></div>
    ${checked && html`<p class="notice ${checked.isBad ? "bad" : ""}" role="status">${checked.text}</p>`}<//>`;
}

const PARTS = ["adapter_config.json", "adapter_model.safetensors"];

// An adapter from this machine: one archive, or its two files.
export function UploadButton() {
  const [id, setId] = useState(""), [files, setFiles] = useState([]);
  const at = () => "/v1/adapters/" + path(id.trim());
  const isArchive = files.length === 1 && /\.(tar|tar\.gz|tgz|zip)$/.test(files[0].name);
  const parts = PARTS.map((name) => files.find((file) => file.name === name)), isWhole = isArchive || parts.every(Boolean);
  const size = files.reduce((sum, file) => sum + file.size, 0);
  const send = async () => {
    if (isArchive) return call("PUT", at(), { body: files[0], raw: true });
    let answer = null;
    for (const file of parts) answer = await call("PUT", `${at()}?file=${file.name}`, { body: file, raw: true });
    return answer;
  };
  return html`<${Act} label="Upload" title="Upload an adapter" scope="register" verb="Upload" ready=${id.trim() && isWhole} what=${isWhole ? `Send ${bytes(size)} to a worker, which verifies it. The fleet keeps copies of it, and it is registered under this name. On any error nothing is registered.` : "Choose one archive (.tar, .tar.gz, .zip), or both adapter_config.json and adapter_model.safetensors."}
    run=${send} undo=${() => call("DELETE", at())} done=${() => { const name = id.trim(); go(href("adapters/" + name)); return `${name} is uploaded.`; }}>
    <${Field} label="Name" hint="such as sql-expert/v2"><input type="text" value=${id} onInput=${(event) => setId(event.target.value)} required/><//>
    <${Field} label="Files"><input type="file" multiple accept=".tar,.gz,.tgz,.zip,.json,.safetensors" onChange=${(event) => setFiles([...event.target.files])}/><//><//>`;
}

export function RebalanceButton() {
  const [plan, setPlan] = useState(null);
  const look = (event) => { if (event.target.closest("dialog")) return; setPlan(null); call("POST", "/v1/placements/plan").then(setPlan, (problem) => setPlan({ error: problem.message })); };
  return html`<span onClickCapture=${look}><${Act} label="Rebalance" title="One pass of placement now" what=${() => plan === null ? "Reading what it would do…" : plan.error ? plan.error : plan.actions.length ? `It would do ${plural(plan.actions.length, "thing")}: ${plan.actions.slice(0, 6).map((one) => `${one.operation} ${one.lora_id} on ${one.worker_id} (${one.reason})`).join("; ")}${plan.actions.length > 6 ? "; …" : ""}.` : "Nothing is to do: every adapter is where it should be."} run=${() => call("POST", "/v1/rebalance")} done="A pass has run."/></span>`;
}

export function WorkerActions({ worker }) {
  const at = "/v1/workers/" + encodeURIComponent(worker.id), isOff = worker.state === "cordoned" || worker.state === "draining" || worker.drain;
  const back = () => call("POST", at + "/uncordon");
  const held = plural(worker.adapters.length, "adapter");
  return isOff ? html`<${Act} label="Use again" tone="primary" what=${`Take back the ${worker.state === "cordoned" ? "cordon" : "drain"}: ${worker.id} gets adapters and requests again.`} run=${back} done=${`${worker.id} is used again.`}/>`
    : html`<${Act} label="Cordon" what=${`${worker.id} keeps its ${held} and its requests, and gets no new adapters.`} run=${() => call("POST", at + "/cordon")} undo=${back} done=${`${worker.id} is cordoned.`}/>
      <${Act} label="Drain" tone="danger" what=${`Move its ${held} elsewhere, each new copy before the old one goes, then let ${worker.id} take no more requests. Those under way finish.`} run=${() => call("POST", at + "/drain", { body: {} })} undo=${back} done=${`${worker.id} drains.`} verb="Drain it"/>`;
}

// One copy: out of the worker, until it is let in again. `name`: its lora_id; of another client's copy its engine name.
export function UnloadCopy({ worker, name }) {
  const at = `/v1/workers/${encodeURIComponent(worker)}/adapters/${path(name)}`;
  return html`<${Act} label="Unload" tone="danger" title=${`Unload ${name} from ${worker}`} verb="Unload it" what=${`${name} takes no new requests on ${worker} and is unloaded there when those under way have ended. It is kept out of ${worker} until it is let in again; other workers may have it.`} run=${() => call("DELETE", at)} undo=${() => call("POST", at)} done=${`${name} leaves ${worker}.`}/>`;
}

export function AllowCopy({ worker, name }) {
  const at = `/v1/workers/${encodeURIComponent(worker)}/adapters/${path(name)}`;
  return html`<${Act} label="Let in" title=${`Let ${name} in`} what=${`${name} may be placed on ${worker} again. Nothing is loaded by that.`} run=${() => call("POST", at)} undo=${() => call("DELETE", at)} done=${`${name} may be placed on ${worker}.`}/>`;
}

function useNames() { return useLoad((signal) => get("/v1/adapters?limit=2000", { signal }), [], { follow: "none" }).data?.data.map((one) => one.lora_id) || []; }

function Weights({ targets, setTargets }) {
  const names = useNames(), whole = targets.reduce((sum, one) => sum + one.weight, 0);
  const change = (at, part) => setTargets(targets.map((one, index) => index === at ? { ...one, ...part } : one));
  return html`<datalist id="alias-names">${names.map((one) => html`<option key=${one} value=${one}/>`)}</datalist>
    ${targets.map((one, at) => html`<div class="bar" key=${at}><input type="text" list="alias-names" aria-label=${`Target ${at + 1}`} value=${one.lora_id} onInput=${(event) => change(at, { lora_id: event.target.value })}/>
      <input type="number" min="0" step="any" class="weight" aria-label=${`Weight of target ${at + 1}`} value=${one.weight} onInput=${(event) => change(at, { weight: Math.max(0, Number(event.target.value) || 0) })}/><span class="note">${share(whole ? one.weight / whole : 0)}</span>
      ${targets.length > 1 && html`<button type="button" class="icon" aria-label=${`Remove target ${at + 1}`} onClick=${() => setTargets(targets.filter((_, index) => index !== at))}>×</button>`}</div>`)}
    <div><button type="button" class="link" onClick=${() => setTargets([...targets, { lora_id: "", weight: 1 }])}>Add a target</button></div>`;
}

export function NewAliasButton() {
  const [name, setName] = useState(""), [targets, setTargets] = useState([{ lora_id: "", weight: 1 }]);
  const make = async () => {
    const wanted = name.trim();
    if ((await all("/v1/aliases?limit=1000")).some((one) => one.name === wanted)) throw new Error(`${wanted} is an alias already: open its page to change where it leads.`);
    return call("PUT", "/v1/aliases/" + path(wanted), { body: { targets } });
  };
  return html`<${Act} label="New alias" tone="primary" scope="tenant-admin" verb="Make it" ready=${name.trim() && targets.every((one) => one.lora_id)} what="Requests for the alias go to its targets by weight; a session keeps its target." run=${make}
    undo=${() => call("DELETE", "/v1/aliases/" + path(name.trim()))} done=${() => { go(href("aliases/" + name.trim())); return `${name.trim()} is there.`; }}>
    <${Field} label="Alias"><input type="text" value=${name} onInput=${(event) => setName(event.target.value)}/><//><${Weights} targets=${targets} setTargets=${setTargets}/><//>`;
}

export function AliasActions({ alias, rollout }) {
  const at = "/v1/aliases/" + path(alias.name), before = alias.targets.map(({ lora_id, weight }) => ({ lora_id, weight }));
  const [targets, setTargets] = useState(before), [to, setTo] = useState(""), [steps, setSteps] = useState("5, 25, 100"), [forS, setForS] = useState(300), [requests, setRequests] = useState(50);
  const names = useNames(), isRunning = rollout && ["placing", "watching"].includes(rollout.state);
  if (isRunning) return "";
  const parsed = steps.split(/[\s,]+/).filter(Boolean).map((text) => ({ weight: Number(text) / 100, for_s: forS }));
  return html`<${Act} label="Weights" scope="tenant-admin" title=${`Weights of ${alias.name}`} verb="Shift" ready=${targets.every((one) => one.lora_id)} what="New sessions go by these weights as soon as every target has its replicas; until then nothing changes." run=${() => call("PUT", at, { body: { targets } })} undo=${() => call("PUT", at, { body: { targets: before } })} done="The weights are set."><${Weights} targets=${targets} setTargets=${setTargets}/><//>
    <${Act} label="Start a rollout" tone="primary" scope="tenant-admin" title=${`Roll out a version of ${alias.name}`} verb="Start" ready=${to && parsed.length && parsed.every((one) => one.weight > 0 && one.weight <= 1)} what=${`Give the new version ${parsed.map((one) => share(one.weight)).join(", then ")} of sessions, each for at least ${span(forS)} and ${requests} requests. It rolls back by itself when errors rise by 2 points or first tokens take half as long again.`}
      run=${() => call("POST", at + "/rollout", { body: { to, steps: parsed, min_requests: requests } })} undo=${() => call("DELETE", at + "/rollout")} done="The rollout has begun.">
      <${Field} label="New version"><input type="text" list="rollout-names" value=${to} onInput=${(event) => setTo(event.target.value)}/><//><datalist id="rollout-names">${names.map((one) => html`<option key=${one} value=${one}/>`)}</datalist>
      <${Field} label="Steps, in percent of sessions"><input type="text" value=${steps} onInput=${(event) => setSteps(event.target.value)}/><//>
      <${Field} label="Seconds of each step, at least"><input type="number" min="0" value=${forS} onInput=${(event) => setForS(Number(event.target.value) || 0)}/><//>
      <${Field} label="Requests of the new version in each step, at least"><input type="number" min="0" value=${requests} onInput=${(event) => setRequests(Number(event.target.value) || 0)}/><//><//>
    <${Act} label="Delete" tone="danger" scope="tenant-admin" title=${`Delete the alias ${alias.name}`} what="Requests for this name get 404 from then on. Its targets stay." run=${() => call("DELETE", at)} undo=${() => call("PUT", at, { body: { targets: before } })} done=${() => { go(href("aliases")); return `${alias.name} is deleted.`; }} verb="Delete it"/>`;
}

export function RolloutActions({ name, rollout }) {
  const at = `/v1/aliases/${path(name)}/rollout`, pause = (paused) => call("PATCH", at, { body: { paused } });
  return html`<${Act} label=${rollout.paused ? "Resume" : "Pause"} scope="tenant-admin" what=${rollout.paused ? "Go on with the step, and with its comparison." : `Stay at ${share(rollout.weight)} until it is resumed. The comparison goes on, and rolls back where the new version is worse.`} run=${() => pause(!rollout.paused)} undo=${() => pause(rollout.paused)} done=${rollout.paused ? "It goes on." : "It is paused."}/>
    <${Act} label="Stop" tone="danger" scope="tenant-admin" title=${`Stop the rollout of ${name}`} what="All sessions go back to what the alias had before, at once. It cannot be resumed; a new one can be started." run=${() => call("DELETE", at)} done="It is stopped; the old version has all sessions." verb="Stop and go back"/>`;
}
