// The view of stages: one lane per rank of each role over time. Only the lanes in sight are painted.

import { FONT, announce, colour, count, debounce, empty, formatClock, formatSeconds, h, paint, prepare, put, ranges, showTip, visible } from "./dom.js";
import { aborted, get, ofRun } from "./server.js";
import { ticks } from "./line_chart.js";

const LANE = 22;
const HEAD = 28;
const AXIS = 30;
const REFRESH_MS = 5000;
const COLLAPSE_ABOVE = 64;
/** Stages with a colour of their own, in the order of the tokens of series; the others take what is left. */
const STAGES = ["rollout", "train", "reward", "publish", "evaluate", "checkpoint", "ledger", "pack", "logprobs", "copy"];
const COLOURS = 14;

export class GanttView {
  constructor(app) {
    this.app = app;
    this.collapsed = new Map();
    this.window = null;
    this.stageColours = new Map();
    this.build();
    this.paintAll = () => this.draw();
    this.refetch = debounce(200, () => this.fetch());
    new ResizeObserver(() => paint(this.paintAll)).observe(this.scroller);
  }

  build() {
    this.roles = h("div", { class: "chips", role: "group", "aria-label": "Roles: press to show one lane per rank" });
    this.legend = h("div", { class: "legend" });
    this.all = h("button", { type: "button", class: "button", hidden: true, onclick: () => this.zoom(null) }, "show all");
    this.note = h("span", { class: "note" });
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.spacer = h("div", { class: "spacer" });
    this.scroller = h("div", { class: "gantt", tabindex: "0", role: "group", "aria-roledescription": "timeline", "aria-label": "Stages of the ranks" }, this.canvas, this.spacer);
    this.card = h("div", { class: "card gantt-card" }, this.scroller);
    this.body = h("div", {});
    this.element = h("div", {}, h("div", { class: "toolbar" }, this.roles, this.all, this.note), this.body, h("p", { class: "muted hint" }, "Drag to zoom, double-click to show all. Arrow keys pan, plus and minus zoom."));
    this.scroller.addEventListener("scroll", () => { showTip(""); paint(this.paintAll); }, { passive: true });
    this.listen();
  }

  listen() {
    const at = (event) => { const box = this.scroller.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    this.scroller.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (this.from !== undefined && this.from !== null) { this.dragged = x; paint(this.paintAll); return; }
      this.hover(x, y, event);
    });
    this.scroller.addEventListener("pointerleave", () => showTip(""));
    this.scroller.addEventListener("pointerdown", (event) => {
      const [x, y] = at(event);
      if (event.button || event.pointerType === "touch" || !this.shownWindow || x < this.edge || x > this.width) return;
      if (y > AXIS && this.lanes[this.laneAt(y)]?.head) return;
      this.from = this.dragged = x;
      this.scroller.setPointerCapture(event.pointerId);
    });
    const end = (event) => {
      if (this.from === undefined || this.from === null) return;
      const [a, b] = [this.from, at(event)[0]].sort((one, two) => one - two);
      this.from = null;
      if (event.type === "pointerup" && b - a > 8) this.zoom([this.timeAt(a), this.timeAt(b)]);
      else paint(this.paintAll);
    };
    this.scroller.addEventListener("pointerup", end);
    this.scroller.addEventListener("pointercancel", end);
    this.scroller.addEventListener("dblclick", () => this.zoom(null));
    this.scroller.addEventListener("click", (event) => {
      const lane = this.lanes?.[this.laneAt(at(event)[1])];
      if (lane?.head && at(event)[1] > AXIS) this.fold(lane.role);
    });
    this.scroller.addEventListener("keydown", (event) => {
      if (!this.shownWindow || event.ctrlKey || event.metaKey || event.altKey) return;
      const [from, to] = this.shownWindow;
      const span = to - from;
      const next = {
        ArrowLeft: [from - span / 8, to - span / 8], ArrowRight: [from + span / 8, to + span / 8],
        "+": [from + span / 4, to - span / 4], "=": [from + span / 4, to - span / 4], "-": [from - span / 2, to + span / 2], 0: null, Escape: null,
      };
      if (!(event.key in next)) return;
      event.preventDefault();
      event.stopPropagation();
      this.zoom(next[event.key]);
      if (this.shownWindow) announce(`${formatClock(this.shownWindow[0])}, ${formatSeconds(this.shownWindow[1] - this.shownWindow[0])}`);
    });
  }

  zoom(range) {
    this.window = range && range[1] - range[0] > 0.001 ? range : null;
    this.all.hidden = !this.window;
    paint(this.paintAll);
    this.refetch();
  }

  async show() {
    this.shown = true;
    const run = this.app.primary();
    if (this.run !== run?.id) { this.run = run?.id; this.window = null; this.data = null; this.collapsed.clear(); this.all.hidden = true; }
    await this.fetch();
  }

  hide() { this.shown = false; showTip(""); }
  refresh() { return this.fetch(); }

  event(kind, data) {
    if ((kind === "step" || kind === "waits") && this.shown && data.run === this.run && Date.now() - (this.fetched || 0) > REFRESH_MS) this.fetch();
  }

  async fetch() {
    if (!this.run || !this.shown) { if (!this.run) put(this.body, empty("No run is chosen", "Choose a run on the left.")); return; }
    this.fetched = Date.now();
    if (this.request) this.request.abort();
    this.request = new AbortController();
    const [from, to] = this.window || [null, null];
    try {
      const data = await get(ofRun(this.run, "stages"), { from, to }, this.request.signal);
      await this.take(data);
    } catch (error) { if (!aborted(error)) this.app.failed(error); }
  }

  take(data) {
    this.rows = data.rows.map((row) => ({ ...row, spans: [] }));
    for (const span of data.spans) this.rows[span.row]?.spans.push({ ...span, end: span.end ?? Date.now() / 1000 });
    this.byRole = new Map();
    for (const row of this.rows) {
      row.spans.sort((a, b) => a.start - b.start);
      if (!this.byRole.has(row.role)) this.byRole.set(row.role, []);
      this.byRole.get(row.role).push(row);
    }
    let [from, to] = [Infinity, -Infinity];
    const seconds = new Map();
    const single = this.rows.every((row) => row.spans.length < 2);
    for (const row of this.rows) {
      for (const span of row.spans) {
        // One stage that has lasted since the start, such as a supervisor's, would squeeze all others.
        if (single || row.spans.length > 1) from = Math.min(from, span.start);
        to = Math.max(to, span.end);
        seconds.set(span.stage, (seconds.get(span.stage) || 0) + span.end - span.start);
      }
    }
    this.whole = from < to ? [from, to] : null;
    this.data = data;
    for (const role of this.byRole.keys()) if (!this.collapsed.has(role)) this.collapsed.set(role, this.rows.length > COLLAPSE_ABOVE && this.byRole.get(role).length > COLLAPSE_ABOVE && this.byRole.size > 1);
    if (!this.whole && !this.window) { put(this.body, empty("No stage is recorded yet", "Stages appear with the first finished one.")); return; }
    if (!this.card.isConnected) put(this.body, this.legend, this.card);
    const kinds = [...seconds].sort((a, b) => b[1] - a[1]).map(([stage]) => stage);
    kinds.forEach((stage) => this.stageColour(stage));
    put(this.legend, kinds.slice(0, 12).map((stage) => h("span", {}, h("i", { class: "dot", "--dot": `var(${this.stageColour(stage)})` }), h("span", { class: "text" }, stage))));
    put(this.note, `${count(this.rows.length, "lane")}, ${count(data.spans.length, "stage")}`);
    this.chips();
    this.lay();
  }

  stageColour(stage) {
    if (!this.stageColours.has(stage)) {
      const known = STAGES.indexOf(stage);
      const taken = new Set(this.stageColours.values());
      const tokens = Array.from({ length: COLOURS }, (_, at) => `--series-${at + 1}`);
      this.stageColours.set(stage, tokens[known] || tokens.slice(STAGES.length).find((token) => !taken.has(token)) || tokens[this.stageColours.size % COLOURS]);
    }
    return this.stageColours.get(stage);
  }

  chips() {
    put(this.roles, [...this.byRole].map(([role, rows]) => h("button", {
      type: "button", class: "button", "aria-pressed": String(!this.collapsed.get(role)), onclick: () => this.fold(role),
    }, h("span", { class: "text" }, role), " ", h("small", { class: "muted" }, String(rows.length)))));
  }

  fold(role) {
    this.collapsed.set(role, !this.collapsed.get(role));
    this.chips();
    this.lay();
  }

  lay() {
    this.lanes = [];
    let top = AXIS;
    for (const [role, rows] of this.byRole) {
      const folded = this.collapsed.get(role);
      this.lanes.push({ head: true, role, rows, folded, top, height: HEAD });
      top += HEAD;
      if (folded) continue;
      for (const row of rows) { this.lanes.push({ row, top, height: LANE }); top += LANE; }
    }
    this.total = top + 6;
    const height = Math.min(this.total, Math.max(240, Math.round(innerHeight * 0.68)));
    this.scroller.style.height = `${height}px`;
    this.spacer.style.height = `${this.total - height}px`;
    this.height = height;
    paint(this.paintAll);
  }

  laneAt(y) {
    const wanted = y + this.scroller.scrollTop;
    let [low, high] = [0, (this.lanes?.length || 0) - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.lanes[middle].top <= wanted) low = middle; else high = middle - 1;
    }
    return low;
  }

  timeAt(x) {
    const [from, to] = this.shownWindow;
    return from + ((x - this.edge) / (this.width - this.edge - 8)) * (to - from);
  }

  draw() {
    const width = this.scroller.clientWidth;
    if (!width || !this.lanes || !(this.window || this.whole)) return;
    this.width = width;
    this.edge = width < 520 ? 92 : 150;
    this.shownWindow = this.window || this.whole;
    const [from, to] = this.shownWindow;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
    const context = prepare(this.canvas, width, this.height);
    const x = (time) => this.edge + ((time - from) / (to - from)) * (width - this.edge - 8);
    context.font = FONT;
    context.textBaseline = "middle";
    this.drawAxis(context, width, from, to, x);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, this.height - AXIS);
    context.clip();
    const scroll = this.scroller.scrollTop;
    for (let at = this.laneAt(AXIS); at < this.lanes.length; at += 1) {
      const lane = this.lanes[at];
      const y = lane.top - scroll;
      if (y > this.height) break;
      if (lane.head) this.drawHead(context, lane, y, width, x);
      else this.drawLane(context, lane.row, y, x, width);
    }
    context.restore();
    if (this.from !== undefined && this.from !== null) {
      context.fillStyle = colour("--series-1");
      context.globalAlpha = 0.15;
      context.fillRect(this.from, AXIS, this.dragged - this.from, this.height - AXIS);
      context.globalAlpha = 1;
    }
  }

  drawAxis(context, width, from, to, x) {
    const origin = this.whole ? this.whole[0] : from;
    context.strokeStyle = colour("--line");
    context.fillStyle = colour("--muted");
    context.textAlign = "center";
    for (const at of ticks(from - origin, to - origin, Math.max(2, (width - this.edge) / 110))) {
      const place = Math.round(x(at + origin)) + 0.5;
      context.beginPath();
      context.moveTo(place, AXIS - 6);
      context.lineTo(place, this.height);
      context.globalAlpha = 0.5;
      context.stroke();
      context.globalAlpha = 1;
      context.textAlign = place > width - 30 ? "right" : "center";
      context.fillText(at < 0 ? `-${formatSeconds(-at)}` : at === 0 ? "0 s" : formatSeconds(at), place, AXIS / 2);
    }
  }

  drawHead(context, lane, y, width, x) {
    context.fillStyle = colour("--soft");
    context.fillRect(0, y, width, lane.height - 2);
    context.fillStyle = colour("--ink");
    context.textAlign = "left";
    context.fillText(fit(context, `${lane.folded ? "▸" : "▾"} ${visible(lane.role)} (${lane.rows.length})`, this.edge - 16), 10, y + lane.height / 2 - 1);
    if (lane.folded) foldedRows(lane.rows).forEach((row) => this.drawSpans(context, row, y + 4, lane.height - 10, x, width, 0.5));
  }

  drawLane(context, row, y, x, width) {
    context.fillStyle = colour("--muted");
    context.textAlign = "left";
    context.fillText(fit(context, visible(row.name), this.edge - 28), 22, y + LANE / 2 + 1);
    this.drawSpans(context, row, y + 3, LANE - 6, x, width, 1);
  }

  drawSpans(context, row, y, height, x, width, alpha) {
    const [from, to] = this.shownWindow;
    let end = -1;
    for (const span of row.spans) {
      if (span.start > to) break;
      if (span.end < from) continue;
      const left = Math.max(this.edge, x(span.start));
      const right = Math.min(width - 8, x(span.end));
      if (right <= end + 0.3 && right - left < 1) continue;
      end = right;
      context.globalAlpha = alpha * (span.state === "done" || !span.state || span.state === "finished" ? 0.9 : 1);
      context.fillStyle = colour(this.stageColour(span.stage));
      const wide = Math.max(1, right - left - (right - left > 4 ? 1 : 0));
      context.fillRect(left, y, wide, height);
      if (isBad(span.state)) {
        context.fillStyle = colour("--bad");
        context.fillRect(left, y + height - 3, wide, 3);
      }
      context.globalAlpha = 1;
      if (wide > 64 && alpha === 1) {
        context.fillStyle = "#fff";
        if (colour("--page").includes("15, 18")) context.fillStyle = "#0f1217";
        context.fillText(fit(context, visible(span.stage), wide - 12), left + 6, y + height / 2 + 0.5);
      }
    }
  }

  hover(x, y, event) {
    const lane = this.lanes?.[this.laneAt(y)];
    if (!lane || y < AXIS || !this.shownWindow) { showTip(""); return; }
    if (lane.head) { showTip(x < this.edge ? `${lane.role}: ${count(lane.rows.length, "rank")} ${ranges(lane.rows.map((row) => row.rank).filter((rank) => rank !== null && rank !== undefined))}` : "", event.clientX, event.clientY); return; }
    const time = this.timeAt(x);
    const near = (this.shownWindow[1] - this.shownWindow[0]) / Math.max(1, this.width) * 2;
    const span = lane.row.spans.find((each) => each.start - near <= time && time <= each.end + near);
    if (!span) { showTip(x < this.edge ? lane.row.name : "", event.clientX, event.clientY); return; }
    showTip(`${lane.row.name}: ${span.stage}${span.count > 1 ? ` and others, ${span.count} in all` : ""}${span.step === null || span.step === undefined ? "" : `, step ${span.step}`}\n${formatSeconds(span.end - span.start)} from ${formatClock(span.start)}${span.state ? `\n${span.state}` : ""}`, event.clientX, event.clientY);
  }
}

/** Some dozens of the rows, evenly chosen, and those with a stage that went wrong last: what a folded role paints. */
function foldedRows(rows) {
  const every = Math.max(1, Math.ceil(rows.length / 48));
  const bad = rows.filter((row) => row.spans.some((span) => isBad(span.state)));
  return [...rows.filter((row, at) => at % every === 0), ...bad.slice(0, 48)];
}

const isBad = (state) => /fail|stall|late|error|lost|aborted/.test(state || "");

/** The text, cut to a width in pixels. */
export function fit(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle; else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}
