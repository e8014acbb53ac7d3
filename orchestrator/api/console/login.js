// Login at the fleet's identity provider: authorization code with PKCE, as a public client. The token is kept as a key is.
import { get, setKey, refusal } from "./api.js";
import { go } from "./route.js";

const PENDING = "lorafleet-login";   // between leaving for the issuer and coming back, in this tab alone
const SESSION = "lorafleet-session"; // where to log out again
export const BACK = "/ui/login";

const base64 = (bytes) => btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
const random = () => base64(crypto.getRandomValues(new Uint8Array(32)));
const taken = (name) => { const found = sessionStorage.getItem(name); sessionStorage.removeItem(name); return found && JSON.parse(found); };
const claimsOf = (token) => JSON.parse(new TextDecoder().decode(Uint8Array.from(atob(token.split(".")[1].replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0))));
const withQuery = (address, fields) => { const url = new URL(address); for (const [name, value] of Object.entries(fields)) url.searchParams.set(name, value); return url.href; };

export const logins = () => get("/v1/login").then((list) => list.data, () => []);

export async function begin({ issuer, client, endpoints }, keep) {
  if (!crypto.subtle) throw new Error("A login at an issuer needs https, or localhost: this page came by http.");
  const here = location.pathname + location.search;
  const pending = { issuer, client, endpoints, keep, verifier: random(), state: random(), nonce: random(), here: location.pathname === BACK ? "/ui" : here };
  sessionStorage.setItem(PENDING, JSON.stringify(pending));
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(pending.verifier));
  location.assign(withQuery(endpoints.authorization, {
    response_type: "code", client_id: client.client_id, redirect_uri: location.origin + BACK, scope: client.scope,
    state: pending.state, nonce: pending.nonce, code_challenge: base64(new Uint8Array(digest)), code_challenge_method: "S256",
  }));
}

// The end of a login, at the address that the issuer sends the reader back to; false: this is another address.
export async function finish() {
  if (location.pathname !== BACK) return false;
  const answer = new URLSearchParams(location.search);
  try {
    const pending = taken(PENDING);
    go(pending?.here || "/ui", { replace: true });  // the code leaves the address bar and the history
    if (!pending || answer.get("state") !== pending.state) throw new Error("This login was not begun in this tab: log in again.");
    if (answer.has("error")) throw new Error(`The issuer refused the login: ${answer.get("error_description") || answer.get("error")}`);
    if (answer.has("iss") && answer.get("iss") !== pending.issuer) throw new Error("Another issuer answered than was asked.");
    const tokens = await exchange(pending, answer.get("code") || "");
    check(tokens, pending);
    const token = tokens[pending.client.token];
    if (!token) throw new Error(`The issuer gave no ${pending.client.token}.`);
    if (pending.endpoints.end_session) sessionStorage.setItem(SESSION, JSON.stringify({ url: pending.endpoints.end_session, client_id: pending.client.client_id }));
    await setKey(token, pending.keep);
  } catch (error) { refusal.set(error.message); }
  return true;
}

async function exchange({ endpoints, client, verifier }, code) {
  const body = new URLSearchParams({ grant_type: "authorization_code", code, redirect_uri: location.origin + BACK, client_id: client.client_id, code_verifier: verifier });
  const answer = await fetch(endpoints.token, { method: "POST", body, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(30000) })
    .catch(() => { throw new Error("The issuer's token endpoint does not answer this page: allow this origin there (CORS)."); });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(`The issuer gave no token: ${found.error_description || found.error || "HTTP " + answer.status}`);
  return found;
}

// The ID token comes straight from the issuer; its nonce says that it is for this login, and no other's.
function check(tokens, { issuer, client, nonce }) {
  const claims = tokens.id_token ? claimsOf(tokens.id_token) : {};
  if (claims.nonce !== nonce) throw new Error("The issuer's ID token is not of this login: log in again.");
  if (claims.iss !== issuer || ![claims.aud].flat().includes(client.client_id)) throw new Error("The issuer's ID token is not for this console.");
}

export async function signOut() {
  let session = null;
  try { session = taken(SESSION); } catch { /* storage is off */ }
  await setKey("", false);
  refusal.set("");
  if (session) location.assign(withQuery(session.url, { client_id: session.client_id, post_logout_redirect_uri: location.origin + "/ui" }));
}
