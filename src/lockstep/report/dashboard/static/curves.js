// The view of curves: metrics found by name, in groups; one chart per metric with a curve per chosen run.

import { change, onChange, state } from "./address.js";
import { count, debounce, empty, h, paint, put, visible } from "./dom.js";
import { Crosshair, Curve, LineChart } from "./line_chart.js";
import { aborted, get, ofRun } from "./server.js";

const NAMES_PER_REQUEST = 12;
const POINTS = 600;
const ADDED_BEFORE_RELOAD = 80;
const FIRST_OPEN = 24;
const MOST_FOUND = 240;
const FIRST_CURVES_MS = 10000;

/** Whether the metric's name has every word of the text, in any order; a word in slashes is a regular expression. */
export function matcher(text) {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const inner = /^\/(.+)\/$/.exec(word);
    if (inner) {
      try { const pattern = new RegExp(inner[1], "i"); return (name) => pattern.test(name); } catch { /* as plain text */ }
    }
    return word.startsWith("-") && word.length > 1 ? (name) => !name.includes(word.slice(1)) : (name) => name.includes(word);
  });
  return (name) => { const low = name.toLowerCase(); return tests.every((test) => test(low)); };
}

export class CurvesView {
  constructor(app) {
    this.app = app;
    this.crosshair = new Crosshair();
    this.charts = new Map();
    this.open = new Map();
    this.metrics = new Map();
    this.seen = new Set();
    this.request = null;
    this.load = debounce(30, () => this.fetchMissing());
    this.build();
    this.watch = new IntersectionObserver((entries) => this.sighted(entries), { rootMargin: "300px" });
    new ResizeObserver(() => this.redraw()).observe(this.element);
    onChange((names) => {
      if (names.has("from") || names.has("to")) this.ranged();
      if (names.has("smooth") || names.has("log")) { this.controls(); this.redraw(); }
      if ((names.has("find") || names.has("metrics")) && this.shown) this.list();
    });
  }

  build() {
    this.find = h("input", { type: "search", id: "curves-find", placeholder: "Find metrics: reward, -eval, /^policy/", "aria-label": "Find metrics",
      ".value": state.find, oninput: debounce(120, () => change({ find: this.find.value })) });
    this.smooth = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", "aria-label": "Smoothing", oninput: () => change({ smooth: Number(this.smooth.value) }) });
    this.smoothText = h("span", {});
    this.log = h("input", { type: "checkbox", onchange: () => change({ log: this.log.checked }) });
    this.range = h("button", { type: "button", class: "button", hidden: true, onclick: () => change({ from: null, to: null }) });
    this.note = h("span", { class: "note", role: "status" });
    this.body = h("div", {});
    this.element = h("div", { class: "curves" },
      h("div", { class: "toolbar" }, h("label", { class: "grow" }, this.find), h("label", {}, "smoothing", this.smooth, this.smoothText),
        h("label", {}, this.log, "log scale"), this.range, this.note), this.body);
    this.controls();
  }

  controls() {
    this.smooth.value = String(state.smooth);
    this.smoothText.textContent = state.smooth.toFixed(2);
    this.log.checked = state.log;
    this.range.hidden = state.from === null && state.to === null;
    put(this.range, `steps ${state.from ?? "first"} to ${state.to ?? "last"} · show all`);
    if (this.find.value !== state.find) this.find.value = state.find;
  }

  async show() {
    this.shown = true;
    this.controls();
    const runs = this.app.chosen();
    await Promise.all(runs.filter((run) => !this.metrics.has(run.id)).map(async (run) => {
      this.metrics.set(run.id, await get(ofRun(run.id, "metrics")));
    }));
    if (!this.shown) return;
    this.runs = runs;
    this.list();
    this.redraw(); // of a run that is no longer chosen nothing is fetched
    this.load();
    // Which charts are in sight is known a frame later; then their curves are fetched.
    await new Promise((done) => { setTimeout(done, FIRST_CURVES_MS); this.loaded = done; if (!this.body.querySelector(".chart")) done(); });
  }

  hide() { this.shown = false; this.crosshair.move(null); }

  /** All metrics of the chosen runs by group, groups and names in the server's order. */
  groups() {
    const groups = new Map();
    const known = new Set();
    for (const run of this.runs) {
      for (const metric of this.metrics.get(run.id)?.names || []) {
        if (known.has(metric.name)) continue;
        known.add(metric.name);
        const group = metric.group || "other";
        if (!groups.has(group)) groups.set(group, []);
        groups.get(group).push(metric);
      }
    }
    return [groups, known.size];
  }

  list() {
    this.controls();
    const [groups, all] = this.groups();
    const test = matcher(state.find);
    const sections = [];
    let [found, free] = [0, state.find ? MOST_FOUND : FIRST_OPEN];
    const pinned = state.metrics.map((name) => [...groups.values()].flat().find((metric) => metric.name === name)).filter(Boolean);
    if (pinned.length) sections.push(this.section("pinned", pinned, true));
    for (const [group, metrics] of groups) {
      const matching = metrics.filter((metric) => test(metric.name) && !state.metrics.includes(metric.name));
      found += matching.length;
      if (!matching.length) continue;
      sections.push(this.section(group, matching, free > 0));
      free -= matching.length;
    }
    put(this.note, state.find ? `${found} of ${count(all, "metric")}` : count(all, "metric"));
    if (!this.runs.length) sections.push(empty("No run is chosen", "Tick a run on the left."));
    else if (!all) sections.push(empty("No metrics yet", "Curves appear with the first finished step."));
    else if (!sections.length) sections.push(empty("No metric matches", `Nothing is named like “${state.find}”.`));
    put(this.body, sections);
  }

  section(group, metrics, openByDefault) {
    const open = this.open.get(group) ?? openByDefault;
    const grid = h("div", { class: "charts" });
    const button = h("button", { type: "button", class: "group", "aria-expanded": String(open) }, h("span", { class: "text" }, group), h("small", {}, String(metrics.length)));
    const spread = (most) => {
      grid.replaceChildren(...metrics.slice(0, most).map((metric) => this.chart(metric).element));
      if (metrics.length > most) {
        grid.append(h("button", { type: "button", class: "button more", onclick: () => spread(most + 48) }, `show ${Math.min(48, metrics.length - most)} more of ${metrics.length - most}`));
      }
    };
    button.addEventListener("click", () => {
      const next = button.getAttribute("aria-expanded") !== "true";
      this.open.set(group, next);
      button.setAttribute("aria-expanded", String(next));
      grid.hidden = !next;
      if (next) spread(48);
    });
    grid.hidden = !open;
    if (open) spread(48);
    return h("section", {}, h("h2", { class: "group-title" }, button), grid);
  }

  chart({ name, unit }) {
    let entry = this.charts.get(name);
    if (!entry) {
      const pin = h("button", { type: "button", class: "pin", onclick: () => this.pin(name) }, "☆");
      const chart = new LineChart(name, unit, this.crosshair, (from, to) => change({ from, to }), pin);
      entry = { chart, pin, curves: new Map(), element: chart.element };
      chart.element.dataset.metric = name;
      this.charts.set(name, entry);
      this.watch.observe(chart.element);
    }
    const pinned = state.metrics.includes(name);
    entry.pin.setAttribute("aria-pressed", String(pinned));
    entry.pin.setAttribute("aria-label", visible(`${pinned ? "Unpin" : "Pin"} ${name}`));
    entry.pin.textContent = pinned ? "★" : "☆";
    return entry;
  }

  pin(name) {
    const pinned = state.metrics.includes(name);
    change({ metrics: pinned ? state.metrics.filter((each) => each !== name) : [...state.metrics, name] });
    this.charts.get(name)?.pin.focus();
  }

  sighted(entries) {
    for (const entry of entries) {
      const name = entry.target.dataset.metric;
      if (entry.isIntersecting) this.seen.add(name);
      else { this.seen.delete(name); this.charts.get(name)?.chart.hide(); }
    }
    this.redraw();
    this.load();
  }

  key() { return `${state.from ?? ""}:${state.to ?? ""}`; }

  ranged() {
    this.controls();
    if (this.request) this.request.abort();
    this.request = null;
    this.load();
  }

  async fetchMissing() {
    if (!this.shown || !this.runs) return;
    this.request ||= new AbortController();
    const { signal } = this.request;
    const key = this.key();
    const asked = [];
    for (const run of this.runs) {
      const has = new Set((this.metrics.get(run.id)?.names || []).map((metric) => metric.name));
      const missing = [...this.seen].filter((name) => has.has(name) && this.charts.get(name)?.curves.get(run.id)?.key !== key);
      for (let at = 0; at < missing.length; at += NAMES_PER_REQUEST) asked.push([run, missing.slice(at, at + NAMES_PER_REQUEST)]);
    }
    await Promise.all(asked.map(([run, names]) => this.fetchSome(run, names, key, signal)));
    if (this.seen.size) this.loaded?.();
  }

  async fetchSome(run, names, key, signal) {
    for (const name of names) {
      const curves = this.charts.get(name).curves;
      curves.set(run.id, { key, curve: curves.get(run.id)?.curve });
    }
    try {
      const { series } = await get(ofRun(run.id, "series"), { name: names, from: state.from, to: state.to, points: POINTS }, signal);
      for (const name of names) {
        if (!series[name]) continue;
        this.charts.get(name).curves.set(run.id, { key, curve: new Curve(run.name, run.place, series[name]) });
        this.drawOne(name);
      }
    } catch (error) {
      for (const name of names) this.charts.get(name).curves.delete(run.id);
      if (!aborted(error)) this.app.failed(error);
    }
  }

  drawOne(name) {
    const entry = this.charts.get(name);
    if (!entry || !this.seen.has(name) || !this.runs) return;
    const curves = this.runs.map((run) => entry.curves.get(run.id)?.curve).filter(Boolean);
    this.runs.forEach((run) => { const curve = entry.curves.get(run.id)?.curve; if (curve) { curve.place = run.place; curve.label = run.name; } });
    if (curves.length) entry.chart.show(curves, { smooth: state.smooth, log: state.log, from: state.from, to: state.to });
  }

  redraw() { if (this.shown) this.seen.forEach((name) => this.drawOne(name)); }

  /** A step reported live: its values extend the curves; after some dozens of them the server is asked again. */
  event(kind, data) {
    if (kind !== "step" || !data.metrics || state.to !== null) return;
    const known = this.metrics.get(data.run);
    if (known && this.shown && Object.keys(data.metrics).some((name) => !known.set?.has(name))) this.learn(data.run, known, data.metrics);
    let reload = false;
    for (const [name, value] of Object.entries(data.metrics)) {
      const held = this.charts.get(name)?.curves.get(data.run);
      if (!held?.curve || !held.curve.add(data.step, value)) continue;
      if (held.curve.added > ADDED_BEFORE_RELOAD) { held.key = null; reload = true; }
      if (this.shown && this.seen.has(name)) paint(this.painter(name));
    }
    if (reload) this.load();
  }

  painter(name) {
    const entry = this.charts.get(name);
    entry.painter ||= () => this.drawOne(name);
    return entry.painter;
  }

  async learn(run, known, metrics) {
    known.set = new Set([...known.names.map((metric) => metric.name), ...Object.keys(metrics)]);
    if (Object.keys(metrics).every((name) => known.names.some((metric) => metric.name === name))) return;
    this.metrics.set(run, await get(ofRun(run, "metrics")).catch(() => known));
    this.metrics.get(run).set = known.set;
    if (this.shown) this.list();
  }

  refresh() {
    for (const entry of this.charts.values()) entry.curves.forEach((held) => { held.key = null; });
    this.metrics.clear();
    if (this.shown) return this.show();
  }
}
