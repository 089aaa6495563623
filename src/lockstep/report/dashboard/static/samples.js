// The view of samples: prompts and completions with their rewards, searched on the server, compared between steps.

import { change, onChange, state } from "./address.js";
import { count, debounce, empty, formatNumber, h, put } from "./dom.js";
import { aborted, get, ofRun } from "./server.js";
import { difference } from "./word_diff.js";

const PAGE = 25;
const SHOWN = 4000;
const MORE = 40000;
const MOST_PAIRS = 8;

export class SamplesView {
  constructor(app) {
    this.app = app;
    this.find = h("input", { type: "search", id: "samples-find", placeholder: "Search prompts and completions", "aria-label": "Search prompts and completions", ".value": state.query,
      oninput: debounce(250, () => change({ query: this.find.value })) });
    this.step = h("select", { "aria-label": "Step", onchange: () => change({ step: this.step.value === "" ? null : Number(this.step.value) }) });
    this.note = h("span", { class: "note", role: "status" });
    this.body = h("div", { class: "samples" });
    this.comparison = h("div", {});
    this.element = h("div", {}, h("div", { class: "toolbar" }, h("label", { class: "grow" }, this.find), h("label", {}, "step", this.step), this.note), this.comparison, this.body);
    onChange((names) => { if (this.shown && (names.has("query") || names.has("step"))) this.refresh(); });
  }

  async show() {
    this.shown = true;
    if (this.run !== this.app.primary()?.id) { this.run = this.app.primary()?.id; this.steps = []; put(this.comparison); }
    await this.refresh();
  }

  hide() { this.shown = false; }

  event(kind, data) {
    if (kind !== "step" || !this.shown || data.run !== this.run || !this.total) return;
    if (!this.offer && this.steps.length && data.step > this.steps[this.steps.length - 1]) {
      this.offer = h("button", { type: "button", class: "button", onclick: () => this.refresh() }, "newer steps: show");
      this.note.before(this.offer);
    }
  }

  async refresh() {
    this.offer?.remove();
    this.offer = null;
    if (this.find.value !== state.query) this.find.value = state.query;
    if (!this.run) { put(this.body, empty("No run is chosen", "Choose a run on the left.")); return; }
    this.offset = 0;
    await this.page(true);
  }

  async page(fresh) {
    if (this.request) this.request.abort();
    this.request = new AbortController();
    let data;
    try {
      data = await get(ofRun(this.run, "samples"), { step: state.step, query: state.query, offset: this.offset, limit: PAGE }, this.request.signal);
    } catch (error) {
      if (!aborted(error)) this.app.failed(error);
      return;
    }
    this.total = data.total;
    this.steps = [...(data.steps || [])].sort((a, b) => a - b);
    this.options();
    const searched = data.complete === false ? " so far: choose a step to search it whole" : "";
    put(this.note, state.query ? `${count(data.total, "match", "matches")}${searched}` : `${count(data.total, "sample")}${this.steps.length && state.step === null ? ` of step ${this.steps[this.steps.length - 1]}` : ""}`);
    if (fresh) put(this.body);
    this.more?.remove();
    if (!data.total) put(this.body, state.query || state.step !== null ? empty("Nothing matches", "Search for other words or in another step.") : empty("No sample is recorded yet", "Prompts and completions appear with the first finished step."));
    data.samples.forEach((sample) => this.body.append(this.card(sample)));
    this.offset += data.samples.length;
    if (this.offset < data.total && data.samples.length) {
      this.more = h("button", { type: "button", class: "button more", onclick: () => this.page(false) }, `show more of ${count(data.total - this.offset, "sample")}`);
      this.body.append(this.more);
    }
  }

  options() {
    const key = this.steps.join();
    if (key !== this.optionsKey) {
      this.optionsKey = key;
      put(this.step, h("option", { value: "" }, "newest"), this.steps.map((step) => h("option", { value: String(step) }, String(step))).reverse());
    }
    this.step.value = state.step === null ? "" : String(state.step);
  }

  card(sample) {
    const terms = Object.entries(sample.terms || {}).slice(0, 12);
    return h("article", { class: "card sample" },
      h("div", { class: "head" }, h("span", { class: "tag" }, `step ${sample.step}${sample.kind === "evaluation" ? ", evaluation" : ""}`), rewardPill(sample.reward), terms.map(([name, value]) => h("span", { class: "pill" }, `${name} ${formatNumber(value)}`)),
        sample.finish && sample.finish !== "stop" ? h("span", { class: "pill warn" }, sample.finish === "length" ? "truncated" : sample.finish) : null,
        sample.version !== null && sample.version !== undefined ? h("span", { class: "muted small" }, `weights ${sample.version}`) : null,
        sample.prompt_id && this.steps.length > 1 ? h("button", { type: "button", class: "button small", onclick: () => this.compare(sample) }, "compare steps") : null),
      h("div", { class: "two" },
        h("div", { class: "box" }, textBox("prompt", sample.prompt), sample.answer === null || sample.answer === undefined ? null : h("p", { class: "muted small" }, "expected: ", h("code", {}, sample.answer))),
        h("div", { class: "box" }, textBox("completion", sample.completion), sample.cut ? h("p", { class: "muted small" }, `${count(sample.cut, "character")} of both texts left out here; the run folder has them`) : null)));
  }

  compare(sample) {
    const steps = this.steps;
    const place = steps.indexOf(sample.step);
    const other = place > 0 ? steps[0] : steps[steps.length - 1];
    const [a, b] = [sample.step, other].sort((one, two) => one - two);
    const choose = (value, label) => h("select", { "aria-label": label, onchange: () => load() }, steps.map((step) => h("option", { value: String(step), selected: step === value }, String(step))));
    const [first, second] = [choose(a, "First step"), choose(b, "Second step")];
    const result = h("div", { "aria-live": "polite" });
    const load = async () => {
      try {
        const data = await get(ofRun(this.run, "samples/diff"), { prompt_id: sample.prompt_id, a: first.value, b: second.value });
        put(result, comparisonOf(data, first.value, second.value));
      } catch (error) { if (!aborted(error)) this.app.failed(error); }
    };
    put(this.comparison, h("section", { class: "card compare", "aria-label": "Comparison of two steps", tabindex: "-1" },
      h("div", { class: "head" }, h("h2", {}, "Same prompt, two steps"), h("label", {}, "step", first), h("label", {}, "against", second),
        h("button", { type: "button", class: "icon", "aria-label": "Close the comparison", onclick: () => { put(this.comparison); this.find.focus(); } }, "×")), h("div", { class: "box" }, textBox("prompt", sample.prompt)), result));
    this.comparison.firstChild.focus({ preventScroll: true });
    this.comparison.firstChild.scrollIntoView({ block: "start" });
    load();
  }
}

function rewardPill(reward) {
  if (reward === null || reward === undefined) return null;
  return h("span", { class: `pill ${reward > 0 ? "good" : "bad"}` }, `reward ${formatNumber(reward)}`);
}

/** A text, of which the start is shown until more is asked for. */
function textBox(label, text) {
  const shown = h("pre", { dir: "auto" });
  const whole = text ?? "";
  const foot = h("div", { class: "foot muted" });
  const spread = (most) => {
    put(shown, whole.slice(0, most));
    const left = whole.length - most;
    put(foot, left > 0 ? h("button", { type: "button", class: "button small", onclick: () => spread(most + MORE) }, `show more of ${count(left, "character")}`) : null);
  };
  spread(SHOWN);
  return [h("div", { class: "tag" }, label), shown, foot];
}

function comparisonOf(data, a, b) {
  if (!data.a.length && !data.b.length) return h("p", { class: "muted" }, "Neither step has this prompt.");
  const most = Math.max(1, Math.min(data.a.length, data.b.length, MOST_PAIRS));
  const pairs = Array.from({ length: most }, (_, at) => [data.a[at], data.b[at]]);
  return pairs.map(([one, two]) => {
    const parts = one && two ? difference(one.completion.slice(0, MORE), two.completion.slice(0, MORE)) : null;
    const side = (sample, step, kind) => h("div", { class: "box" }, h("div", { class: "head" }, h("span", { class: "tag" }, `step ${step}`), sample && rewardPill(sample.reward)),
      sample ? h("pre", { dir: "auto" }, parts ? parts.filter(([each]) => each === "same" || each === kind).map(([each, text]) => (each === "same" ? text : h(kind === "gone" ? "del" : "ins", {}, text))) : sample.completion.slice(0, SHOWN))
        : h("p", { class: "muted" }, "No sample of this prompt in this step: choose another one."));
    return h("div", { class: "two" }, side(one, a, "gone"), side(two, b, "new"));
  });
}
