// Small parts that every page uses.
import { html, store, useStore, useEffect, useRef, useState } from "./lib.js";
import { share } from "./format.js";
import { RANGES, keyNotes, range } from "./api.js";
import { Link, setQuery } from "./route.js";

const TONES = {
  ready: "good", closed: "good", done: "good", live: "good", ok: "good", applied: "good", seen: "good", equal: "good",
  loading: "warn", draining: "warn", cordoned: "warn", starting: "warn", wanted: "warn", inspecting: "warn", placing: "warn",
  watching: "warn", half_open: "warn", downloading: "warn", silent: "warn", deleting: "warn", paused: "warn", zero: "warn",
  "fewer copies": "warn", failed: "bad", "cannot load": "bad", lost: "bad", unmanaged: "bad", open: "bad", rolled_back: "bad", aborted: "bad", error: "bad", differs: "bad",
};
const GLYPHS = { good: "●", warn: "◐", bad: "▲", plain: "○" };

// A state as a word with a mark, so that colour is not all that says it.
export function State({ is, tone }) {
  const kind = tone || TONES[is] || "plain";
  return html`<span class="state ${kind}"><span aria-hidden="true">${GLYPHS[kind]}</span> ${String(is).replaceAll("_", " ")}</span>`;
}

export function Meter({ value, of, label, format = String, tone }) {
  const part = of ? Math.min(1, Math.max(0, value / of)) : 0;
  const kind = tone || (part > 0.9 ? "bad" : part > 0.75 ? "warn" : "good");
  return html`<span class="meter" role="img" aria-label=${label}><span class="track"><span class="fill ${kind}" style=${{ width: share(part, 1).replace(" ", "") }}></span></span><span class="figure">${format(value)}</span></span>`;
}

// Who did it: the note of the key, where the reader may see it, beside the key's id.
export function Actor({ is }) {
  const notes = useStore(keyNotes), [, kind, id] = /\((key|token) ([0-9a-f]+)\)$/.exec(is) || [], note = id && notes.get(id);
  return html`<span class="note" title=${is}>${note ? `${note} (${kind} ${id})` : is}</span>`;
}

export const Tile = ({ label, value, unit, under, tone = "", to, query, children }) => {
  const inside = html`<span class="label">${label}</span><span class="value">${value}${unit && html`<small>${unit}</small>`}</span><span class="under">${under}</span>${children}`;
  return to === undefined ? html`<div class="tile ${tone}">${inside}</div>` : html`<${Link} to=${to} query=${query} class="tile ${tone}">${inside}<//>`;
};

export const Panel = ({ title, note, actions, children, wide, id }) => html`<section class="panel ${wide ? "wide" : ""}" aria-labelledby=${id || undefined}>
  ${title && html`<header><h2 id=${id}>${title}</h2>${note && html`<span class="note">${note}</span>`}<span class="actions">${actions}</span></header>`}${children}</section>`;

export const Facts = ({ rows }) => html`<dl class="facts">${rows.filter(Boolean).map(([label, value, broad]) => html`<div key=${label} class=${broad ? "broad" : ""}><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>`;

export function Head({ title, crumbs = [], state, children, hasRange = false }) {
  useEffect(() => { document.title = `${title} · lorafleet`; }, [title]);
  return html`<div class="page-head"><div class="headline">
    ${crumbs.length > 0 && html`<nav class="crumbs" aria-label="Breadcrumb">${crumbs}</nav>`}
    <h1>${title}</h1>${state}</div><div class="head-actions">${children}${hasRange && html`<${RangePicker}/>`}</div></div>`;
}

export function RangePicker() {
  const chosen = useStore(range);
  const pick = (value) => { range.set(value); setQuery({ range: value === 900 ? "" : String(value) }); };
  return html`<div class="ranges" role="group" aria-label="Time range">${RANGES.map(([value, label]) =>
    html`<button type="button" key=${value} aria-pressed=${chosen === value} onClick=${() => pick(value)}>${label}</button>`)}</div>`;
}

// What a load gives before it gives data: grey bars of about the height of what comes, so that nothing below jumps.
// shape: "table", with so many `rows`, or "charts": tiles, and charts below
export function Loaded({ of, children, rows = 5, shape = "table" }) {
  if (of.data) return html`${of.error && html`<p class="notice bad" role="alert">${of.error.message}</p>`}${children(of.data)}`;
  if (of.error) return html`<p class="notice bad" role="alert">${of.error.message}</p>`;
  const bars = (count) => Array.from({ length: count }, (_, at) => html`<i key=${at}></i>`);
  return html`<div class="loading-note skeleton" role="status"><span class="sr">Loading</span><div aria-hidden="true">${shape === "charts" ? html`<div class="tiles">${bars(6)}</div><div class="grid">${bars(6)}</div>` : html`<div class="rows">${bars(rows)}</div>`}</div></div>`;
}

// -- messages and questions ---------------------------------------------------------------------------------

export const toasts = store([]);
let numbered = 0;
export function say(text, { tone = "good", undo } = {}) {
  const id = (numbered += 1);
  toasts.set([...toasts.get(), { id, text, tone, undo }]);
  setTimeout(() => toasts.set(toasts.get().filter((one) => one.id !== id)), undo ? 20000 : 8000);
}

export function Toasts() {
  const shown = useStore(toasts);
  const drop = (id) => toasts.set(toasts.get().filter((one) => one.id !== id));
  return html`<div class="toasts" role="status" aria-live="polite">${shown.map((one) => html`<div class="toast ${one.tone}" key=${one.id}><span>${one.text}</span>
    ${one.undo && html`<button type="button" class="link" onClick=${() => { drop(one.id); one.undo(); }}>Undo</button>`}
    <button type="button" class="icon" aria-label="Dismiss" onClick=${() => drop(one.id)}>×</button></div>`)}</div>`;
}

export function Dialog({ title, onClose, children, footer }) {
  const box = useRef(null);
  useEffect(() => {
    const node = box.current, before = document.activeElement;
    node.showModal();
    return () => { if (node.open) node.close(); before?.focus?.(); };
  }, []);
  return html`<dialog ref=${box} aria-labelledby="dialog-title" onCancel=${(event) => { event.preventDefault(); onClose(); }}
    onClick=${(event) => { if (event.target === box.current) onClose(); }}><div class="dialog"><header><h2 id="dialog-title">${title}</h2>
    <button type="button" class="icon" aria-label="Close" onClick=${onClose}>×</button></header><div class="dialog-body">${children}</div>${footer && html`<footer>${footer}</footer>`}</div></dialog>`;
}

// A command to paste into a terminal.
export function Command({ label, text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(text).then(() => setCopied(true), () => setCopied(false));
  return html`<div class="command"><pre class="log" tabindex="0" role="region" aria-label=${label}>${text}</pre>
    ${navigator.clipboard && html`<button type="button" class="action" aria-label=${`Copy: ${label}`} onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button>`}</div>`;
}

export function Field({ label, hint, children }) {
  return html`<label class="field"><span class="label">${label}</span>${children}${hint && html`<span class="hint">${hint}</span>`}</label>`;
}

export function Search({ value, onInput, label, placeholder }) {
  return html`<input type="search" class="search" value=${value} aria-label=${label} placeholder=${placeholder || label} onInput=${(event) => onInput(event.target.value)} autocomplete="off" spellcheck="false"/>`;
}

export function Choice({ value, options, onChange, label }) {
  return html`<select aria-label=${label} value=${value} onChange=${(event) => onChange(event.target.value)}>${options.map(([id, text]) => html`<option key=${id} value=${id} selected=${id === value}>${text}</option>`)}</select>`;
}

// A value that follows its input after a pause, so that typing stays fast.
export function useLater(value, ms = 150) {
  const [later, setLater] = useState(value);
  useEffect(() => { const timer = setTimeout(() => setLater(value), ms); return () => clearTimeout(timer); }, [value]);
  return later;
}
