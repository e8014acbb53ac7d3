// Aliases and rollouts: who gets which version, how the new one compares, and a way to stop it.
import { html, useState } from "../lib.js";
import { call, get, may, useLoad, useRange } from "../api.js";
import { Table } from "../table.js";
import { Actor, Field, Head, Loaded, Panel, RangePicker, State } from "../parts.js";
import { AdapterLink, Link } from "../route.js";
import { ago, clock, digest12, missing, number, seconds, share, span } from "../format.js";
import { HistoryLines } from "./activity.js";
import { AliasActions, NewAliasButton, RolloutActions } from "./actions.js";

const path = (name) => name.split("/").map(encodeURIComponent).join("/");
const weightOf = (targets) => targets.reduce((whole, one) => whole + one.weight, 0);

function Split({ targets }) {
  const whole = weightOf(targets);
  return html`<span class="split" role="img" aria-label=${targets.map((one) => `${one.lora_id} ${share(whole ? one.weight / whole : 0)}`).join(", ")}>${targets.map((one, at) => html`<span class="s${at % 6}" style=${{ width: share(whole ? one.weight / whole : 0, 2).replace(" ", "") }}></span>`)}</span>`;
}

const rolloutOf = (name, signal) => get(`/v1/aliases/${path(name)}/rollout`, { signal }).catch((error) => { if (error.status === 404) return null; throw error; });

// Who put the present versions of a name live, and when: from its history, the newest entry first. An alias shifts by
// itself after a person has asked for it, so the person is in an earlier entry.
export function liveBy(entries) {
  const set = entries.find((one) => one.kind === "alias_set" || one.kind === "name_published");
  const back = entries.find((one) => one.kind === "alias_rollout" && one.body?.what !== "done");
  if (set && set.actor === "lorafleet" && back?.body.what === "rolled_back" && back.at >= set.at) return { at: set.at, actor: "lorafleet, which rolled back" };
  const asked = entries.find((one) => one.actor !== "lorafleet" && (one.kind !== "alias_rollout" || one.body?.what === "began") && (!set || one.id <= set.id));
  return { at: set?.at ?? null, actor: asked?.actor ?? set?.actor ?? "" };
}

function byName(entries) {
  const names = new Map();
  for (const entry of entries) names.has(entry.subject) ? names.get(entry.subject).push(entry) : names.set(entry.subject, [entry]);
  return new Map([...names].map(([name, of]) => [name, liveBy(of)]));
}

export function AliasesPage() {
  const found = useLoad(async (signal) => {
    const [aliases, published, history] = await Promise.all([get("/v1/aliases?limit=1000", { signal }), get("/v1/published?limit=1000", { signal }).catch(() => ({ data: [] })),
      get("/v1/history?limit=1000&kind=alias_set&kind=alias_rollout&kind=name_published", { signal })]);
    // A published name is an alias that the fleet keeps: it is listed once, below.
    const names = new Set(published.data.map((one) => one.name)), own = aliases.data.filter((one) => !names.has(one.name));
    const rollouts = await Promise.all(own.slice(0, 60).map((alias) => rolloutOf(alias.name, signal))), live = byName(history.data);
    return { aliases: own.map((alias, at) => ({ ...alias, rollout: rollouts[at], live: live.get(alias.name) })), published: published.data.map((one) => ({ ...one, live: live.get(one.name) })) };
  }, []);
  return html`<${Head} title="Aliases and rollouts"><${NewAliasButton}/><//>
    <${Loaded} of=${found}>${({ aliases, published }) => html`
      <${Table} label="Aliases" rows=${aliases} rowKey=${(row) => row.name} sort="name" empty="There are no aliases. One name may lead to several versions, and move between them in steps." columns=${[
        { id: "name", label: "alias", value: (row) => row.name, cell: (row) => html`<${Link} to=${"aliases/" + row.name} class="name">${row.name}<//>` },
        { id: "split", label: "share", value: (row) => row.targets.length, cell: (row) => html`<${Split} targets=${row.targets}/>` },
        { id: "targets", label: "targets", value: (row) => row.targets[0]?.lora_id, cell: (row) => row.targets.map((one, at) => html`${at ? ", " : ""}<${AdapterLink} id=${one.lora_id}/> ${share(weightOf(row.targets) ? one.weight / weightOf(row.targets) : 0)}`) },
        ...LIVE,
        { id: "rollout", label: "rollout", value: (row) => row.rollout?.state || "", cell: (row) => row.rollout ? html`<${State} is=${row.rollout.paused ? "paused" : row.rollout.state}/>${row.rollout.worse ? html` <span class="bad-text">new version is worse</span>` : ""}` : missing },
        { id: "pending", label: "pending", hide: "narrow", value: (row) => row.pending?.state || "", cell: (row) => row.pending ? html`<${State} is=${row.pending.state}/>` : missing }]}/>
      <${Panel} title="Published names" note="a trainer publishes versions under one name"><${Table} label="Published names" name="published" rows=${published} rowKey=${(row) => row.name} sort="name" empty="No name has been published." columns=${[
        { id: "name", label: "name", value: (row) => row.name, cell: (row) => html`<${Link} to=${"published/" + row.name} class="name">${row.name}<//>` },
        { id: "version", label: "current version", value: (row) => row.lora_id, cell: (row) => row.lora_id ? html`<${AdapterLink} id=${row.lora_id}/>` : missing },
        ...LIVE,
        { id: "digest", label: "digest", hide: "narrow", value: (row) => row.digest, cell: (row) => html`<code>${digest12(row.digest)}</code>` },
        { id: "versions", label: "versions kept", numeric: true, value: (row) => (row.versions || []).length },
        { id: "workers", label: "workers", numeric: true, value: (row) => (row.workers || []).length }]}/><//>`}<//>`;
}

const LIVE = [
  { id: "since", label: "since", hide: "narrow", value: (row) => row.live?.at || "", cell: (row) => row.live?.at ? html`<time datetime=${row.live.at}>${clock(row.live.at)}</time>` : missing },
  { id: "by", label: "put there by", hide: "narrow", value: (row) => row.live?.actor || "", cell: (row) => row.live?.actor ? html`<${Actor} is=${row.live.actor}/>` : missing },
];

export function AliasPage({ name }) {
  const found = useLoad((signal) => Promise.all([get("/v1/aliases/" + path(name), { signal }), rolloutOf(name, signal), get(`/v1/aliases/${path(name)}/history?limit=50`, { signal })]), [name]);
  const alias = found.data?.[0];
  return html`<${Head} title=${name} crumbs=${[html`<${Link} to="aliases">Aliases<//> /`]}>${alias && html`<${AliasActions} alias=${alias} rollout=${found.data[1]}/>`}<//>
    <${Loaded} of=${found}>${([item, rollout, history]) => html`
      ${item.pending && html`<p class="notice ${item.pending.state === "failed" ? "bad" : ""}"><b>About to shift: ${item.pending.state}.</b> ${item.pending.error || Object.entries(item.pending.lacks).map(([adapter, what]) => `${adapter}: ${what}`).join("; ")}</p>`}
      <${Panel} title="Where its sessions go" note=${history.data.length > 0 && html`<${Live} entries=${history.data}/>`}><${Split} targets=${item.targets}/><ul class="lines">${item.targets.map((one, at) => html`<li key=${one.lora_id}><i class="swatch s${at % 6}"></i><b><${AdapterLink} id=${one.lora_id}/></b><span class="grow muted">${share(weightOf(item.targets) ? one.weight / weightOf(item.targets) : 0, 1)} of sessions (weight ${one.weight})</span></li>`)}</ul><//>
      ${item.targets.length > 1 && html`<${Comparison} name=${name}/>${may("infer") && html`<${AskBoth} targets=${item.targets}/>`}`}
      ${rollout && html`<${Rollout} rollout=${rollout} name=${name}/>`}
      <${Panel} title="History" note="who put which version live, and when"><${HistoryLines} entries=${history.data}/><//>`}<//>`;
}

function Live({ entries }) {
  const { at, actor } = liveBy(entries);
  return at ? html`since ${clock(at, { date: true })}, by <${Actor} is=${actor}/>` : "";
}

// The targets side by side: all their requests, by whichever name.
function Comparison({ name }) {
  const rangeS = useRange();
  const found = useLoad((signal) => get(`/v1/aliases/${path(name)}/comparison?range_s=${rangeS}`, { signal }), [name, rangeS], { follow: "ticks" });
  const of = (row) => row.total || {}, worse = found.data?.data.filter((row) => row.worse) || [];
  return html`<${Panel} title="Side by side" note="all requests of each target, by whichever name" actions=${html`<${RangePicker}/>`}><${Loaded} of=${found} rows=${2}>${(list) => html`
    ${worse.map((row) => html`<p class="notice bad" key=${row.lora_id}><b>${row.lora_id} is worse than ${list.baseline}:</b> ${row.worse}.</p>`)}
    <${Table} label="The targets side by side" name="targets" rows=${list.data} rowKey=${(row) => row.lora_id} sort="-share" columns=${[
      { id: "id", label: "target", value: (row) => row.lora_id, cell: (row) => html`<${AdapterLink} id=${row.lora_id}/>${row.worse ? html` <span class="bad-text">worse</span>` : ""}` },
      { id: "share", label: "share", numeric: true, value: (row) => row.share, cell: (row) => share(row.share) },
      { id: "requests", label: "requests", numeric: true, value: (row) => of(row).requests ?? null, cell: (row) => number(of(row).requests ?? null) },
      { id: "errors", label: "errors", numeric: true, value: (row) => of(row).errors ?? null, cell: (row) => html`<span class=${of(row).errors ? "bad-text" : ""}>${number(of(row).errors ?? null)}</span>` },
      { id: "p50", label: "first token p50", numeric: true, value: (row) => of(row).first_token_s?.p50 ?? null, cell: (row) => seconds(of(row).first_token_s?.p50 ?? null) },
      { id: "p95", label: "p95", numeric: true, value: (row) => of(row).first_token_s?.p95 ?? null, cell: (row) => seconds(of(row).first_token_s?.p95 ?? null) },
      { id: "token", label: "per token", numeric: true, title: "mean time of each token after the first", value: (row) => of(row).token_s ?? null, cell: (row) => seconds(of(row).token_s ?? null) },
      { id: "output", label: "output tokens", numeric: true, hide: "narrow", value: (row) => of(row).output_tokens ?? null, cell: (row) => number(of(row).output_tokens ?? null) },
      { id: "hit", label: "cache hits", numeric: true, hide: "narrow", value: (row) => of(row).hit_real ?? null, cell: (row) => share(of(row).hit_real ?? null) }]}/>
    ${!worse.length && html`<p class="note">None is worse than ${list.baseline}, by the limits of a rollout; it takes ${list.needed} requests of each to tell.</p>`}`}<//><//>`;
}

// The same prompt to each target, as requests of the reader's own key.
function AskBoth({ targets }) {
  const [prompt, setPrompt] = useState("Which customers ordered twice?"), [asking, setAsking] = useState(false), [answers, setAnswers] = useState(null), [error, setError] = useState("");
  const ask = async (event) => {
    event.preventDefault(); setAsking(true); setAnswers(null); setError("");
    try { setAnswers((await call("POST", "/v1/ask", { body: { models: targets.slice(0, 4).map((one) => one.lora_id), prompt, max_tokens: 128 } })).data); } catch (problem) { setError(problem.message); }
    setAsking(false);
  };
  return html`<${Panel} title="Ask each the same" note="a chat to each target, sent by a router as a request of your key; at most 128 tokens"><form class="form" onSubmit=${ask}>
    <${Field} label="Prompt"><textarea value=${prompt} maxlength="16000" onInput=${(event) => setPrompt(event.target.value)}></textarea><//>
    <div><button class="action primary" disabled=${asking || !prompt.trim()}>${asking ? "Asking…" : "Ask"}</button></div></form>
    ${error && html`<p class="notice bad" role="alert">${error}</p>`}
    ${answers && html`<div class="grid two" role="status">${answers.map((one) => html`<section key=${one.model} class="panel" aria-label=${`Answer of ${one.model}`}><header><h3>${one.model}</h3><span class="note">${one.first_token_s === null ? "" : `first token ${seconds(one.first_token_s)}, `}${one.whole_s === null ? "" : `whole ${seconds(one.whole_s)}`}${one.output_tokens === null ? "" : `, ${one.output_tokens} tokens`}</span></header>
      ${one.error ? html`<p class="notice bad">${one.status} ${one.error}</p>` : html`<pre class="log" tabindex="0">${one.text}</pre>`}${one.request_id && html`<p class="note"><${Link} to=${"requests/" + one.request_id}>What became of the request<//></p>`}</section>`)}</div>`}<//>`;
}

function Rollout({ rollout, name }) {
  const running = ["placing", "watching"].includes(rollout.state);
  const isSlower = /first token/.test(rollout.worse), failsMore = /error rate/.test(rollout.worse);
  const rows = [
    ["requests", number(rollout.old.requests), number(rollout.new.requests), false],
    ["errors", number(rollout.old.errors), number(rollout.new.errors), false],
    ["error rate", share(rollout.old.error_rate, 2), share(rollout.new.error_rate, 2), failsMore],
    ["first token, mean", seconds(rollout.old.mean_first_token_s), seconds(rollout.new.mean_first_token_s), isSlower],
  ];
  return html`<${Panel} title="Rollout" note=${`to ${rollout.to.map((one) => one.lora_id).join(", ")}, begun ${ago(rollout.began_at)}`} actions=${running && html`<${RolloutActions} name=${name} rollout=${rollout}/>`}>
    <p><${State} is=${rollout.paused ? "paused" : rollout.state}/> ${rollout.reason && html`<b class="bad-text">${rollout.reason}</b>`}</p>
    ${running && html`<p class="notice ${rollout.worse ? "bad" : ""}">${rollout.worse ? html`<b>The new version is worse:</b> ${rollout.worse}. It goes back by itself if that holds after ${rollout.needed} requests.` : "The new version is not worse so far."}</p>`}
    <ol class="steps">${rollout.steps.map((step, at) => html`<li key=${at} class=${rollout.state === "done" || at < rollout.step ? "past" : at === rollout.step && running ? "here" : ""} aria-current=${at === rollout.step && running ? "step" : undefined}><b>${share(step.weight)}</b>${at < rollout.step || rollout.state === "done" ? "done" : step.for_s ? `for ${span(step.for_s)}` : "then it is done"}</li>`)}</ol>
    ${Object.entries(rollout.lacks).map(([adapter, what]) => html`<p class="notice">${adapter} lacks ${what}</p>`)}
    <${Table} label="Comparison of the versions" name="comparison" rows=${rows} rowKey=${(row) => row[0]} columns=${[
      { id: "what", label: "since the last shift", cell: (row) => row[0] }, { id: "old", label: "old version", numeric: true, cell: (row) => row[1] },
      { id: "new", label: "new version", numeric: true, cell: (row) => html`<span class=${row[3] ? "bad-text" : ""}>${row[2]}${row[3] ? " worse" : ""}</span>` }]}/>
    <p class="note">${rollout.needed ? `It waits for ${rollout.needed} requests of the new version in each step.` : ""}</p><//>`;
}
