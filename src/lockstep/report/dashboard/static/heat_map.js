// The view of communication: time and bytes per communicator and operation, and which rank makes which one wait.

import { colour, count, empty, formatBytes, formatNumber, formatSeconds, h, number, paint, prepare, put, showTip } from "./dom.js";
import { aborted, get, ofRun } from "./server.js";

export class HeatMapView {
  constructor(app) {
    this.app = app;
    this.element = h("div", { class: "communication" });
  }

  async show() { this.shown = true; this.run = this.app.primary()?.id; await this.refresh(); }
  hide() { this.shown = false; showTip(""); }
  event() {}
  refresh() { return this.load(); }

  async load() {
    if (!this.run) { put(this.element, empty("No run is chosen", "Choose a run on the left.")); return; }
    try {
      this.draw(await get(ofRun(this.run, "communication")));
    } catch (error) {
      if (aborted(error)) return;
      put(this.element, empty("No communication is recorded", `${error.message}${error.remedy ? `. ${error.remedy}` : ""}`));
    }
  }

  draw(data) {
    const operations = data.communicators.flatMap((each) => each.operations.map((row) => ({ communicator: each.name, processes: each.processes, ...row })));
    const late = data.communicators.flatMap((each) => each.ranks.map((row) => ({ communicator: each.name, ...row })));
    const pairs = data.communicators.flatMap((each) => each.pairs.map((row) => ({ communicator: each.name, ...row }))).sort((a, b) => b.seconds - a.seconds);
    const parts = [
      data.remarks.length && h("section", { class: "card" }, h("h2", {}, "Remarks"), h("ul", {}, data.remarks.map((text) => h("li", {}, text)))),
      data.matrix && matrixOf("How long a process (row) made another one (column) wait, and p50 / p99 of a call", data.matrix),
      operations.length && tableOf("Collectives", operations, OPERATIONS),
      late.length && tableOf("Late arrivals", late, LATE),
      pairs.length && tableOf("Pairs", pairs, PAIRS),
      data.ranks.length && tableOf("Load of the ranks", data.ranks, LOADS),
    ].filter(Boolean);
    put(this.element, parts.length ? parts : empty("No communication is recorded", "The recorder has reported no collective yet."));
  }
}

// Up to so many processes, the matrix has its values written in it.
const MOST_WRITTEN = 16;

// The columns of each table: field of the summary, heading, and how it is written.
const digits = (value) => formatNumber(Number(value.toPrecision(3)));
const quantiles = (value) => (value ? `${digits(value.p50)} / ${digits(value.p99)} ms` : "–");
const share = (value) => `${Math.round(100 * value)}%`;
const OPERATIONS = [
  ["communicator", "communicator"], ["operation", "operation"], ["size", "bytes of a call", formatBytes], ["processes", "processes", (value) => formatNumber(Array.isArray(value) ? value.length : value)],
  ["calls", "calls", formatNumber], ["bytes", "bytes", formatBytes], ["waiting_s", "waiting", formatSeconds], ["moving_s", "moving", formatSeconds],
  ["waiting_share", "share waiting", share], ["spread_ms", "first to last entry p50 / p99", quantiles], ["bus_gb_s", "bus GB/s", digits], ["checked_gb_s", "checked GB/s", digits],
];
const LATE = [
  ["communicator", "communicator"], ["process", "process"], ["last", "times last", formatNumber], ["caused_s", "made others wait", formatSeconds],
  ["waited_s", "waited itself", formatSeconds], ["late_ms", "late p50 / p99", quantiles],
];
const PAIRS = [
  ["communicator", "communicator"], ["late", "late"], ["waiting", "waiting for it"], ["calls", "calls", formatNumber], ["seconds", "waited", formatSeconds],
  ["wait_ms", "per call p50 / p99", quantiles],
];
const LOADS = [
  ["role", "role"], ["rank", "rank", formatNumber], ["steps", "steps", formatNumber], ["tokens", "tokens", formatNumber], ["work_s", "working", formatSeconds],
  ["blocked_s", "blocked", formatSeconds], ["memory", "memory", formatBytes], ["pace", "time for the same work", (value) => `${digits(value)} x`],
];

function tableOf(title, rows, columns) {
  const cell = (value, written) => (value === null || value === undefined ? "–" : written ? written(value) : String(value));
  return h("section", { class: "card waits" }, h("h2", {}, title, " ", h("small", {}, count(rows.length, "row"))), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map(([, heading]) => h("th", {}, heading)))), h("tbody", {}, rows.slice(0, 200).map((row) => h("tr", {}, columns.map(([field, , written]) => h("td", {}, cell(row[field], written)))))))));
}

function matrixOf(title, { processes, seconds: matrix, wait_ms: waits, complete }) {
  const most = Math.max(1e-12, ...matrix.map((row) => Math.max(0, ...row.map((value) => number(value) || 0))));
  const note = complete ? count(processes.length, "process", "processes") : "only the largest are recorded";
  const drawn = processes.length <= MOST_WRITTEN ? writtenMatrix(processes, matrix, waits, most) : paintedMatrix(title, processes, matrix, waits, most);
  return h("section", { class: "card waits" }, h("h2", {}, title, " ", h("small", {}, note)), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, drawn));
}

// Few processes: a table with the seconds in its cells, and p50 and p99 of a call's wait.
function writtenMatrix(processes, matrix, waits, most) {
  const cell = (value, wait) => {
    const seconds = number(value) || 0;
    const element = h("td", {}, seconds > 0 ? [formatSeconds(seconds), h("small", {}, quantiles(wait))] : "");
    element.style.setProperty("--share", String(Math.sqrt(seconds / most)));
    return element;
  };
  return h("table", { class: "matrix" }, h("thead", {}, h("tr", {}, h("td", {}), processes.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, matrix.map((row, at) => h("tr", {}, h("th", { scope: "row" }, processes[at]), row.map((value, column) => cell(value, waits[at][column]))))));
}

function paintedMatrix(title, processes, matrix, waits, most) {
  const canvas = h("canvas", { role: "img", "aria-label": `${title}: ${matrix.length} by ${matrix[0]?.length || 0}, most ${formatNumber(most)}` });
  const size = Math.max(1, Math.min(28, Math.floor(640 / Math.max(matrix.length, 1))));
  const [width, height] = [size * (matrix[0]?.length || 0), size * matrix.length];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  paint(() => {
    const context = prepare(canvas, width, height);
    context.fillStyle = colour("--soft");
    context.fillRect(0, 0, width, height);
    context.fillStyle = colour("--series-2");
    matrix.forEach((row, y) => row.forEach((value, x) => {
      const share = (number(value) || 0) / most;
      if (share <= 0) return;
      context.globalAlpha = 0.1 + 0.9 * Math.sqrt(share);
      context.fillRect(x * size, y * size, size > 4 ? size - 1 : size, size > 4 ? size - 1 : size);
    }));
    context.globalAlpha = 1;
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = [Math.floor(event.offsetX / size), Math.floor(event.offsetY / size)];
    if (matrix[y]?.[x] === undefined) { showTip(""); return; }
    showTip(`${processes[y]} made ${processes[x]} wait\n${formatSeconds(number(matrix[y][x]) || 0)}, p50 / p99 ${quantiles(waits[y][x])}`, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => showTip(""));
  return canvas;
}
