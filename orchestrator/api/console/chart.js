// Time series by uPlot; the legend and the table for screen readers are ours.
import uPlot from "./vendor/uplot.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { missing } from "./format.js";

const GROUP = uPlot.sync("time");
const SERIES = 8;
const themes = matchMedia("(prefers-color-scheme: dark)");
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const color = (at) => `var(--s${at % SERIES})`;

// series: [{label, values, at?: number of its colour, fill?, dash?}]
// marks: [{at, text}] moments at which something changed, drawn as lines
export function Chart({ title, note, at, series, format, height = 150, max, least = 0, stacked = false, marks = [] }) {
  const box = useRef(null), plot = useRef(null), marked = useRef(marks);
  const [hover, setHover] = useState(null);
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || "");
  const shown = series.filter((one) => one.values && one.values.length === at.length);
  const shape = shown.map((one) => one.label).join("|") + theme + stacked + (max ?? "");
  const data = useMemo(() => [at, ...(stacked ? stack(shown.map((one) => one.values)) : shown.map((one) => one.values))], [at, series]);
  useEffect(() => {
    const follow = () => setTheme(`${document.documentElement.dataset.theme || ""}${themes.matches}`);
    themes.addEventListener("change", follow);
    addEventListener("themechange", follow);
    return () => { themes.removeEventListener("change", follow); removeEventListener("themechange", follow); };
  }, []);
  useEffect(() => {
    if (!box.current) return undefined;  // the page was left meanwhile
    const ink = variable("--muted"), line = variable("--grid");
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { show: false } };
    const options = {
      width: Math.max(120, box.current.clientWidth), height, legend: { show: false }, padding: [8, 20, 0, 0],  // on the right half of a time's width
      cursor: { sync: { key: GROUP.key }, y: false, points: { size: 6 }, drag: { x: false, y: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, max ?? (high > 0 ? Math.max(least, high * 1.08) : least || 1)] } },
      axes: [
        { ...axis, grid: { show: false }, space: 64, size: 26, incrs: [1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400], values: (_, splits, __, ___, step) => splits.map((tick) => timeText(tick, step)) },
        { ...axis, space: 30, size: 52, values: (_, splits) => splits.map((value) => format(value)) },
      ],
      series: [{}, ...shown.map((one, index) => {
        const stroke = variable(`--s${(one.at ?? index) % SERIES}`);
        return { label: one.label, stroke, width: 1.6, dash: one.dash, spanGaps: false, points: { show: true, size: 4, fill: stroke, filter: lonely },
          fill: stacked || one.fill ? stroke + (stacked ? "aa" : "22") : undefined };
      })],
      // The last layer of a stack is drawn first: each layer covers those above it up to its own height.
      hooks: { setCursor: [(self) => setHover(self.cursor.idx ?? null)], draw: [(self) => drawMarks(self, marked.current, ink)] },
    };
    plot.current = new uPlot(options, data, box.current);
    plot.current.root.setAttribute("aria-hidden", "true");
    const sizes = new ResizeObserver(() => box.current && plot.current?.setSize({ width: Math.max(120, box.current.clientWidth), height }));
    sizes.observe(box.current);
    return () => { sizes.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [shape, height]);
  useEffect(() => { marked.current = marks; plot.current?.setData(data); }, [data, marks]);
  const index = hover === null || hover >= at.length ? lastKnown(shown) : hover;
  const when = index === null || at[index] === undefined ? "" : timeText(at[index], 1);
  const isEmpty = shown.every((one) => one.values.every((value) => value === null));
  return html`<figure class="chart">
    <figcaption><h2>${title}</h2>${note && html`<span class="note">${note}</span>`}</figcaption>
    <ul class="legend">${shown.map((one, order) => html`<li key=${one.label}>
      <i class="swatch s${(one.at ?? order) % SERIES}"></i><span>${one.label}</span>
      <b>${index === null || one.values[index] === null || one.values[index] === undefined ? missing : format(one.values[index])}</b></li>`)}
      <li class="when">${hover === null ? "now" : when}</li></ul>
    <div class="plot" ref=${box}>${isEmpty && html`<p class="empty-plot">nothing measured in this time</p>`}</div>
  </figure>`;
}

// Indices of values without a neighbour: no line would show them.
function lonely(self, series) {
  const values = self.data[series], found = [];
  const lacks = (value) => value === null || value === undefined;
  for (let at = 0; at < values.length; at += 1)
    if (!lacks(values[at]) && lacks(values[at - 1]) && lacks(values[at + 1])) found.push(at);
  return found;
}

function drawMarks(self, marks, ink) {
  const { ctx, bbox } = self;
  ctx.save();
  ctx.strokeStyle = ink; ctx.lineWidth = devicePixelRatio; ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const { at } of marks) {
    const x = Math.round(self.valToPos(at, "x", true)) + 0.5;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  }
  ctx.restore();
}

function stack(rows) {
  const sums = [];
  return rows.map((row) => row.map((value, at) => {
    if (value === null) return null;
    sums[at] = (sums[at] || 0) + value;
    return sums[at];
  }));
}

function lastKnown(series) {
  for (let at = (series[0]?.values.length ?? 0) - 1; at >= 0; at -= 1)
    if (series.some((one) => one.values[at] !== null)) return at;
  return null;
}

function timeText(at, step) {
  const time = new Date(at * 1000);
  return time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), hour12: false });
}

// A small line without axes.
export function Spark({ values, at = 0 }) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return html`<svg class="spark" viewBox="0 0 100 24" aria-hidden="true"></svg>`;
  const most = Math.max(...known, 1e-9);
  let path = "", isDown = false;
  values.forEach((value, index) => {
    if (value === null) { isDown = false; return; }
    path += `${isDown ? "L" : "M"}${(index * 100 / (values.length - 1)).toFixed(1)} ${(22 - 20 * value / most).toFixed(1)}`;
    isDown = true;
  });
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true"><path d=${path} class="s${at}" vector-effect="non-scaling-stroke"/></svg>`;
}
