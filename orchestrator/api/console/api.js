// Calls to the orchestrator with the reader's key, and the stream that says when something has changed.
import { store, useState, useEffect, useRef, useStore } from "./lib.js";

export const me = store(null);          // GET /v1/whoami; null: not known yet
export const needsKey = store(false);
export const refusal = store("");       // why the reader's key or token is not taken; "": none was sent
export const problem = store("");       // why the last call failed; "": it did not
export const now = store(null);         // the last message of /v1/live
export const tick = store(0);           // grows with every whole slice of traffic
export const changes = store(0);        // grows with every change in the fleet
export const TODAY = "today";           // since midnight of the reader's clock
export const RANGES = [[300, "5 min"], [900, "15 min"], [3600, "1 h"], [21600, "6 h"], [86400, "24 h"], [TODAY, "today"]];
export const range = store(900);
export const keyNotes = store(new Map());  // key_id -> the key file's note; empty for a tenant's key

// Seconds of the range that is chosen; "today" grows by the minute.
export function useRange() {
  const chosen = useStore(range);
  if (chosen !== TODAY) return chosen;
  const midnight = new Date();
  midnight.setHours(0, 0, 0, 0);
  return Math.max(60, Math.floor((Date.now() - midnight) / 60000) * 60);
}

// The key stays in this tab: in memory, or until the tab is closed if the reader wants it so.
const KEY = "lorafleet-key";
let key = "";
try { key = sessionStorage.getItem(KEY) || ""; } catch { /* storage is off */ }

export function setKey(value, keep) {
  key = value.trim();
  try { keep && key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY); } catch { /* storage is off */ }
  me.set(null);
  return whoami();  // only a key that is known opens the pages
}
export const hasKey = () => key !== "";

export class CallError extends Error {
  constructor(message, status, code) { super(message); this.status = status; this.code = code; }
}

const READ_MS = 60000;  // a page whose call hangs would never be loaded again; an action may take its time

const hung = (error, what) => error.name === "TimeoutError" ? new CallError(`${what}: no answer within ${READ_MS / 1000} s; is the orchestrator up?`, 0, "") : error;

// A resource is {names, spec, status}: pages read its fields side by side, and what is observed before what was written.
const flat = (item) => item?.spec && item.status ? { ...item.spec, ...item.status, ...item } : item;

// The answer to a call, once its status is known to be good.
async function answerOf(method, path, { body, headers, signal, raw }) {
  const sent = { ...(key ? { authorization: "Bearer " + key } : {}), ...headers };
  if (body !== undefined) sent["content-type"] = raw ? "application/octet-stream" : "application/json";
  const limits = [signal, method === "GET" ? AbortSignal.timeout(READ_MS) : null].filter(Boolean);
  const answer = await fetch(path, {
    method, headers: sent, cache: "no-store", signal: AbortSignal.any(limits),
    body: body === undefined ? undefined : raw ? body : JSON.stringify(body),
  }).catch((error) => { throw hung(error, `${method} ${path}`); });
  if (answer.status === 401) needsKey.set(true);
  if (!answer.ok) {
    const error = ((await answer.json().catch(() => ({}))).error) || {};
    if (answer.status === 401 && key) refusal.set(error.message || "This key is not taken.");
    throw new CallError(error.message || `${method} ${path}: HTTP ${answer.status}`, answer.status, error.code || "");
  }
  return answer;
}

export async function call(method, path, options = {}) {
  const answer = await answerOf(method, path, options);
  if (answer.status === 204) return null;
  const whole = await answer.json().catch((error) => { if (error instanceof DOMException) throw hung(error, `${method} ${path}`); return null; });
  const parsed = Array.isArray(whole?.data) ? { ...whole, data: whole.data.map(flat) } : flat(whole);
  const etag = answer.headers.get("etag");
  if (etag && parsed && typeof parsed === "object") Object.defineProperty(parsed, "etag", { value: etag });
  return parsed;
}

export const get = (path, options) => call("GET", path, options);

// Save an answer as a file of the reader's: a link could not send the key.
export async function save(path, name) {
  const url = URL.createObjectURL(await (await answerOf("GET", path, {})).blob()), link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}

// All pages of a list.
export async function all(path, most = 20000) {
  const items = [];
  let cursor = null;
  do {
    const join = path.includes("?") ? "&" : "?";
    const page = await get(path + (cursor === null ? "" : join + "cursor=" + encodeURIComponent(cursor)));
    items.push(...page.data);
    cursor = page.next;
  } while (cursor !== null && items.length < most);
  return items;
}

export async function whoami() {
  try {
    me.set(await get("/v1/whoami"));
    needsKey.set(false);
    refusal.set("");
    if (may("view")) get("/v1/keys").then((list) => keyNotes.set(new Map(list.data.filter((one) => one.spec.note).map((one) => [one.key_id, one.spec.note]))), () => {});
  } catch (error) {
    if (error.code === "no_grant") { refusal.set(error.message); needsKey.set(true); }
    else if (error.status !== 401) problem.set(error.message);
  }
}

// Whether the reader's key may do this for the fleet; a hint for what to show, the server decides.
export function may(scope) {
  const mine = me.get();
  return mine !== null && mine.status.may.includes(scope);
}

// What a component shows: loaded again after `deps` change, after every slice, and after changes in the fleet.
// A load that is under way is not begun again: on a slow link pages would never have shown anything.
export function useLoad(load, deps, { follow = "all" } = {}) {
  const [state, setState] = useState({ data: null, error: null });
  const ticks = useStore(tick);
  const changed = useStore(changes);
  const mine = useStore(me);
  const running = useRef(null);
  const run = (loader) => {
    const aborter = new AbortController();
    running.current = aborter;
    const end = (next) => {
      if (aborter.signal.aborted) return;
      running.current = null;
      setState(next);
    };
    loader(aborter.signal).then(
      (data) => { end({ data, error: null }); },
      (error) => { end((before) => ({ data: before.data, error })); },
    );
    return aborter;
  };
  useEffect(() => {
    if (needsKey.get()) return undefined;
    run(load);  // what was there stays until the answer comes
    return () => { running.current?.abort(); running.current = null; };
  }, [...deps, mine?.key_id ?? null]);
  const signals = follow === "all" ? ticks + changed : follow === "ticks" ? ticks : 0;
  const first = useRef(signals);
  useEffect(() => {
    if (signals === first.current || running.current || needsKey.get()) return;
    first.current = signals;
    run(load);
  }, [signals, state]);
  return state;
}

// A stream of server-sent events over fetch: EventSource cannot send a key. One that says nothing for so long has ended:
// a frozen orchestrator, or a network that is gone, closes no connection.
async function follow(path, headers, silentMs, on) {
  const aborter = new AbortController();
  let timer = 0;
  const heardSomething = () => { clearTimeout(timer); timer = setTimeout(() => aborter.abort(), silentMs); };
  heardSomething();
  try {
    const answer = await fetch(path, { headers: { ...(key ? { authorization: "Bearer " + key } : {}), ...headers }, signal: aborter.signal });
    if (answer.status === 401) needsKey.set(true);
    if (!answer.ok) throw new CallError(`${path}: HTTP ${answer.status}`, answer.status, "");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heardSomething();
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").find((line) => line.startsWith("data: "));
        if (data) on(JSON.parse(data.slice(6)));
      }
    }
  } finally { clearTimeout(timer); }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
export const events = store([]);        // the newest first
const KEPT_EVENTS = 300;
let revision = null;
let pending = null;

function heard(event) {
  revision = String(event.id);
  events.set([event, ...events.get()].slice(0, KEPT_EVENTS));
  if (pending === null) pending = setTimeout(() => { pending = null; changes.set(changes.get() + 1); }, 400);
}

function seen(message) {
  const before = now.get();
  now.set(message);
  problem.set("");
  if (before === null || message.slice_at !== before.slice_at) tick.set(tick.get() + 1);
}

async function again(work) {
  for (;;) {
    try {
      if (needsKey.get() && !hasKey()) { await pause(500); continue; }
      await work();
    } catch (error) {
      if (error.status === 410) revision = null;
      else if (error.status !== 401 && error.status !== 403) problem.set("no connection to the orchestrator; trying again");
    }
    await pause(1500);
  }
}

export function start() {
  whoami();
  again(() => follow("/v1/live", {}, 15000, seen));
  // Silence of the events is no trouble, as nothing may have happened: only `/v1/live` tells whether anybody is there.
  again(() => follow("/v1/events", revision === null ? {} : { "last-event-id": revision }, 90000, heard).catch((error) => { if (error.name !== "AbortError") throw error; }));
}
