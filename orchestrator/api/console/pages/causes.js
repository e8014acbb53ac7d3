// Causes: since when which error is given, to whom, and what was changed just before.
import { html, useMemo, useStore } from "../lib.js";
import { get, keyNotes, useLoad } from "../api.js";
import { Actor, Panel } from "../parts.js";
import { Link } from "../route.js";
import { ZONE, clock, missing, number, seconds, share } from "../format.js";
import { KINDS, bodyText, subjectLink } from "./activity.js";
import { limitText } from "./requests.js";

const QUIET_S = 60;      // so long without an error ends a spell
const BEFORE_S = 600;    // changes so long before a spell are shown
const LONGER_S = 6 * 3600;
const NOBODY = "499";    // the client went away

// The spell of each code that is given now or was given last: {code, since, isOlder, perS, isNow}. A spell that reaches
// back to the first known slice is older than the range.
export function spells(points, stepS) {
  const found = [], quiet = Math.max(3, Math.ceil(QUIET_S / stepS));
  for (const [code, values] of Object.entries(points.codes)) {
    if (code === NOBODY) continue;
    const last = values.findLastIndex((value) => value > 0);
    if (last < 0) continue;
    let first = last;
    for (let at = last; at >= 0 && first - at <= quiet; at -= 1) if (values[at] > 0) first = at;
    const isOlder = !values.slice(0, first).some((value) => value !== null && value !== undefined);
    const spell = values.slice(first, last + 1).filter((value) => value !== null);
    found.push({ code, since: points.at[first], isOlder, isNow: values.length - 1 - last <= quiet, perS: spell.reduce((sum, value) => sum + value, 0) / spell.length });
  }
  return found.sort((left, right) => right.isNow - left.isNow || right.since - left.since);
}

// Of the history's entries those that may have led to a spell: what people did, and bad incidents, the nearest first.
export function changesBefore(entries, since, stepS) {
  return entries.filter((entry) => { const at = Date.parse(entry.at) / 1000; return at <= since + stepS && at >= since - BEFORE_S; }).slice(0, 2);
}

// What people changed, and incidents that are bad, the newest first.
export const loadChanges = (signal, sinceS, limit = 200) => {
  const since = sinceS ? "&since=" + encodeURIComponent(new Date(sinceS * 1000).toISOString()) : "";
  return Promise.all([
    get(`/v1/history?limit=${limit}${since}${KINDS.changes.map((kind) => "&kind=" + kind).join("")}`, { signal }),
    get(`/v1/history?limit=${limit}${since}&kind=incident&severity=warning`, { signal }),
  ]).then(([changes, incidents]) => [...changes.data.filter((entry) => !/^lorafleet(?! \()/.test(entry.actor)), ...incidents.data].sort((left, right) => right.id - left.id));
};

// load: a series of a longer range, for spells that began before this one
export function ErrorCauses({ found, changes, keys, load }) {
  const notes = useStore(keyNotes), inRange = useMemo(() => spells(found.points, found.step_s), [found]);
  const isOlder = inRange.some((spell) => spell.isOlder);
  const longer = useLoad((signal) => (isOlder ? load(LONGER_S, signal) : Promise.resolve(null)), [isOlder], { follow: "none" });
  if (!inRange.length) return "";
  const older = new Map(longer.data ? spells(longer.data.points, longer.data.step_s).map((spell) => [spell.code, { ...spell, stepS: longer.data.step_s }]) : []);
  const list = inRange.map((spell) => { const whole = spell.isOlder && older.get(spell.code); return { stepS: found.step_s, ...spell, ...(whole ? { since: whole.since, isOlder: whole.isOlder, stepS: whole.stepS } : {}) }; });
  return html`<${Panel} title="Errors, and what changed before" note=${`refusals, too; times in ${ZONE}`} actions=${html`<${Link} to="activity" query=${{ show: "changes" }}>All changes<//>`}><ul class="lines">${list.slice(0, 6).map((spell) => {
    const before = spell.isOlder ? [] : changesBefore(changes, spell.since, spell.stepS), [key, part] = mostOf(keys, spell.code);
    return html`<li key=${spell.code}><time>${spell.isOlder ? "before " : "since "}${clock(spell.since * 1000)}</time><b class=${spell.isNow ? "bad-text" : ""}>${codeText(spell.code)}</b>
      <span class="grow">${spell.isNow ? `${number(spell.perS, 2)} a second` : "over"}${key ? html`, ${share(part)} to key <${Link} to="tenants">${notes.get(key) || key}<//>` : ""}, <${Link} to="requests" query=${{ status: spell.code.slice(0, 3), key }}>its requests<//>${before.map((entry) => html`<br/><span>${clock(entry.at)}: <b>${entry.kind.replaceAll("_", " ")}</b> ${subjectLink(entry)} <span class="muted">${bodyText(entry)}</span> ${entry.severity ? "" : html`by <${Actor} is=${entry.actor}/>`}</span>`)}${!before.length && !spell.isOlder ? html`<br/><span class="muted">nothing was changed in the ${seconds(BEFORE_S)} before</span>` : ""}</span></li>`;
  })}</ul><//>`;
}

// A code of the traffic: status, code, and of a 429 the limit that was reached.
function codeText(code) {
  const [status, name, limit] = code.split(" ");
  return limit ? `${status} ${name}: ${limitText(limit)}` : code;
}

// The key that got most of a code, and its part.
function mostOf(keys, code) {
  const counts = (keys || []).map((row) => [row.name, row.codes[code] || 0]).sort((left, right) => right[1] - left[1]);
  const whole = counts.reduce((sum, [, count]) => sum + count, 0);
  return whole ? [counts[0][0], counts[0][1] / whole] : ["", 0];
}

// -- why an adapter is slow ---------------------------------------------------------------------------------

// Parts of the mean time to an adapter's first token: [seconds, name, explanation, what to do]. The part in the engine
// is what the median of the first tokens has beyond the others.
export function slowParts(total, prefillPerS) {
  if (!total.requests) return [];
  const answered = Math.max(1, total.requests - total.refusals), prompt = total.prompt_tokens / answered, fresh = prompt * (1 - (total.hit_real ?? 0));
  const parts = [
    [total.waited_s ?? 0, "wait for room", "in the routers, until an engine has room", "more replicas or workers: try What-if"],
    [(total.cold_starts * (total.cold_s ?? 0)) / answered, "loads", `${number(total.cold_starts)} requests waited for a load`, "pin it, or load it eagerly"],
    [prefillPerS ? fresh / prefillPerS : 0, "prefill", `${number(prompt)} tokens a prompt, ${share(total.hit_real)} of them cached${prefillPerS ? `, ${number(prefillPerS)} tokens/s` : ""}`, "prompts that begin alike, or shorter ones"],
  ];
  const rest = (total.first_token_s.p50 ?? 0) - parts.reduce((sum, [time]) => sum + time, 0);
  parts.push([rest, "in the engine", "roughly: behind other requests' work there", "more replicas, or fewer busy neighbours on its workers"]);
  return parts.filter(([time]) => time > 0.0005).sort((left, right) => right[0] - left[0]);
}

export function WhySlow({ total, workers }) {
  const rates = workers.map((worker) => worker.load?.prefill_tokens_per_s).filter(Boolean);
  const parts = slowParts(total, rates.length ? rates.reduce((sum, rate) => sum + rate, 0) / rates.length : 0);
  if (!parts.length) return "";
  const p50 = total.first_token_s.p50;
  return html`<${Panel} title="Where the time to the first token goes" note=${`means; half of the first tokens come within ${p50 === null ? missing : seconds(p50)}`}><ul class="lines">${parts.map(([time, name, why, next], at) => html`<li key=${name}><b class=${at || time < 0.5 ? "" : "warn-text"}>${seconds(time)} ${name}</b><span class="grow muted">${why}${at || time < 0.5 ? "" : `. Less with ${next}`}</span></li>`)}</ul><//>`;
}
