// The frame: navigation, the key, and which page an address shows.
import { html, render, useEffect, useStore, useState } from "./lib.js";
import { start, me, needsKey, refusal, problem, now, range, RANGES, keyNotes, setKey, may } from "./api.js";
import { begin, finish, logins, signOut } from "./login.js";
import { place, Link } from "./route.js";
import { Toasts, Field } from "./parts.js";
import { ZONE } from "./format.js";
import { FleetPage } from "./pages/fleet.js";
import { AdaptersPage, AdapterPage } from "./pages/adapters.js";
import { WorkersPage, WorkerPage } from "./pages/workers.js";
import { AliasesPage, AliasPage } from "./pages/aliases.js";
import { TenantsPage } from "./pages/tenants.js";
import { RequestsPage, RequestPage } from "./pages/requests.js";
import { WhatIfPage } from "./pages/whatif.js";
import { ActivityPage } from "./pages/activity.js";
import { PolicyPage } from "./pages/policy.js";
import { PublishedPage } from "./pages/published.js";

const ICONS = {
  fleet: "M3 3v10h10M5.5 10l2.5-3 2 2 3-4.5", adapters: "M8 2l6 3-6 3-6-3zM2 8l6 3 6-3M2 11l6 3 6-3", workers: "M2.5 3h11v4h-11zM2.5 9h11v4h-11zM5 5h.01M5 11h.01",
  aliases: "M4 2v12M4 5h5a3 3 0 013 3v3M10 9l2 2 2-2", tenants: "M6 7a2.5 2.5 0 100-5 2.5 2.5 0 000 5zM1.5 14c0-3 2-4.5 4.5-4.5s4.5 1.5 4.5 4.5M11 3a2.3 2.3 0 010 4M12 9.8c1.7.5 2.5 2 2.5 4.2",
  requests: "M2 4h12M2 8h8M2 12h5M11 11l2 2 2-3", whatif: "M3 13V8M8 13V3M13 13V6M1.5 8h3M6.5 5h3M11.5 9h3", activity: "M8 2v6l4 2M8 14A6 6 0 108 2a6 6 0 000 12z", policy: "M4 2h8v12H4zM6.5 5h3M6.5 8h3M6.5 11h1.5",
};
const NAV = [["", "Fleet", "fleet"], ["adapters", "Adapters", "adapters"], ["workers", "Workers", "workers"], ["aliases", "Aliases", "aliases"],
  ["tenants", "Tenants & keys", "tenants"], ["requests", "Requests", "requests"], ["what-if", "What-if", "whatif"], ["policy", "Policy", "policy"], ["activity", "Activity", "activity"]];

const FLEET_ONLY = new Set(["workers", "what-if", "policy"]);  // of no use to a key of one tenant

function page(path) {
  const [first, ...rest] = path.split("/");
  const below = rest.join("/");
  switch (first) {
    case "": return html`<${FleetPage}/>`;
    case "adapters": return below ? html`<${AdapterPage} key=${below} id=${below}/>` : html`<${AdaptersPage}/>`;
    case "workers": return below ? html`<${WorkerPage} key=${below} id=${below}/>` : html`<${WorkersPage}/>`;
    case "aliases": return below ? html`<${AliasPage} key=${below} name=${below}/>` : html`<${AliasesPage}/>`;
    case "published": return html`<${PublishedPage} key=${below} name=${below}/>`;
    case "tenants": return html`<${TenantsPage} key=${below} tenant=${below}/>`;
    case "requests": return below ? html`<${RequestPage} key=${below} id=${below}/>` : html`<${RequestsPage}/>`;
    case "what-if": return html`<${WhatIfPage}/>`;
    case "policy": return html`<${PolicyPage}/>`;
    case "activity": return html`<${ActivityPage}/>`;
    default: return html`<h1>No such page</h1><p><${Link} to="">The fleet</${Link}></p>`;
  }
}

// Not by scrollIntoView: after that Chromium 150 begins with Tab at the link, past the one that skips the menu.
function scrollInto(box, node) {
  const outer = box.getBoundingClientRect(), inner = node.getBoundingClientRect();
  box.scrollLeft += Math.min(0, inner.left - outer.left) + Math.max(0, inner.right - outer.right);
  box.scrollTop += Math.min(0, inner.top - outer.top) + Math.max(0, inner.bottom - outer.bottom);
}

function Side({ path }) {
  const fleet = useStore(now), trouble = useStore(problem), mine = useStore(me), notes = useStore(keyNotes);
  // On a narrow screen the menu scrolls sideways, on a low one downwards: the present page is in sight.
  useEffect(() => {
    const link = document.querySelector(".side [aria-current]");
    if (link) for (const box of [link.closest("ul"), link.closest(".side")]) scrollInto(box, link);
  }, [path, mine]);
  const workers = fleet ? Object.values(fleet.workers).reduce((sum, count) => sum + count, 0) : null;
  const lost = fleet ? (fleet.workers.lost || 0) + (fleet.workers.unmanaged || 0) : 0;
  const waiting = fleet ? sum(fleet.now.waiting) + sum(fleet.now.held) : 0;
  const counts = { workers: workers === null ? "" : lost ? `${lost} lost` : workers, requests: waiting ? `${waiting} wait` : "" };
  return html`<aside class="side"><div class="top"><${Link} to="" class="brand"><img src="/ui/assets/icon.svg" alt=""/>lorafleet<//></div>
    <nav aria-label="Pages"><ul>${NAV.filter(([to]) => !(mine?.status.is_confined_to_tenant && FLEET_ONLY.has(to))).map(([to, label, icon]) => html`<li key=${to}><${Link} to=${to} aria-current=${(path.split("/")[0].replace("published", "aliases") === to) ? "page" : undefined}>
      <svg viewBox="0 0 16 16" aria-hidden="true"><path d=${ICONS[icon]}/></svg>${label}${counts[icon] ? html`<span class="count ${icon === "workers" && lost ? "bad" : ""}">${counts[icon]}</span>` : ""}<//></li>`)}</ul></nav>
    <div class="foot"><div class="row"><span class="live ${trouble || !fleet ? "off" : ""}" role="status">${trouble || (fleet ? "live" : "connecting")}</span><${Theme}/></div>
      <div class="row who">${mine && html`${mine.key_id ? html`<span>${[mine.spec.note || notes.get(mine.key_id), `${mine.spec.issuer ? "token" : "key"} ${mine.key_id}`].filter(Boolean).join(", ")}</span><span>${mine.spec.tenant ? `tenant ${mine.spec.tenant}` : ""} ${mine.spec.scopes.join(", ")}</span><button type="button" class="link" onClick=${signOut}>Sign out</button>` : html`<span>open: no key needed</span>`}`}</div>
      <div class="row">times in ${ZONE}</div>
      <div class="row who">${fleet && html`<span>epoch ${fleet.epoch}</span>${!mine?.status.is_confined_to_tenant && html`<span>${fleet.routers} ${fleet.routers === 1 ? "router" : "routers"}</span>`}`}</div></div></aside>`;
}
const sum = (counts) => Object.values(counts || {}).reduce((whole, count) => whole + count, 0);

function Theme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || "");
  const next = { "": "dark", dark: "light", light: "" }[theme];
  const pick = () => {
    next ? (document.documentElement.dataset.theme = next) : delete document.documentElement.dataset.theme;
    try { next ? localStorage.setItem("lorafleet-theme", next) : localStorage.removeItem("lorafleet-theme"); } catch { /* storage is off */ }
    setTheme(next);
    dispatchEvent(new Event("themechange"));
  };
  return html`<button type="button" class="link" onClick=${pick} aria-label=${`Theme: ${theme || "as the system"}; change to ${next || "as the system"}`}>${theme || "auto"} theme</button>`;
}

function Login() {
  const [text, setText] = useState(""), [keep, setKeep] = useState(true), [offered, setOffered] = useState([]), wrong = useStore(refusal);
  useEffect(() => { logins().then(setOffered); }, []);
  const submit = (event) => { event.preventDefault(); setKey(text, keep); };
  return html`<main class="login" id="main"><form class="panel form" onSubmit=${submit}><h1>lorafleet</h1>
    ${offered.map((login) => html`<button type="button" class="action primary" key=${login.issuer} onClick=${() => begin(login, keep).catch((error) => refusal.set(error.message))}>Log in at ${new URL(login.issuer).host}</button>`)}
    <p class="muted">${offered.length ? "Or give a key" : "This fleet asks for a key"}. One with scope <code>view</code> reads; <code>operate</code> and <code>admin</code> may change things, too.</p>
    <${Field} label="API key"><input type="password" autocomplete="off" value=${text} onInput=${(event) => setText(event.target.value)} autofocus/><//>
    <label class="check"><input type="checkbox" checked=${keep} onChange=${(event) => setKeep(event.target.checked)}/><span>Keep it until this tab is closed</span></label>
    ${wrong && html`<p class="notice bad" role="alert">${wrong}</p>`}
    <div><button class="action primary" disabled=${!text.trim()}>Open the console</button></div></form></main>`;
}

function App() {
  const at = useStore(place), locked = useStore(needsKey), mine = useStore(me);
  if (locked) return html`<${Login}/>`;
  return html`<a class="skip" href="#main">Skip to the page</a><div class="frame"><${Side} path=${at.path}/><div class="work"><main id="main" tabindex="-1">
    ${mine === null ? "" : !may("view") ? html`<h1>lorafleet</h1><p class="notice bad" role="alert">This key may not read the fleet: it has ${mine.spec.scopes.join(", ") || "no scopes"}. The console needs a key with scope view.</p>` : page(at.path)}</main></div></div><${Toasts}/>`;
}

try {
  const theme = localStorage.getItem("lorafleet-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* storage is off */ }
const asked = RANGES.find(([value]) => String(value) === place.get().query.get("range"));
if (asked) range.set(asked[0]);
finish().then(start);
render(html`<${App}/>`, document.getElementById("app"));
