// A table that draws only the rows in view: sorted by its headers, moved through with the keyboard.
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { setQuery, place } from "./route.js";
import { useStore } from "./lib.js";

const ROW = 37, AROUND = 12, SMALL = 60;

// columns: [{id, label, value(row), cell?(row), numeric?, title?, hide?: "narrow" | "medium"}]
export function Table({ label, columns, rows, rowKey, sort = "", empty = "Nothing here.", name = "", maxHeight = "" }) {
  const query = useStore(place).query;
  const parameter = name ? `sort-${name}` : "sort";
  const chosen = query.get(parameter) || sort;
  const isDown = chosen.startsWith("-"), by = chosen.replace(/^-/, "");
  const column = columns.find((one) => one.id === by);
  const sorted = useMemo(() => {
    if (!column) return rows;
    const keyed = rows.map((row) => [column.value(row), row]);
    keyed.sort(([left], [right]) => lacks(left) - lacks(right) || compare(left, right) * (isDown ? -1 : 1));  // what is not known comes last, either way
    return keyed.map(([, row]) => row);
  }, [rows, chosen, columns]);
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  const isVirtual = sorted.length > SMALL;
  useEffect(() => {
    const node = box.current;
    const measure = () => setView((before) => {
      const top = Math.floor(node.scrollTop / ROW) * ROW;
      return before.top === top && before.height === node.clientHeight ? before : { top, height: node.clientHeight };
    });
    measure();
    node.addEventListener("scroll", measure, { passive: true });
    const sizes = new ResizeObserver(measure);
    sizes.observe(node);
    return () => { node.removeEventListener("scroll", measure); sizes.disconnect(); };
  }, []);
  const first = isVirtual ? Math.max(0, Math.floor(view.top / ROW) - AROUND) : 0;
  const last = isVirtual ? Math.min(sorted.length, Math.ceil((view.top + view.height) / ROW) + AROUND) : sorted.length;
  const order = (id) => {
    const next = by !== id ? (columns.find((one) => one.id === id).numeric ? "-" + id : id) : isDown ? id : "-" + id;
    setQuery({ [parameter]: next === sort ? "" : next });
  };
  const hidden = (one) => (one.hide ? "hide-" + one.hide : "");
  return html`<div class="table-box ${isVirtual ? "is-long" : ""} ${maxHeight}" ref=${box} tabindex="0" role="region" aria-label=${label}>
    <table aria-rowcount=${sorted.length + 1}>
      <thead><tr aria-rowindex="1">${columns.map((one) => html`<th key=${one.id} scope="col" class="${one.numeric ? "numeric" : ""} ${hidden(one)}"
        aria-sort=${by === one.id ? (isDown ? "descending" : "ascending") : undefined} title=${one.title}>
        ${one.value ? html`<button type="button" class="sort" onClick=${() => order(one.id)}>${one.label}<span aria-hidden="true">${by === one.id ? (isDown ? "↓" : "↑") : ""}</span></button>` : one.label}</th>`)}</tr></thead>
      <tbody>
        ${first > 0 && html`<tr class="gap" aria-hidden="true"><td colspan=${columns.length} style=${{ height: first * ROW + "px" }}></td></tr>`}
        ${sorted.slice(first, last).map((row, index) => html`<tr key=${rowKey(row)} aria-rowindex=${first + index + 2}>
          ${columns.map((one) => html`<td key=${one.id} class="${one.numeric ? "numeric" : ""} ${hidden(one)}">${one.cell ? one.cell(row) : one.value(row)}</td>`)}</tr>`)}
        ${last < sorted.length && html`<tr class="gap" aria-hidden="true"><td colspan=${columns.length} style=${{ height: (sorted.length - last) * ROW + "px" }}></td></tr>`}
      </tbody>
    </table>
    ${!sorted.length && html`<p class="empty">${empty}</p>`}
  </div>`;
}

const lacks = (value) => value === null || value === undefined || value === "";

function compare(left, right) {
  return typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right), undefined, { numeric: true });
}
