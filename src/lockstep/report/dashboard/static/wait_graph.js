// The view of waits: which process waits for which, with the verdict on it.

import { announce, count, empty, formatSeconds, h, paint, put, ranges, s, visible } from "./dom.js";
import { aborted, get, ofRun } from "./server.js";

const SHOWN_ONE_BY_ONE = 24;
const NODE = { width: 196, height: 58, gap: 14, between: 96, pad: 24, caption: 26 };
const WITHIN_MS = 1000;
const ASKED_MS = 5000;

/**
 * Nodes and edges as drawn. Beyond some dozens of processes those of one role, stage and state that wait for the same
 * roles become one node with their ranks; culprits always stay one by one.
 */
export function grouped(nodes, edges, most = SHOWN_ONE_BY_ONE) {
  const collapse = nodes.length > most;
  const waitsFor = new Map();
  const byName = new Map(nodes.map((node) => [node.name, node]));
  if (collapse) {
    for (const edge of edges) {
      const end = byName.get(edge.to);
      if (!waitsFor.has(edge.from)) waitsFor.set(edge.from, new Set());
      waitsFor.get(edge.from).add(end ? (end.culprit ? end.name : end.role) : edge.to);
    }
  }
  const groups = new Map();
  const home = new Map();
  for (const node of nodes) {
    const apart = !collapse || node.culprit;
    const key = apart ? `=${node.name}` : JSON.stringify([node.role, node.stage, node.state, [...(waitsFor.get(node.name) || [])].sort()]);
    if (!groups.has(key)) groups.set(key, { key, role: node.role, stage: node.stage, state: node.state, culprit: Boolean(node.culprit), members: [] });
    groups.get(key).members.push(node);
    home.set(node.name, key);
  }
  const links = new Map();
  for (const edge of edges) {
    const [from, to] = [home.get(edge.from), home.get(edge.to)];
    if (!from || !to || (from === to && collapse)) continue;
    const key = `${from}\n${to}`;
    const link = links.get(key) || { from, to, why: edge.why, seconds: 0, waits: 0, kinds: new Set() };
    link.seconds = Math.max(link.seconds, edge.seconds || 0);
    link.kinds.add(edge.why);
    link.waits += 1;
    links.set(key, link);
  }
  for (const group of groups.values()) {
    const ranks = group.members.map((node) => node.rank).filter((rank) => rank !== null && rank !== undefined);
    group.label = group.members.length === 1 ? group.members[0].name : ranks.length ? `${group.role} ${ranges(ranks)}` : `${group.role} (${group.members.length})`;
  }
  return { groups: [...groups.values()], links: [...links.values()] };
}

/**
 * Places the groups in layers: who waits for nobody stands furthest right, and left of it who waits for it. A role stands
 * together in its layer, its culprits by themselves; roles without any wait stand in a layer of their own at the end.
 */
export function layout(groups, links) {
  const roleOf = (group) => `${group.culprit ? "!" : ""}${group.role}`;
  const roles = new Map();
  for (const group of groups) {
    if (!roles.has(roleOf(group))) roles.set(roleOf(group), []);
    roles.get(roleOf(group)).push(group);
  }
  const byKey = new Map(groups.map((group) => [group.key, group]));
  const next = new Map([...roles.keys()].map((key) => [key, new Set()]));
  const linked = new Set();
  for (const link of links) {
    const [from, to] = [roleOf(byKey.get(link.from)), roleOf(byKey.get(link.to))];
    linked.add(from).add(to);
    if (from !== to) next.get(from).add(to);
  }
  const depth = new Map();
  const measure = (key, path) => {
    if (depth.has(key)) return depth.get(key);
    if (path.has(key)) return 0;
    path.add(key);
    const found = Math.max(-1, ...[...next.get(key)].map((to) => measure(to, path))) + 1;
    path.delete(key);
    depth.set(key, found);
    return found;
  };
  const layers = new Map();
  for (const key of [...roles.keys()].sort()) {
    const layer = linked.size && !linked.has(key) ? -1 : measure(key, new Set());
    if (!layers.has(layer)) layers.set(layer, []);
    layers.get(layer).push(key);
  }
  const tall = (keys) => keys.reduce((sum, key) => sum + NODE.caption + roles.get(key).length * (NODE.height + NODE.gap), 0) - NODE.gap;
  const tallest = Math.max(...[...layers.values()].map(tall));
  const captions = [];
  let x = NODE.pad;
  for (const layer of [...layers.keys()].sort((a, b) => b - a)) {
    let y = NODE.pad + (tallest - tall(layers.get(layer))) / 2;
    for (const key of layers.get(layer)) {
      captions.push({ text: `${key.replace(/^!/, "")}${key.startsWith("!") ? ", culprit" : ""}`, x, y: y + NODE.caption - 10 });
      y += NODE.caption;
      for (const group of roles.get(key)) { group.x = x; group.y = y; y += NODE.height + NODE.gap; }
    }
    x += NODE.width + NODE.between;
  }
  return { width: Math.max(x - NODE.between + NODE.pad, 320), height: 2 * NODE.pad + 24 + tallest, captions };
}

export class WaitGraphView {
  constructor(app) {
    this.app = app;
    this.verdict = h("div", {});
    this.drawing = h("div", { class: "graph card" });
    this.list = h("div", { class: "card waits" });
    this.note = h("span", { class: "note", role: "status" });
    this.body = h("div", { class: "graph-body" });
    this.element = h("div", {}, this.verdict, this.body);
    this.paintAll = () => this.draw();
  }

  async show() {
    this.shown = true;
    this.run = this.app.primary()?.id;
    await this.refresh();
  }

  hide() { this.shown = false; clearInterval(this.asking); this.asking = 0; }

  async refresh() {
    this.asking ||= setInterval(() => { if (!document.hidden && (this.data?.live || this.app.primary()?.state === "running")) this.refresh(); }, ASKED_MS);
    if (!this.run) { put(this.body, empty("No run is chosen", "Choose a run on the left.")); return; }
    try { this.take(await get(ofRun(this.run, "waits"))); } catch (error) { if (!aborted(error)) this.app.failed(error); }
  }

  event(kind, data) {
    if (kind !== "waits" || !this.shown || data.run !== this.run) return;
    this.next = data;
    this.timer ||= setTimeout(() => { this.timer = 0; if (this.shown && this.next) this.take(this.next); }, WITHIN_MS);
  }

  async take(data) {
    if (!data.nodes) { await this.refresh(); return; }
    this.next = null;
    this.data = data;
    paint(this.paintAll);
  }

  draw() {
    const { nodes, edges, verdict } = this.data;
    put(this.verdict, verdictCard(verdict), verdict && (verdict.fix || verdict.evidence?.length) ? h("div", { class: "card waits why" },
      verdict.evidence?.length ? [h("h2", {}, "Evidence"), h("ul", {}, verdict.evidence.slice(0, 40).map((line) => h("li", { class: "text" }, line)))] : null,
      verdict.fix ? [h("h2", {}, "Fix"), h("p", { class: "text" }, verdict.fix)] : null) : null);
    if (!nodes.length) { put(this.body, empty("No process is shown", `${this.data.message ? `${this.data.message[0].toUpperCase()}${this.data.message.slice(1)}. ` : ""}The graph shows the processes of a run on this host while it works.`)); return; }
    const { groups, links } = grouped(nodes, edges);
    const place = layout(groups, links);
    const focused = document.activeElement?.getAttribute?.("data-key");
    const svg = s("svg", { viewBox: `0 0 ${place.width} ${place.height}`, width: place.width, height: place.height, role: "group", "aria-label": `${count(groups.length, "node")}, ${count(links.length, "wait")}` },
      s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, s("path", { d: "M0 0L8 4L0 8z" }))));
    svg.style.width = `max(${0.75 * place.width}px, min(100%, ${place.width}px))`;
    for (const { text, x, y } of place.captions) svg.append(s("text", { class: "caption", x, y }, text));
    const byKey = new Map(groups.map((group) => [group.key, group]));
    for (const link of links) svg.append(drawLink(link, byKey));
    groups.forEach((group, at) => svg.append(drawNode(group, links, at === 0)));
    svg.addEventListener("keydown", (event) => this.key(event, svg, groups));
    put(this.drawing, svg);
    put(this.list, this.table(links, byKey, nodes.length, groups.length));
    if (!this.drawing.isConnected) put(this.body, this.drawing, this.list);
    if (focused) svg.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  key(event, svg, groups) {
    const at = [...svg.querySelectorAll(".node")].indexOf(document.activeElement);
    if (at < 0) return;
    const here = groups[at];
    const score = {
      ArrowRight: (other) => (other.x > here.x ? other.x - here.x + Math.abs(other.y - here.y) : NaN),
      ArrowLeft: (other) => (other.x < here.x ? here.x - other.x + Math.abs(other.y - here.y) : NaN),
      ArrowDown: (other) => (other.x === here.x && other.y > here.y ? other.y - here.y : NaN),
      ArrowUp: (other) => (other.x === here.x && other.y < here.y ? here.y - other.y : NaN),
    }[event.key];
    if (!score) return;
    event.preventDefault();
    const best = groups.filter((other) => score(other) >= 0).sort((a, b) => score(a) - score(b))[0];
    if (!best) return;
    const next = svg.querySelectorAll(".node")[groups.indexOf(best)];
    svg.querySelectorAll(".node").forEach((node) => node.setAttribute("tabindex", node === next ? "0" : "-1"));
    next.focus();
    announce(best.label);
  }

  table(links, byKey, processes, shown) {
    const rows = [...links].sort((a, b) => b.seconds - a.seconds).slice(0, 60);
    return [
      h("h2", {}, "Waits ", h("small", {}, `${count(processes, "process", "processes")}${shown < processes ? ` in ${count(shown, "node")}` : ""}`)),
      rows.length ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "waits"), h("th", {}, "for"), h("th", {}, "in"), h("th", { class: "right" }, "lasts"))),
        h("tbody", {}, rows.map((link) => h("tr", {}, h("td", {}, byKey.get(link.from).label), h("td", {}, byKey.get(link.to).label),
          h("td", {}, [...link.kinds].slice(0, 3).join(", ")), h("td", { class: "right" }, formatSeconds(link.seconds)))))) : h("p", { class: "muted" }, "No process waits for another one."),
    ];
  }
}

export function verdictCard(verdict, onclick) {
  if (!verdict) return null;
  const bad = /confirmed|act|high/.test(verdict.level || "");
  return h(onclick ? "button" : "div", { class: `verdict${bad ? " bad" : ""}`, type: onclick ? "button" : undefined, onclick },
    h("b", {}, verdict.level || "verdict"), h("span", {}, verdict.text), (verdict.culprits || []).slice(0, 6).map((name) => h("i", { class: "pill bad" }, name)));
}

function drawLink(link, byKey) {
  const [from, to] = [byKey.get(link.from), byKey.get(link.to)];
  const middle = NODE.height / 2;
  let path;
  if (from === to || from.x === to.x) {
    const x = from.x + NODE.width;
    path = `M${x} ${from.y + middle}C${x + 46} ${from.y + middle} ${x + 46} ${to.y + middle + 8} ${x + 3} ${to.y + middle + 8}`;
  } else if (to.x > from.x + NODE.width + NODE.between) {
    const [a, b, below] = [from.x + NODE.width / 2, to.x + NODE.width / 2, Math.max(from.y, to.y) + NODE.height + 36];
    path = `M${a} ${from.y + NODE.height}C${a} ${below} ${b} ${below} ${b} ${to.y + NODE.height + 3}`;
  } else if (to.x > from.x) {
    const [a, b] = [from.x + NODE.width, to.x - 3];
    path = `M${a} ${from.y + middle}C${a + 50} ${from.y + middle} ${b - 50} ${to.y + middle} ${b} ${to.y + middle}`;
  } else {
    const [a, b] = [from.x + NODE.width / 2, to.x + NODE.width / 2];
    const below = Math.max(from.y, to.y) + NODE.height;
    path = `M${a} ${from.y + NODE.height}C${a} ${below + 34} ${b} ${below + 34} ${b} ${to.y + NODE.height + 3}`;
  }
  const line = s("path", { class: `link${to.culprit ? " bad" : ""}`, d: path, "marker-end": "url(#arrow)" });
  line.style.strokeWidth = `${Math.min(4, 1.25 + Math.log10(1 + link.waits))}px`;
  line.append(s("title", {}, `${from.label} waits for ${to.label}: ${[...link.kinds].join(", ")}, ${formatSeconds(link.seconds)}`));
  return line;
}

const short = (text, most) => { const shown = visible(text); return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown; };

function drawNode(group, links, first) {
  const out = links.filter((link) => link.from === group.key);
  const longest = Math.max(0, ...out.map((link) => link.seconds));
  const state = [group.stage, group.state].filter(Boolean).join(", ");
  const hosts = [...new Set(group.members.map((node) => node.host).filter(Boolean))];
  const doing = group.members.length === 1 && group.members[0].doing ? ` (${group.members[0].doing})` : "";
  const text = `${group.label}${group.culprit ? ", culprit" : ""}: ${state || "no stage"}${doing}${out.length ? `, waits ${formatSeconds(longest)}` : ""}; ${hosts.slice(0, 4).join(", ")}${hosts.length > 4 ? ` and ${hosts.length - 4} more hosts` : ""}`;
  const node = s("g", { class: `node${group.culprit ? " culprit" : ""}${group.members.length > 1 ? " many" : ""}`, transform: `translate(${group.x} ${group.y})`, tabindex: first ? "0" : "-1", role: "img", "aria-label": visible(text), "data-key": group.key });
  if (group.members.length > 1) node.append(s("rect", { class: "behind", x: 5, y: 5, width: NODE.width, height: NODE.height, rx: 10 }));
  node.append(
    s("rect", { width: NODE.width, height: NODE.height, rx: 10 }),
    s("text", { class: "label", x: 14, y: 24 }, `${group.culprit ? "⚠ " : ""}${short(group.label, group.culprit ? 20 : 23)}`),
    s("text", { class: "state", x: 14, y: 43 }, short(`${state || "–"}${out.length && longest ? ` · ${formatSeconds(longest)}` : ""}`, 28)),
    s("title", {}, text),
  );
  return node;
}
