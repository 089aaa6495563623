// The view of hosts and GPUs: all GPUs at a glance, then a card per host, filled when it comes into sight.

import { colour, count, empty, formatBytes, formatNumber, h, number, paint, prepare, put, showTip, slices, visible } from "./dom.js";
import { aborted, get, ofRun } from "./server.js";

const CELL = 14;
const KEPT = 120;
const HOT_C = 85;
const RANKINGS = [
  ["name", "by name", (a, b) => a.name.localeCompare(b.name, "en", { numeric: true })],
  ["busy", "least busy first", (a, b) => mean(a, "utilisation", 1) - mean(b, "utilisation", 1)],
  ["hot", "hottest first", (a, b) => most(b, "temperature") - most(a, "temperature")],
  ["errors", "errors first", (a, b) => errors(b) - errors(a) || a.name.localeCompare(b.name, "en", { numeric: true })],
];

const mean = (host, field, missing) => (host.gpus.length ? host.gpus.reduce((sum, gpu) => sum + (gpu[field] ?? missing), 0) / host.gpus.length : missing);
const most = (host, field) => Math.max(-1, ...host.gpus.map((gpu) => gpu[field] ?? -1));
const errors = (host) => host.gpus.reduce((sum, gpu) => sum + (gpu.errors?.length || 0), 0);
const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);
const round = (value, unit) => (value === null || value === undefined ? "–" : `${formatNumber(Math.round(value))} ${unit}`);

export class HostsView {
  constructor(app) {
    this.app = app;
    this.cards = new Map();
    this.lines = new Map();
    this.seen = new Set();
    this.note = h("span", { class: "note", role: "status" });
    this.find = h("input", { type: "search", placeholder: "Filter hosts", "aria-label": "Filter hosts", oninput: () => this.spread() });
    this.rank = h("select", { "aria-label": "Order of hosts", onchange: () => this.spread() }, RANKINGS.map(([key, text]) => h("option", { value: key }, text)));
    this.metric = h("select", { "aria-label": "Shown per GPU", onchange: () => paint(this.paintMap) },
      [["utilisation", "utilisation"], ["memory", "memory"], ["temperature", "temperature"]].map(([key, text]) => h("option", { value: key }, text)));
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.map = h("div", { class: "card gpu-map" }, h("div", { class: "head" }, h("span", { class: "tag" }, "every GPU"), this.metric, this.scale()), this.canvas);
    this.list = h("div", { class: "hosts" });
    this.body = h("div", {});
    this.element = h("div", {}, h("div", { class: "toolbar" }, h("label", { class: "grow" }, this.find), this.rank, this.note), this.body);
    this.paintMap = () => this.drawMap();
    this.watch = new IntersectionObserver((entries) => this.sighted(entries), { rootMargin: "200px" });
    new ResizeObserver(() => paint(this.paintMap)).observe(this.map);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => showTip(""));
    this.canvas.addEventListener("click", (event) => { const cell = this.cellAt(event); if (cell) this.cards.get(cell[0].name)?.element.scrollIntoView({ block: "center" }); });
  }

  scale() {
    return h("span", { class: "ramp muted" }, h("span", {}, "low"), [0.05, 0.25, 0.5, 0.75, 1].map((at) => h("i", { "--share": String(at) })), h("span", {}, "high"));
  }

  async show() {
    this.shown = true;
    if (this.run !== this.app.primary()?.id) { this.cards.clear(); this.lines.clear(); this.hosts = null; this.run = this.app.primary()?.id; }
    await this.refresh();
  }

  hide() { this.shown = false; showTip(""); }

  async refresh() {
    if (!this.run) { put(this.body, empty("No run is chosen", "Choose a run on the left.")); return; }
    try {
      const data = await get(ofRun(this.run, "hosts"));
      if (data.history) this.remember(data.history);
      this.take(data);
    } catch (error) { if (!aborted(error)) this.app.failed(error); }
  }

  event(kind, data) {
    if (kind !== "hosts" || data.run !== this.run || !this.shown) return;
    if (data.hosts) this.take(data);
    else this.refresh();
  }

  /** Takes the last minutes of each host, and of its GPUs by number. */
  remember(history) {
    for (const [name, { cpu, gpus }] of Object.entries(history)) {
      this.lines.set(name, { cpu: (cpu || []).slice(-KEPT) });
      for (const [number, figures] of Object.entries(gpus || {})) this.lines.set(`${name}/${number}`, { utilisation: (figures.utilisation || []).slice(-KEPT) });
    }
  }

  take(data) {
    this.hosts = data.hosts || [];
    this.hosts.forEach((host) => { host.gpus ||= []; });
    for (const host of this.hosts) {
      for (const gpu of host.gpus) this.extend(`${host.name}/${gpu.index}`, "utilisation", gpu.utilisation);
      this.extend(host.name, "cpu", host.cpu);
    }
    if (!this.hosts.length) { put(this.body, empty("No host is known", "Hosts and GPUs are shown while the run works on this host; GPUs of other hosts after it has ended.")); return; }
    const gpus = this.hosts.reduce((sum, host) => sum + host.gpus.length, 0);
    const wrong = this.hosts.reduce((sum, host) => sum + errors(host), 0);
    put(this.note, `${count(this.hosts.length, "host")}, ${count(gpus, "GPU")}${wrong ? `, ${count(wrong, "error")}` : ""}`);
    this.map.hidden = gpus < 2;
    if (!this.list.isConnected) put(this.body, this.map, this.list);
    const names = this.hosts.map((host) => host.name).join("\n");
    if (names !== this.names) { this.names = names; this.spread(); } else this.refill();
    paint(this.paintMap);
  }

  extend(key, field, value) {
    if (value === null || value === undefined) return;
    if (!this.lines.has(key)) this.lines.set(key, {});
    const held = this.lines.get(key);
    held[field] = [...(held[field] || []), number(value)].slice(-KEPT);
  }

  spread() {
    if (!this.hosts) return;
    const text = this.find.value.toLowerCase();
    const order = RANKINGS.find(([key]) => key === this.rank.value)[2];
    const shown = this.hosts.filter((host) => host.name.toLowerCase().includes(text)).sort(order);
    const turn = (this.turn = (this.turn || 0) + 1);
    const stale = new Set(this.list.children);
    slices(shown, (host, at) => {
      if (!this.cards.has(host.name)) {
        const element = h("article", { class: "card host", "--rows": String(host.gpus.length) });
        element.dataset.host = host.name;
        this.cards.set(host.name, { element });
        this.watch.observe(element);
      }
      const { element } = this.cards.get(host.name);
      stale.delete(element);
      if (this.list.children[at] !== element) this.list.insertBefore(element, this.list.children[at] || null);
    }, () => turn !== this.turn).then(() => { if (turn === this.turn) stale.forEach((element) => element.remove()); });
    this.byName = new Map(this.hosts.map((host) => [host.name, host]));
    this.refill();
  }

  sighted(entries) {
    for (const entry of entries) {
      const name = entry.target.dataset.host;
      if (entry.isIntersecting) { this.seen.add(name); this.fill(name); } else this.seen.delete(name);
    }
  }

  refill() {
    this.byName = new Map(this.hosts.map((host) => [host.name, host]));
    slices([...this.seen], (name) => this.fill(name));
  }

  fill(name) {
    const host = this.byName?.get(name);
    const card = this.cards.get(name);
    if (!host || !card) return;
    put(card.element,
      h("div", { class: "head" }, h("h3", { class: "text" }, name), errors(host) ? h("span", { class: "pill bad" }, count(errors(host), "error")) : null,
        host.live === false ? h("span", { class: "pill" }, "means over the run") : null,
        h("span", { class: "muted facts" }, host.live === false ? "" : `CPU ${percent(host.cpu)}`, host.memory_total ? ` · memory ${formatBytes(host.memory_used)} of ${formatBytes(host.memory_total)}` : ""),
        this.spark(this.lines.get(name)?.cpu, "CPU")),
      host.gpus.length ? h("div", { class: "gpus", role: "table", "aria-label": `GPUs of ${visible(name)}` }, host.gpus.map((gpu) => this.gpu(name, gpu))) : h("p", { class: "muted" }, "No GPU on this host."));
  }

  gpu(host, gpu) {
    const memory = gpu.memory_total ? gpu.memory_used / gpu.memory_total : null;
    const cell = (...parts) => h("span", { role: "cell" }, parts);
    return h("div", { class: "gpu", role: "row", title: visible(gpu.name || "") },
      h("b", { role: "cell" }, `GPU ${gpu.index}`),
      h("span", { role: "cell", class: "meter" }, bar(gpu.utilisation), h("span", {}, percent(gpu.utilisation))),
      h("span", { role: "cell", class: "meter memory" }, bar(memory), h("span", {}, gpu.memory_total ? formatBytes(gpu.memory_used) : "–")),
      h("span", { role: "cell", class: gpu.temperature >= HOT_C ? "hot" : "" }, round(gpu.temperature, "°C")), cell(round(gpu.clock, "MHz")), cell(round(gpu.power, "W")),
      h("span", { role: "cell", class: "sparkline" }, this.spark(this.lines.get(`${host}/${gpu.index}`)?.utilisation, "utilisation")),
      h("span", { role: "cell", class: "errors" }, (gpu.errors || []).map((text) => h("i", { class: "pill bad" }, text)), (gpu.throttled || []).map((text) => h("i", { class: "pill warn" }, `throttled: ${text}`))));
  }

  spark(values, what) {
    const known = (values || []).map(number).filter(Number.isFinite);
    if (known.length < 2) return null;
    const canvas = h("canvas", { class: "spark", role: "img", "aria-label": `${what} lately: ${percent(known[0])} to ${percent(known[known.length - 1])}` });
    paint(() => {
      const context = prepare(canvas, 84, 20);
      context.beginPath();
      known.forEach((value, at) => context.lineTo(1 + (at / (known.length - 1)) * 82, 18 - Math.max(0, Math.min(1, value)) * 16));
      context.strokeStyle = colour("--series-1");
      context.lineWidth = 1.25;
      context.stroke();
    });
    return canvas;
  }

  cells() {
    const gpus = [];
    for (const host of this.hosts || []) host.gpus.forEach((gpu) => gpus.push([host, gpu]));
    return gpus;
  }

  drawMap() {
    const width = this.map.clientWidth - 32;
    if (width < 20 || !this.hosts) return;
    const gpus = this.cells();
    this.columns = Math.max(1, Math.floor(width / (CELL + 2)));
    if (this.columns > 8) this.columns -= this.columns % 8;
    const height = Math.ceil(gpus.length / this.columns) * (CELL + 2);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = prepare(this.canvas, width, height);
    const share = { utilisation: (gpu) => gpu.utilisation, memory: (gpu) => gpu.memory_used / gpu.memory_total, temperature: (gpu) => (gpu.temperature - 30) / 60 }[this.metric.value];
    gpus.forEach(([, gpu], at) => {
      const x = (at % this.columns) * (CELL + 2);
      const y = Math.floor(at / this.columns) * (CELL + 2);
      const value = share(gpu);
      context.fillStyle = colour("--soft");
      context.fillRect(x, y, CELL, CELL);
      if (Number.isFinite(value)) {
        context.globalAlpha = 0.1 + 0.9 * Math.max(0, Math.min(1, value));
        context.fillStyle = colour("--series-1");
        context.fillRect(x, y, CELL, CELL);
        context.globalAlpha = 1;
      }
      if (gpu.errors?.length) {
        context.strokeStyle = colour("--bad");
        context.lineWidth = 2;
        context.strokeRect(x + 1, y + 1, CELL - 2, CELL - 2);
        context.beginPath(); context.moveTo(x + 4, y + 4); context.lineTo(x + CELL - 4, y + CELL - 4); context.stroke();
      }
    });
  }

  cellAt(event) {
    if (!this.columns) return null;
    const [column, row] = [Math.floor(event.offsetX / (CELL + 2)), Math.floor(event.offsetY / (CELL + 2))];
    return column < this.columns ? this.cells()[row * this.columns + column] : null;
  }

  hover(event) {
    const cell = this.cellAt(event);
    if (!cell) { showTip(""); return; }
    const [host, gpu] = cell;
    showTip(`${host.name}, GPU ${gpu.index}\n${percent(gpu.utilisation)} busy, ${formatBytes(gpu.memory_used)} of ${formatBytes(gpu.memory_total)}, ${round(gpu.temperature, "°C")}${gpu.errors?.length ? `\n${gpu.errors.join("\n")}` : ""}`, event.clientX, event.clientY);
  }
}

function bar(share) {
  const known = Number.isFinite(share) ? Math.max(0, Math.min(1, share)) : 0;
  return h("span", { class: "level", "aria-hidden": "true" }, h("i", { "--share": String(known) }));
}
