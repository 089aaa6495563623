// Elements, text, numbers and paint jobs. Text of others enters the page here only, as text nodes.

const SPOKEN = new Set(["title", "aria-label"]);
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, listeners (`onclick`), properties (`.value`) and children; strings become text nodes. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** As `h`, for SVG. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith(".")) element[name.slice(1)] = value;
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : SPOKEN.has(name) ? visible(value) : value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

/** Replaces the element's children. */
export function put(element, ...children) {
  element.replaceChildren(
    ...children.flat(3).filter((c) => c !== null && c !== undefined && c !== false)
      .map((c) => (c instanceof Node ? c : document.createTextNode(visible(c)))),
  );
  return element;
}

const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** The text with control and direction-changing characters spelled out: nothing reorders what is around it. */
export function visible(text) {
  return String(text).replace(HIDDEN, (c) => `[U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

/** A number of the server: "nan", "inf" and "-inf" stand for what JSON lacks; null is missing. */
export function number(value) {
  if (typeof value === "number") return value;
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return NaN;
}

export function formatNumber(value) {
  if (typeof value !== "number") value = number(value);
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
}

export function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at += 1; }
  return `${bytes >= 100 || at === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[at]}`;
}

export function formatClock(seconds) {
  const date = new Date(seconds * 1000);
  const today = date.toDateString() === new Date().toDateString();
  const clock = date.toLocaleTimeString("en-GB");
  return today ? clock : `${date.toLocaleDateString("en-CA")} ${clock}`;
}

export function ago(seconds) {
  const passed = Math.round(Date.now() / 1000 - seconds);
  return passed < 2 ? "just now" : `${formatSeconds(passed)} ago`;
}

export const count = (n, noun, plural = `${noun}s`) => `${n.toLocaleString("en")} ${n === 1 ? noun : plural}`;

/** Contiguous numbers as ranges: [0,1,2,5] is "0–2, 5". */
export function ranges(numbers) {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts = [];
  for (let at = 0; at < sorted.length;) {
    let end = at;
    while (end + 1 < sorted.length && sorted[end + 1] === sorted[end] + 1) end += 1;
    parts.push(end === at ? `${sorted[at]}` : `${sorted[at]}–${sorted[end]}`);
    at = end + 1;
  }
  return parts.length > 4 ? `${parts.slice(0, 3).join(", ")} and ${count(parts.length - 3, "range")} more` : parts.join(", ");
}

export function debounce(wait, action) {
  let timer = 0;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => action(...args), wait); };
}

// Paint jobs run in animation frames of at most 12 ms each, so that no task keeps the main thread for long.
const jobs = new Set();
let framed = false;
let waiting = [];

/** Runs the job in one of the next frames; a job that waits already is not queued twice. */
export function paint(job) {
  jobs.add(job);
  if (!framed) { framed = true; requestAnimationFrame(frame); }
}

function frame() {
  const start = performance.now();
  for (const job of jobs) {
    jobs.delete(job);
    job();
    if (performance.now() - start > 12) break;
  }
  framed = jobs.size > 0;
  if (framed) requestAnimationFrame(frame);
  else { waiting.forEach((done) => done()); waiting = []; }
}

/** Resolves when everything that waits to be painted has been. */
export function painted() {
  return framed ? new Promise((done) => { waiting.push(done); }) : Promise.resolve();
}

/** Calls `each` on every item in slices of some milliseconds. `stop()` ends it early. */
export async function slices(items, each, stop = () => false) {
  let start = performance.now();
  for (let at = 0; at < items.length; at += 1) {
    if (stop()) return;
    each(items[at], at);
    if (performance.now() - start > 10) { await new Promise((done) => setTimeout(done)); start = performance.now(); }
  }
}

let resolved = null;

/** The colour of a token such as "--ink" in the present scheme, as the canvas needs it. */
export function colour(token) {
  resolved ||= new Map();
  if (!resolved.has(token)) {
    const probe = h("span", { hidden: true });
    probe.style.color = `var(${token})`;
    document.body.append(probe);
    resolved.set(token, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(token);
}

export const forgetColours = () => { resolved = null; };

/** A canvas context sized to its box in device pixels, cleared; width and height are in CSS pixels. */
export function prepare(canvas, width, height) {
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const [w, t] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== t) { canvas.width = w; canvas.height = t; }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

const tip = h("div", { class: "tip", hidden: true });

/** Shows a text beside the pointer, or hides it when the text is empty. */
export function showTip(text, x = 0, y = 0) {
  if (!text) { tip.hidden = true; return; }
  if (!tip.isConnected) document.body.append(tip);
  tip.textContent = visible(text);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8));
  const top = y + 16 + box.height > innerHeight ? y - box.height - 10 : y + 16;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

const spoken = h("div", { class: "visually-hidden", "aria-live": "polite" });

/** Says a text to screen readers. */
export function announce(text) {
  if (!spoken.isConnected) document.body.append(spoken);
  spoken.textContent = visible(text);
}

export function empty(title, text) {
  return h("div", { class: "card empty" }, h("b", {}, title), text);
}
