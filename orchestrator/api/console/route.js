// Every view has an address below /ui; links work with the mouse, the keyboard and in a new tab.
import { store, html } from "./lib.js";

const ROOT = "/ui";
export const place = store(current());

function current() {
  const path = decodeURI(location.pathname).slice(ROOT.length).replace(/^\/+|\/+$/g, "");
  return { path, query: new URLSearchParams(location.search), key: location.pathname + location.search };
}

export const href = (path, query) => {
  const encoded = path.split("/").map(encodeURIComponent).join("/").replaceAll("%3A", ":").replaceAll("%40", "@");
  const text = query ? new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString() : "";
  return (encoded ? `${ROOT}/${encoded}` : ROOT) + (text ? "?" + text : "");
};

export function go(address, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address);
  const before = place.get().path;
  place.set(current());
  if (place.get().path !== before) {
    scrollTo(0, 0);
    document.getElementById("main")?.focus({ preventScroll: true });
  }
}

// Change parts of the query, keeping the rest; an empty value drops its name.
export function setQuery(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
  const text = query.toString();
  go(location.pathname + (text ? "?" + text : ""), { replace: true });
}

addEventListener("popstate", () => place.set(current()));
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || link.target) return;
  const url = new URL(link.href);
  if (url.origin !== location.origin || !(url.pathname === ROOT || url.pathname.startsWith(ROOT + "/"))) return;
  event.preventDefault();
  go(url.pathname + url.search);
});

export const Link = ({ to, query, children, ...rest }) => html`<a href=${href(to, query)} ...${rest}>${children}</a>`;
export const AdapterLink = ({ id }) => html`<${Link} to=${"adapters/" + id} class="name">${id}<//>`;
export const WorkerLink = ({ id }) => html`<${Link} to=${"workers/" + id} class="name">${id}<//>`;
