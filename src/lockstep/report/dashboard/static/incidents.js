// The views of incidents with their evidence, and of the config and its differences between runs.

import { count, empty, formatClock, formatSeconds, h, put, slices } from "./dom.js";
import { aborted, get, ofRun } from "./server.js";
import { swatch } from "./line_chart.js";

const SHOWN = 100;
const FILE_SHOWN = 60000;

export class IncidentsView {
  constructor(app) {
    this.app = app;
    this.body = h("div", { class: "incidents" });
    this.element = h("div", {}, this.body);
  }

  async show() {
    this.shown = true;
    this.run = this.app.primary()?.id;
    await this.refresh();
  }

  hide() { this.shown = false; }

  event(kind, data) { if (kind === "incident" && this.shown && data.run === this.run) this.refresh(); }

  async refresh() {
    if (!this.run) { put(this.body, empty("No run is chosen", "Choose a run on the left.")); return; }
    try {
      const { incidents } = await get(ofRun(this.run, "incidents"));
      this.app.incidents(this.run, incidents.length);
      const newest = [...incidents].sort((a, b) => (b.time || 0) - (a.time || 0));
      put(this.body, newest.length ? null : empty("No incident", "Nothing stalled or failed in this run."));
      let most = SHOWN;
      await slices(newest.slice(0, most), (incident) => this.body.append(this.card(incident)));
      if (newest.length > most) {
        const more = h("button", { type: "button", class: "button more", onclick: async () => { more.remove(); await slices(newest.slice(most), (incident) => this.body.append(this.card(incident))); most = newest.length; } }, `show ${count(newest.length - most, "older incident")}`);
        this.body.append(more);
      }
    } catch (error) { if (!aborted(error)) this.app.failed(error); }
  }

  card(incident) {
    const bad = /confirmed|act|high|error/.test(incident.level || "");
    const evidence = incident.evidence || [];
    return h("article", { class: `card incident${bad ? " bad" : ""}` },
      h("div", { class: "head" }, h("span", { class: `pill ${bad ? "bad" : "warn"}` }, incident.level || "notice"), h("h3", { class: "text" }, incident.kind),
        h("span", { class: "muted small" }, incident.time ? formatClock(incident.time) : "")),
      incident.text ? h("p", { class: "text" }, incident.text) : null,
      (incident.culprits || []).length ? h("div", { class: "row" }, h("span", { class: "tag" }, "culprits"), incident.culprits.slice(0, 24).map((name) => h("span", { class: "pill bad" }, name)), incident.culprits.length > 24 ? h("span", { class: "muted" }, `and ${incident.culprits.length - 24} more`) : null) : null,
      evidence.length ? h("details", { open: evidence.length <= 6 }, h("summary", {}, `Evidence: ${count(evidence.length, "observation")}`), h("ul", {}, evidence.slice(0, 200).map((line) => h("li", { class: "text" }, asText(line))))) : null,
      (incident.moments || []).length > 1 ? h("details", { open: incident.moments.length <= 6 }, h("summary", {}, "What happened"), h("table", {}, h("tbody", {}, incident.moments.slice(0, 100).map((moment) =>
        h("tr", {}, h("td", { class: "muted when" }, `+${formatSeconds(moment.time - incident.moments[0].time)}`), h("td", { class: "what" }, moment.what), h("td", {}, moment.text)))))) : null,
      incident.recovery ? h("div", { class: "row" }, h("span", { class: "tag" }, "recovery"), h("span", { class: "text" }, asText(incident.recovery))) : null,
      incident.fix ? h("div", { class: "row" }, h("span", { class: "tag" }, "fix"), h("span", { class: "text" }, incident.fix)) : null,
      (incident.files || []).length ? this.files(incident) : null);
  }

  files(incident) {
    const shown = h("pre", { class: "file", tabindex: "0", hidden: true });
    const open = async (name) => {
      try {
        const { text, cut } = await get(ofRun(this.run, `incidents/${encodeURIComponent(incident.id)}/file`), { name });
        const start = text.slice(0, FILE_SHOWN);
        put(shown, start, start.length < text.length || cut ? `\n… more in the run folder: ${name}` : "");
        shown.hidden = false;
      } catch (error) { if (!aborted(error)) this.app.failed(error); }
    };
    return h("details", {}, h("summary", {}, count(incident.files.length, "file")), h("div", { class: "row" }, incident.files.slice(0, 200).map((name) => h("button", { type: "button", class: "button small", onclick: () => open(name) }, h("code", {}, name)))), shown);
  }
}

const asText = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

export class ConfigView {
  constructor(app) {
    this.app = app;
    this.find = h("input", { type: "search", id: "config-find", placeholder: "Filter settings", "aria-label": "Filter settings", oninput: () => this.list() });
    this.note = h("span", { class: "note", role: "status" });
    this.body = h("div", { class: "card config" });
    this.element = h("div", {}, h("div", { class: "toolbar" }, h("label", { class: "grow" }, this.find), this.note), this.body);
  }

  async show() {
    this.shown = true;
    const runs = this.app.chosen();
    this.first = this.app.primary();
    this.others = runs.filter((run) => run.id !== this.first?.id).slice(0, 5);
    await this.refresh();
  }

  hide() { this.shown = false; }
  event() {}

  async refresh() {
    if (!this.first) { put(this.body, empty("No run is chosen", "Choose a run on the left.")); return; }
    try {
      if (!this.others.length) {
        const { config } = await get(ofRun(this.first.id, "config"));
        this.head = [this.first];
        this.rows = Object.entries(config).map(([key, value]) => [key, value]);
        this.summary = (n) => `${count(n, "setting")}. Tick a second run to see what differs.`;
      } else {
        const found = await Promise.all(this.others.map((run) => get("diff", { a: this.first.id, b: run.id })));
        const keys = new Map();
        found.forEach(({ changed }, at) => changed.forEach(({ key, a, b }) => {
          if (!keys.has(key)) keys.set(key, [a, ...this.others.map(() => undefined)]);
          keys.get(key)[at + 1] = b ?? null;
        }));
        this.head = [this.first, ...this.others];
        this.rows = [...keys].sort((a, b) => a[0].localeCompare(b[0])).map(([key, values]) => [key, ...values.map((value) => (value === undefined ? values[0] : value))]);
        this.summary = (n) => `${count(n, "setting")} that differ${n === 1 ? "s" : ""}`;
      }
      this.list();
    } catch (error) { if (!aborted(error)) this.app.failed(error); }
  }

  async list() {
    if (!this.rows) return;
    const text = this.find.value.toLowerCase();
    const rows = this.rows.filter((row) => row.some((cell) => asText(cell).toLowerCase().includes(text)));
    put(this.note, this.summary(rows.length));
    const several = this.head.length > 1;
    if (!rows.length) { put(this.body, empty(several && !text ? "The configs are equal" : "Nothing matches", several && !text ? "The chosen runs have the same settings." : "Search for other words.")); return; }
    const body = h("tbody", {});
    put(this.body, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"),
      this.head.map((run) => h("th", { scope: "col", class: "text" }, several && swatch(run.place), " ", several ? run.name : "value")))), body)));
    const turn = (this.turn = (this.turn || 0) + 1);
    await slices(rows, ([key, ...values]) => body.append(h("tr", {}, h("td", {}, h("code", {}, key)), values.map((value, at) => h("td", { class: at && asText(value) !== asText(values[0]) ? "differs" : "" }, h("code", {}, asText(value).slice(0, 2000)))))), () => turn !== this.turn);
  }
}
