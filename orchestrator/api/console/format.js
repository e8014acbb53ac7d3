// Numbers, times and names as people read them.
export const missing = "–";

export function number(value, digits = 1) {
  if (value === null || value === undefined || Number.isNaN(value)) return missing;
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toString();
  if (size > 0 && size < 0.05) return value.toPrecision(1);
  return value.toFixed(digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return missing;
  if (value > 0 && value < 0.00095) return "<1 ms";
  if (value < 0.0995) return Math.round(value * 1000) + " ms";
  if (value < 9.95) return value.toFixed(2) + " s";
  if (value < 120) return Math.round(value) + " s";
  return span(value);
}

export function span(value) {
  if (value === null || value === undefined) return missing;
  if (value < 60) return Math.round(value) + " s";
  if (value < 3600) return Math.round(value / 60) + " min";
  if (value < 48 * 3600) return (value / 3600).toFixed(value < 36000 ? 1 : 0) + " h";
  return Math.round(value / 86400) + " d";
}

export function share(value, digits = 0) {
  return value === null || value === undefined ? missing : (value * 100).toFixed(digits) + " %";
}

// What private caches cost in hits, behind another share; only callers above tenants are told.
export function lost(total) {
  return total.hit_lost ? ` · ${share(total.hit_lost, 1)} more in other callers' caches` : "";
}

export function bytes(value) {
  if (!value) return value === 0 ? "0" : missing;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return (value >= 100 || at === 0 ? Math.round(value) : value.toFixed(1)) + " " + units[at];
}

// The zone of every time that is shown: the reader's own.
export const ZONE = new Date().toLocaleTimeString([], { timeZoneName: "short" }).split(" ").at(-1);

export function clock(iso, { date = false } = {}) {
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return missing;
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  const today = new Date().toDateString() === at.toDateString();
  return date || !today ? at.toLocaleDateString([], { month: "short", day: "numeric" }) + " " + time + (date ? " " + ZONE : "") : time;
}

export function ago(iso, now = Date.now()) {
  const at = new Date(iso).getTime();
  return Number.isNaN(at) ? missing : span(Math.max(0, (now - at) / 1000)) + " ago";
}

export const digest12 = (digest) => (digest ? digest.slice(0, 12) : missing);
export const plural = (count, word, words = word + "s") => `${count} ${count === 1 ? word : words}`;
