// The page: runs, tabs, the live stream, colours of the page, keyboard.

import { change, onChange, state } from "./address.js";
import { HeatMapView } from "./heat_map.js";
import { CurvesView } from "./curves.js";
import { ago, announce, count, debounce, forgetColours, formatClock, formatSeconds, h, painted, put, visible } from "./dom.js";
import { GanttView } from "./gantt.js";
import { HostsView } from "./hosts.js";
import { ConfigView, IncidentsView } from "./incidents.js";
import { swatch } from "./line_chart.js";
import { SamplesView } from "./samples.js";
import { EventStream, ServerError, get, ofRun, setToken, takeToken } from "./server.js";
import { WaitGraphView, verdictCard } from "./wait_graph.js";

takeToken();
const $ = (id) => document.getElementById(id);
const VIEWS = [
  ["curves", "Curves", CurvesView], ["stages", "Stages", GanttView], ["waits", "Waits", WaitGraphView], ["hosts", "Hosts", HostsView],
  ["samples", "Samples", SamplesView], ["incidents", "Incidents", IncidentsView], ["config", "Config", ConfigView], ["communication", "Communication", HeatMapView],
];
const STATES = { running: "", finished: "good", failed: "bad", stopped: "warn" };
const THEMES = [["auto", "◐", "as the system"], ["light", "☀", "light"], ["dark", "☾", "dark"]];
const RUNS_MS = 15000;
const COMPARED = 8;

class App {
  constructor() {
    this.runs = [];
    this.views = new Map();
    this.verdicts = new Map();
    this.counted = new Map();
    this.stream = new EventStream((kind, data) => this.event(kind, data), (...args) => this.connection(...args));
    this.rows = new Map();
    this.listRuns = debounce(150, () => { this.drawRuns(); this.headline(); });
    this.tabs();
    this.theme(localStorage.getItem("lockstep-theme") || "auto");
    this.keyboard();
    $("theme").addEventListener("click", () => this.theme(THEMES[(THEMES.findIndex(([name]) => name === this.themeName) + 1) % 3][0]));
    $("help").addEventListener("click", () => this.help());
    $("skip").addEventListener("click", (event) => { event.preventDefault(); $("panel").focus(); });
    $("runs-find").addEventListener("input", () => this.drawRuns());
    $("runs-box").open = matchMedia("(min-width: 901px)").matches;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    onChange((names) => { if (names.has("runs")) this.picked(); else if (names.has("view")) this.show(); });
    setInterval(() => { if (!document.hidden) { this.headline(); this.stale(); } }, 1000);
    setInterval(() => { if (!document.hidden) this.loadRuns().catch(() => {}); }, RUNS_MS);
    this.begin();
  }

  async begin() {
    try {
      await this.loadRuns();
      $("notice").hidden = true;
      this.picked();
    } catch (error) { this.failed(error); }
  }

  async loadRuns() {
    const { runs } = await get("runs");
    const before = this.runs.map((run) => run.id).join();
    this.runs = runs.map((run) => ({ ...run, name: run.name || run.id }));
    this.chooseFirst();
    this.place();
    if (before !== this.runs.map((run) => run.id).join() || !this.drawn) this.drawRuns();
    else this.listRuns();
    this.drawn = true;
  }

  /** Chooses a run if the address names none: one that trains, if there is one. */
  chooseFirst() {
    if (state.runs.length || !this.runs.length) return false;
    const first = this.runs.find((run) => run.state === "running") || this.runs[0];
    change({ runs: [first.id] });
    return true;
  }

  /** The runs that are shown together; the first one is the run that single-run views show. */
  chosen() { return state.runs.map((id) => this.runs.find((run) => run.id === id)).filter(Boolean).slice(0, COMPARED); }
  primary() { return this.chosen()[0]; }

  /** Places among the chosen runs give colours and dashes: the first has the first colour. */
  place() { this.runs.forEach((run) => { run.place = Math.max(0, state.runs.indexOf(run.id)); }); }

  picked() {
    if (this.chooseFirst()) return; // comes here again with the run
    this.place();
    this.drawRuns();
    this.headline();
    const runs = this.chosen().map((run) => run.id);
    if (runs.join() !== this.following) {
      this.following = runs.join();
      if (runs.length) this.stream.start(runs);
    }
    this.probe();
    this.show();
  }

  async probe() {
    const run = this.primary();
    if (!run || this.probed === run.id) return;
    this.probed = run.id;
    const quiet = (part) => get(ofRun(run.id, part)).catch(() => null);
    // After the view's own requests: these only fill the tabs and the headline.
    await new Promise((done) => setTimeout(done, 300));
    const [waits, incidents] = await Promise.all([quiet("waits"), quiet("incidents")]);
    if (this.probed !== run.id) return;
    if (waits) this.verdicts.set(run.id, waits.verdict);
    if (incidents) this.incidents(run.id, incidents.incidents.length);
    this.drawTabs();
    this.headline();
  }

  incidents(id, n) { this.counted.set(id, n); this.drawTabs(); }

  // Tabs

  tabs() {
    put($("tabs"), VIEWS.map(([name, title]) => h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", onclick: () => change({ view: name }) }, title)));
    $("tabs").addEventListener("keydown", (event) => {
      const shown = VIEWS.map(([name]) => name);
      const at = shown.indexOf(state.view);
      const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      change({ view: shown[(next + shown.length) % shown.length] });
      $(`tab-${state.view}`).focus();
    });
  }

  drawTabs() {
    const incidents = this.counted.get(this.primary()?.id);
    for (const [name, title] of VIEWS) {
      const tab = $(`tab-${name}`);
      tab.setAttribute("aria-selected", String(name === state.view));
      tab.tabIndex = name === state.view ? 0 : -1;
      put(tab, title, name === "incidents" && incidents ? h("span", { class: "count" }, String(incidents)) : null);
    }
  }

  async show() {
    if (!VIEWS.some(([name]) => name === state.view)) { change({ view: "curves" }); return; }
    const [name, title, View] = VIEWS.find(([each]) => each === state.view);
    if (this.current && this.current.name !== name) this.current.view.hide();
    if (!this.views.has(name)) this.views.set(name, new View(this));
    const view = this.views.get(name);
    this.current = { name, view };
    this.drawTabs();
    this.headline();
    $("panel").setAttribute("aria-labelledby", `tab-${name}`);
    if ($("panel").firstChild !== view.element) put($("panel"), view.element);
    $(`tab-${name}`).scrollIntoView({ block: "nearest", inline: "nearest" });
    document.title = visible(`${title}${this.primary() ? ` · ${this.primary().name}` : ""} · Lockstep`);
    try { await view.show(); } catch (error) { this.failed(error); }
    await painted();
    performance.mark(`lockstep-${name}-shown`);
  }

  // Runs

  drawRuns() {
    const find = $("runs-find");
    find.hidden = this.runs.length < 9;
    const text = find.value.toLowerCase();
    const shown = this.runs.filter((run) => `${run.name} ${run.recipe} ${run.folder}`.toLowerCase().includes(text)).slice(0, 200);
    put($("runs-count"), this.runs.length > shown.length ? `${shown.length} of ${this.runs.length}` : String(this.runs.length));
    const focused = document.activeElement?.id;
    put($("runs"), shown.map((run) => this.runRow(run)));
    if (focused?.startsWith("run-")) $(focused)?.focus();
    if (!this.runs.length) put($("runs"), h("li", { class: "muted" }, "No run found yet."));
  }

  runRow(run) {
    const place = state.runs.indexOf(run.id);
    const share = run.steps ? Math.min(1, run.step / run.steps) : run.state === "finished" ? 1 : 0;
    const box = h("input", { type: "checkbox", id: `run-box-${run.id}`, "aria-label": `Overlay ${run.name}`, ".checked": place >= 0, onchange: () => this.tick(run, box.checked) });
    return h("li", { class: place === 0 ? "first" : "" }, h("label", {}, box),
      h("button", { type: "button", id: `run-${run.id}`, title: run.folder, "aria-current": place === 0 ? "true" : undefined, onclick: () => this.choose(run) },
        h("div", { class: "name" }, h("span", {}, run.name), place >= 0 && state.runs.length > 1 ? swatch(place) : null),
        h("div", { class: "facts" }, h("span", {}, run.recipe || ""), h("span", {}, run.state === "running" ? `step ${(run.step ?? 0).toLocaleString("en")}${run.steps ? ` of ${run.steps.toLocaleString("en")}` : ""}` : run.state)),
        h("div", { class: "progress", "aria-hidden": "true" }, h("i", { class: run.state, "--share": String(share) }))));
  }

  tick(run, on) {
    if (on && state.runs.length >= COMPARED) announce(`At most ${count(COMPARED, "run")} are shown together`);
    change({ runs: on ? [...state.runs, run.id].slice(-COMPARED) : state.runs.filter((id) => id !== run.id) });
  }

  choose(run) {
    const others = state.runs.includes(run.id) ? state.runs.filter((id) => id !== run.id) : state.runs.slice(1);
    change({ runs: [run.id, ...others] });
  }

  headline() {
    const run = this.primary();
    if (!run) { this.headlineKey = null; put($("headline"), h("h1", {}, this.runs.length ? "Choose a run" : "No run yet"), h("div", { class: "sub" }, this.runs.length ? "Tick one or several on the left." : "Runs appear here when they start.")); return; }
    const verdict = this.verdicts.get(run.id);
    const lasted = (run.state === "running" ? Date.now() / 1000 : run.updated || 0) - (run.started || 0);
    const facts = [run.recipe, `step ${(run.step ?? 0).toLocaleString("en")}${run.steps ? ` of ${run.steps.toLocaleString("en")}` : ""}`,
      run.started ? `${run.state === "running" ? "for" : "ran"} ${formatSeconds(Math.max(0, Math.round(lasted)))}` : null, run.updated ? `updated ${ago(run.updated)}` : null, run.message || null].filter(Boolean).join(" · ");
    const key = JSON.stringify([run.name, run.state, verdict, state.view === "waits"]);
    if (key !== this.headlineKey) {
      this.headlineKey = key;
      this.facts = h("div", { class: "sub" });
      put($("headline"), h("h1", {}, run.name), h("span", { class: `pill ${STATES[run.state] ?? ""}` }, run.state), this.facts, state.view === "waits" ? null : verdictCard(verdict, () => change({ view: "waits" })));
    }
    if (this.facts.textContent !== facts) put(this.facts, facts);
  }

  // Live

  event(kind, data) {
    if (kind === "hello") {
      if (data.resumed === false && this.version) this.current?.view.refresh?.();
      if (this.version && data.version !== this.version) this.notice("The server was updated. Reload the page.", ["reload", () => location.reload()]);
      this.version = data.version;
      return;
    }
    const run = this.runs.find((each) => each.id === data.run);
    if (run) {
      if (kind === "step") { run.step = Math.max(run.step ?? 0, data.step); run.updated = Date.now() / 1000; this.listRuns(); }
      if (kind === "state") { run.state = data.state; this.loadRuns().catch(() => {}); }
      if (kind === "waits" && "verdict" in data) { this.verdicts.set(run.id, data.verdict); this.headline(); }
      if (kind === "incident") { this.probed = null; this.probe(); announce(`New incident in ${run.name}`); }
    }
    this.current?.view.event(kind, data);
    // Curves keep what comes while another view is shown.
    if (this.current?.name !== "curves") this.views.get("curves")?.event(kind, data);
  }

  connection(kind, since, error) {
    const was = this.connected;
    this.connected = kind;
    this.since = since;
    if (error instanceof ServerError && (error.status === 401 || error.status === 403)) this.failed(error);
    if (kind === "live") {
      $("live").dataset.state = "live";
      put($("live").lastElementChild, "live");
      if (was === "stale") { $("notice").hidden = true; this.loadRuns().then(() => this.current?.view.refresh?.()).catch((failure) => this.failed(failure)); }
    } else this.stale();
  }

  stale() {
    if (this.connected !== "stale") return;
    $("live").dataset.state = "stale";
    const text = `reconnecting${this.since ? ` · stale since ${formatClock(this.since)}` : ""}`;
    if ($("live").lastElementChild.textContent !== text) put($("live").lastElementChild, text);
  }

  failed(error) {
    if (error instanceof ServerError && (error.status === 401 || error.status === 403)) { this.askToken(); return; }
    if (!(error instanceof ServerError) && error instanceof TypeError && /fetch|network|load/i.test(error.message)) return; // the connection mark says it
    console.error(error);
    this.notice(`${error.message}${error.remedy ? ` ${error.remedy}` : ""}`);
  }

  notice(text, action = null) {
    put($("notice"), text, h("button", { type: "button", class: "button", onclick: () => { if (action) action[1](); else $("notice").hidden = true; } }, action ? action[0] : "dismiss"));
    $("notice").hidden = false;
  }

  askToken() {
    if ($("token-input")?.isConnected) return;
    const input = h("input", { type: "password", id: "token-input", autocomplete: "off", "aria-label": "Token" });
    const form = h("form", { class: "token", onsubmit: (event) => { event.preventDefault(); setToken(input.value.trim()); put($("notice")); this.following = null; this.begin(); } },
      h("b", {}, "This address needs its token. "), h("code", {}, "lockstep dashboard"), " prints an address that holds it. ", input, " ", h("button", { class: "button" }, "continue"));
    put($("notice"), form);
    $("notice").hidden = false;
  }

  // Colours and keyboard

  theme(name) {
    const [, sign, text] = THEMES.find(([each]) => each === name) || THEMES[0];
    this.themeName = name;
    if (name === "auto") { delete document.documentElement.dataset.theme; localStorage.removeItem("lockstep-theme"); } else { document.documentElement.dataset.theme = name; localStorage.setItem("lockstep-theme", name); }
    $("theme").textContent = sign;
    $("theme").setAttribute("aria-label", `Colours: ${text}`);
    $("theme").title = `Colours: ${text}`;
    this.recolour();
  }

  recolour() {
    forgetColours();
    dispatchEvent(new Event("resize"));
    const view = this.current?.view;
    if (view) (view.recolour || view.redraw || view.refresh)?.call(view);
  }

  keyboard() {
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || $("help-dialog").open) return;
      if (event.key === "Escape" && event.target.matches?.("input[type=search]") && event.target.value === "") { event.target.blur(); return; }
      if (event.target.matches?.("input:not([type=checkbox]):not([type=range]), select, textarea")) return;
      if (event.key === "?") this.help();
      else if (event.key === "t") $("theme").click();
      else if (event.key === "/") { const find = $("panel").querySelector("input[type=search]"); if (!find) return; find.focus(); find.select(); }
      else if (/^[1-8]$/.test(event.key)) { const view = VIEWS[Number(event.key) - 1]; if (view) change({ view: view[0] }); }
      else if (event.key === "Escape") change({ from: null, to: null });
      else return;
      event.preventDefault();
    });
  }

  help() {
    const rows = [[["1", "…", "8"], "open a view"], [["←", "→"], "between tabs; in a chart: move the cursor; in stages: pan"], [["+", "−", "0"], "zoom a chart or the stages in, out, show all"],
      [["/"], "search in this view"], [["t"], "colours: system, light, dark"], [["Esc"], "show all steps, close"], [["?"], "this help"]];
    const dialog = $("help-dialog");
    put(dialog, h("h2", { id: "help-title" }, "Keyboard"), h("dl", {}, rows.map(([keys, text]) => [h("dt", {}, keys.map((key) => (key === "…" ? " … " : h("kbd", {}, key)))), h("dd", {}, text)])),
      h("p", { class: "muted" }, "Drag across a chart to zoom; double-click to show all. The address keeps what you see, and never the token."),
      h("button", { type: "button", class: "button", onclick: () => dialog.close() }, "close"));
    dialog.showModal();
  }
}

window.addEventListener("unhandledrejection", (event) => console.error(event.reason));
new App();
