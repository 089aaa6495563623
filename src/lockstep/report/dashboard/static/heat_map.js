// The view of communication: time and bytes per communicator and operation, and which rank makes which one wait.

import { colour, count, empty, formatBytes, formatNumber, formatSeconds, h, number, paint, prepare, put, showTip } from "./dom.js";
import { aborted, get, ofRun } from "./server.js";

export class HeatMapView {
  constructor(app) {
    this.app = app;
    this.element = h("div", {});
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
    const parts = [];
    for (const [name, value] of Object.entries(data)) {
      if (Array.isArray(value) && value.length && typeof value[0] === "object" && !Array.isArray(value[0])) parts.push(tableOf(name, value));
      else if (value && Array.isArray(value.matrix)) parts.push(matrixOf(name, value));
      else if (Array.isArray(value) && Array.isArray(value[0])) parts.push(matrixOf(name, { matrix: value }));
    }
    put(this.element, parts.length ? parts : empty("No communication is recorded", "The recorder has reported no collective yet."));
  }
}

function cell(name, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "object") return JSON.stringify(value);
  if (typeof value !== "number") return String(value);
  if (/bytes/.test(name)) return formatBytes(value);
  if (/seconds|_s$/.test(name)) return formatSeconds(value);
  return formatNumber(value);
}

function tableOf(title, rows) {
  const names = Object.keys(rows[0]).filter((name) => !Array.isArray(rows[0][name]));
  return h("section", { class: "card waits" }, h("h2", {}, title.replaceAll("_", " "), " ", h("small", {}, count(rows.length, "row"))), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, h("table", {},
    h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name.replaceAll("_", " "))))), h("tbody", {}, rows.slice(0, 200).map((row) => h("tr", {}, names.map((name) => h("td", {}, cell(name, row[name])))))))));
}

function matrixOf(title, { matrix, ranks, rows, columns }) {
  const labels = ranks || rows || matrix.map((_, at) => at);
  const across = ranks || columns || labels;
  const most = Math.max(1e-12, ...matrix.map((row) => Math.max(0, ...row.map((value) => number(value) || 0))));
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
    showTip(`${labels[y]} and ${across[x]}\n${formatNumber(number(matrix[y][x]))}`, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => showTip(""));
  return h("section", { class: "card waits" }, h("h2", {}, title.replaceAll("_", " ")), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, canvas));
}
