// A chart of curves over steps: band of lowest to highest, smoothing, log scale, zoom by drag, crosshair.

import { FONT, announce, colour, formatNumber, h, number, paint, prepare, s, visible } from "./dom.js";

export const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [14, 4], [4, 2, 1, 2], [1, 2], [12, 3, 2, 3, 2, 3]];
const HEIGHT = 190;
const EDGE = { left: 56, right: 12, top: 8, bottom: 24 };

/** A short line in the colour and dash pattern of the run at this place of the list. */
export function swatch(place) {
  const line = s("line", { x1: 1, y1: 5, x2: 21, y2: 5, "stroke-dasharray": DASHES[place % DASHES.length].join(" ") || undefined });
  line.style.stroke = `var(--run-${(place % 8) + 1})`;
  return s("svg", { class: "swatch", viewBox: "0 0 22 10", "aria-hidden": "true" }, line);
}

/** One run's curve: steps, means, and lowest and highest of each bucket; NaN where a value is missing or no number. */
export class Curve {
  constructor(label, place, series) {
    this.label = label;
    this.place = place;
    this.steps = series.steps.slice();
    this.values = series.values.map(number);
    this.low = (series.low || series.values).map(number);
    this.high = (series.high || series.values).map(number);
    this.added = 0;
    this.smoothed = null;
  }

  /** Adds a step that was reported live. Returns false where the curve has it already. */
  add(step, value) {
    if (this.steps.length && step <= this.steps[this.steps.length - 1]) return false;
    const read = number(value);
    this.steps.push(step);
    for (const list of [this.values, this.low, this.high]) list.push(read);
    this.added += 1;
    this.smoothed = null;
    return true;
  }

  /** Exponential mean with the weight of its start removed. */
  smooth(weight) {
    if (!weight) return this.values;
    if (this.smoothed && this.smoothed.weight === weight) return this.smoothed.values;
    let mean = 0;
    let debt = 1;
    const values = this.values.map((value) => {
      if (!Number.isFinite(value)) return value;
      mean = mean * weight + value * (1 - weight);
      debt *= weight;
      return mean / (1 - debt);
    });
    this.smoothed = { weight, values };
    return values;
  }

  nearest(step) {
    let [low, high] = [0, this.steps.length - 1];
    if (high < 0) return -1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.steps[middle] < step) low = middle; else high = middle;
    }
    return Math.abs(this.steps[low] - step) <= Math.abs(this.steps[high] - step) ? low : high;
  }
}

export function ticks(low, high, most) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

/** Which step the pointer is at, shared by all charts. */
export class Crosshair {
  constructor() { this.step = null; this.charts = new Set(); }
  move(step) {
    if (step === this.step) return;
    this.step = step;
    this.charts.forEach((chart) => paint(chart.paintCursor));
  }
}

export class LineChart {
  /**
   * @param {string} name of the metric
   * @param {Crosshair} crosshair
   * @param {(from: number|null, to: number|null) => void} onZoom asks for a range of steps, or for all with nulls
   */
  constructor(name, unit, crosshair, onZoom, pin) {
    this.name = name;
    this.crosshair = crosshair;
    this.onZoom = onZoom;
    this.curves = [];
    this.options = { smooth: 0, log: false };
    this.lines = h("canvas", { "aria-hidden": "true" });
    this.over = h("canvas", { "aria-hidden": "true" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": name }, this.lines, this.over);
    this.legend = h("div", { class: "legend" });
    this.element = h("section", { class: "card chart" },
      h("div", { class: "top" }, h("h3", { class: "text" }, name, unit && h("span", { class: "unit" }, unit)), pin), this.legend, this.plot);
    this.paintAll = () => { this.draw(); this.drawCursor(); };
    this.paintCursor = () => this.drawCursor();
    this.listen();
  }

  show(curves, options) {
    this.curves = curves;
    this.options = options;
    this.crosshair.charts.add(this);
    paint(this.paintAll);
  }

  hide() { this.crosshair.charts.delete(this); }

  message(text) {
    this.legend.replaceChildren(h("span", {}, text));
  }

  listen() {
    const place = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      this.crosshair.move(Math.round(this.x.step(place(event))));
      if (this.from !== null && this.from !== undefined) { this.dragged = place(event); paint(this.paintCursor); }
    });
    this.plot.addEventListener("pointerleave", () => { if (this.from === null || this.from === undefined) this.crosshair.move(null); });
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch" || !this.x) return;
      this.from = this.dragged = place(event);
      this.plot.setPointerCapture(event.pointerId);
    });
    const end = (event) => {
      if (this.from === null || this.from === undefined) return;
      const [a, b] = [this.from, place(event)].sort((one, two) => one - two);
      this.from = null;
      paint(this.paintCursor);
      if (event.type === "pointerup" && b - a > 8) this.onZoom(Math.floor(this.x.step(a)), Math.ceil(this.x.step(b)));
    };
    this.plot.addEventListener("pointerup", end);
    this.plot.addEventListener("pointercancel", end);
    this.plot.addEventListener("dblclick", () => this.onZoom(null, null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (!this.x || event.ctrlKey || event.metaKey || event.altKey) return;
    const [from, to] = this.x.range;
    const at = this.crosshair.step ?? to;
    const width = to - from;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (move) {
      const step = Math.max(from, Math.min(to, at + move * Math.max(1, Math.round(width / 100))));
      this.crosshair.move(step);
      announce(this.spoken(step));
    } else if (event.key === "+" || event.key === "=") {
      if (width > 4) this.onZoom(Math.max(from, Math.floor(at - width / 4)), Math.min(to, Math.ceil(at + width / 4)));
    } else if (event.key === "-" || event.key === "0" || event.key === "Escape") this.onZoom(null, null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  spoken(step) {
    const values = this.curves.map((curve) => {
      const at = curve.nearest(step);
      return at < 0 ? "" : `${this.curves.length > 1 ? `${curve.label} ` : ""}${formatNumber(curve.values[at])}`;
    });
    return `${this.name}, step ${step}: ${values.filter(Boolean).join(", ")}`;
  }

  scales(width) {
    const first = Math.min(...this.curves.map((curve) => curve.steps[0] ?? Infinity));
    const last = Math.max(...this.curves.map((curve) => curve.steps[curve.steps.length - 1] ?? -Infinity));
    const from = this.options.from ?? first;
    const to = Math.max(this.options.to ?? last, from + 1);
    if (!Number.isFinite(from) || !Number.isFinite(to)) return null;
    let [low, high] = [Infinity, -Infinity];
    const take = (value) => {
      if (!Number.isFinite(value) || (this.options.log && value <= 0)) return;
      if (value < low) low = value;
      if (value > high) high = value;
    };
    for (const curve of this.curves) {
      const band = this.options.smooth < 0.5;
      (band ? curve.low : curve.values).forEach(take);
      (band ? curve.high : curve.values).forEach(take);
    }
    if (low > high) [low, high] = this.options.log ? [0.1, 1] : [0, 1];
    if (low === high) [low, high] = this.options.log ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
    const turn = this.options.log ? Math.log10 : (value) => value;
    const [bottom, top] = [turn(low), turn(high)];
    const pad = (top - bottom) * 0.06;
    const right = width - EDGE.right;
    const span = right - EDGE.left;
    const tall = HEIGHT - EDGE.top - EDGE.bottom;
    this.x = {
      range: [from, to],
      of: (step) => EDGE.left + ((step - from) / (to - from)) * span,
      step: (x) => from + (Math.max(0, Math.min(span, x - EDGE.left)) / span) * (to - from),
    };
    this.y = { low, high, of: (value) => EDGE.top + tall - ((turn(value) - bottom + pad) / (top - bottom + 2 * pad)) * tall };
    return this.x;
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const context = prepare(this.lines, width, HEIGHT);
    this.width = width;
    this.writeLegend(null);
    if (!this.scales(width)) return;
    this.axes(context, width);
    context.save();
    context.beginPath();
    context.rect(EDGE.left, 0, width - EDGE.left - EDGE.right, HEIGHT - EDGE.bottom + 1);
    context.clip();
    for (const curve of this.curves) this.band(context, curve);
    for (const curve of this.curves) this.line(context, curve);
    context.restore();
    const ends = this.curves.map((curve) => `${curve.label}: last ${formatNumber(curve.values[curve.values.length - 1] ?? NaN)}`);
    this.plot.setAttribute("aria-label", visible(`${this.name}, steps ${this.x.range[0]} to ${this.x.range[1]}. ${ends.join("; ")}. Arrow keys move the cursor, plus zooms, zero shows all.`));
  }

  axes(context, width) {
    context.font = FONT;
    context.strokeStyle = colour("--line");
    context.fillStyle = colour("--muted");
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const at of this.yTicks()) {
      const y = Math.round(this.y.of(at)) + 0.5;
      context.beginPath();
      context.moveTo(EDGE.left, y);
      context.lineTo(width - EDGE.right, y);
      context.stroke();
      context.fillText(formatNumber(Number(at.toPrecision(6))), EDGE.left - 8, y);
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    const [from, to] = this.x.range;
    for (const at of ticks(from, to, Math.max(2, width / 90))) {
      if (!Number.isInteger(at)) continue;
      const x = this.x.of(at);
      context.textAlign = x > width - 30 ? "right" : "center";
      context.fillText(at.toLocaleString("en"), Math.min(x, width - 2), HEIGHT - EDGE.bottom + 8);
    }
  }

  yTicks() {
    if (!this.options.log) return ticks(this.y.low, this.y.high, 4);
    const [low, high] = [Math.ceil(Math.log10(this.y.low)), Math.floor(Math.log10(this.y.high))];
    if (high - low < 1) return ticks(this.y.low, this.y.high, 3).filter((at) => at > 0);
    const stride = Math.max(1, Math.ceil((high - low) / 5));
    return Array.from({ length: Math.floor((high - low) / stride) + 1 }, (_, at) => 10 ** (low + at * stride));
  }

  band(context, curve) {
    if (curve.low.every((value, at) => value === curve.high[at] || Number.isNaN(value))) return;
    context.fillStyle = colour(`--run-${(curve.place % 8) + 1}`);
    context.globalAlpha = 0.14;
    const good = (value) => Number.isFinite(value) && (!this.options.log || value > 0);
    for (let at = 0; at < curve.steps.length;) {
      let end = at;
      while (end < curve.steps.length && good(curve.low[end]) && good(curve.high[end])) end += 1;
      if (end - at > 1) {
        context.beginPath();
        for (let i = at; i < end; i += 1) context.lineTo(this.x.of(curve.steps[i]), this.y.of(curve.high[i]));
        for (let i = end - 1; i >= at; i -= 1) context.lineTo(this.x.of(curve.steps[i]), this.y.of(curve.low[i]));
        context.fill();
      }
      at = end + 1;
    }
    context.globalAlpha = 1;
  }

  line(context, curve) {
    const stroke = colour(`--run-${(curve.place % 8) + 1}`);
    const trace = (values) => {
      context.beginPath();
      let open = false;
      values.forEach((value, at) => {
        if (!Number.isFinite(value) || (this.options.log && value <= 0)) { open = false; return; }
        const [x, y] = [this.x.of(curve.steps[at]), this.y.of(value)];
        if (open) context.lineTo(x, y); else { context.moveTo(x, y); context.lineTo(x + 0.01, y); }
        open = true;
      });
      context.stroke();
    };
    context.strokeStyle = stroke;
    context.lineJoin = "round";
    if (this.options.smooth) {
      context.globalAlpha = 0.25;
      context.lineWidth = 1;
      trace(curve.values);
      context.globalAlpha = 1;
    }
    context.lineWidth = 1.75;
    context.setLineDash(DASHES[curve.place % DASHES.length]);
    trace(curve.smooth(this.options.smooth));
    context.setLineDash([]);
    context.fillStyle = colour("--bad");
    curve.values.forEach((value, at) => {
      if (value !== null && !Number.isFinite(value)) context.fillRect(this.x.of(curve.steps[at]) - 1, HEIGHT - EDGE.bottom - 7, 2, 7);
    });
  }

  drawCursor() {
    if (!this.width || !this.x) return;
    const context = prepare(this.over, this.width, HEIGHT);
    const step = this.crosshair.step;
    if (this.from !== null && this.from !== undefined) {
      context.fillStyle = colour("--series-1");
      context.globalAlpha = 0.15;
      context.fillRect(this.from, EDGE.top, this.dragged - this.from, HEIGHT - EDGE.top - EDGE.bottom);
      context.globalAlpha = 1;
    }
    if (step !== null && step >= this.x.range[0] && step <= this.x.range[1]) {
      const x = Math.round(this.x.of(step)) + 0.5;
      context.strokeStyle = colour("--muted");
      context.beginPath();
      context.moveTo(x, EDGE.top);
      context.lineTo(x, HEIGHT - EDGE.bottom);
      context.stroke();
      for (const curve of this.curves) {
        const at = curve.nearest(step);
        const value = at < 0 ? NaN : curve.smooth(this.options.smooth)[at];
        if (!Number.isFinite(value) || (this.options.log && value <= 0)) continue;
        context.fillStyle = colour(`--run-${(curve.place % 8) + 1}`);
        context.strokeStyle = colour("--card");
        context.lineWidth = 2;
        context.beginPath();
        context.arc(this.x.of(curve.steps[at]), this.y.of(value), 4, 0, 7);
        context.fill();
        context.stroke();
      }
    }
    this.writeLegend(step);
  }

  writeLegend(step) {
    const several = this.curves.length > 1;
    const key = this.curves.map((curve) => `${curve.place} ${curve.label}`).join("\n");
    if (key !== this.legendKey) {
      this.legendKey = key;
      this.readings = this.curves.map(() => h("b"));
      this.stepText = h("span", { class: "at" });
      this.legend.replaceChildren(
        ...this.curves.map((curve, at) => h("span", {}, several && swatch(curve.place), several && h("span", { class: "text who" }, curve.label), this.readings[at])), this.stepText);
    }
    this.curves.forEach((curve, index) => {
      const at = step === null ? curve.steps.length - 1 : curve.nearest(step);
      const value = at < 0 ? "–" : formatNumber(curve.values[at]);
      const wide = step !== null && at >= 0 && curve.low[at] !== curve.high[at];
      this.readings[index].textContent = wide ? `${value} (${formatNumber(curve.low[at])} to ${formatNumber(curve.high[at])})` : value;
    });
    if (this.stepText) this.stepText.textContent = step === null ? "" : `step ${step.toLocaleString("en")}`;
  }
}
